"""The step profile: own times of nested parts, and a tiny model's steps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_models import INSTRUCTION_SETS, tiny_engine

from batchinfer.config import EngineConfig
from batchinfer.engine.core import EngineRun
from batchinfer.engine.engine import Engine


@pytest.fixture
def recipe(bench_recipe: Callable[[str], ModuleType]) -> ModuleType:
    return bench_recipe("step_profile")


class Layers:
    def outer(self) -> str:
        time.sleep(0.02)
        self.inner()
        return "done"

    def inner(self) -> None:
        time.sleep(0.05)


def test_a_part_has_its_own_time_only(recipe: ModuleType) -> None:
    timers = recipe.Timers()
    with timers.around(Layers, "outer", "outer"), timers.around(Layers, "inner", "inner"):
        assert Layers().outer() == "done"
    assert timers.seconds["inner"] >= 0.05
    assert 0.02 <= timers.seconds["outer"] < timers.seconds["inner"]
    assert timers.returned["outer"] == "done"
    timers.seconds.clear()
    Layers().inner()
    assert not timers.seconds  # the class is as it was


ENGINES: list[Any] = [pytest.param(None, id="torch"), *(pytest.param(name, id=name) for name in INSTRUCTION_SETS[:1])]


@pytest.mark.parametrize("kernels", ENGINES)
def test_only_steps_that_decode_all_rows_count(recipe: ModuleType, kernels: str | None) -> None:
    dtype = torch.float32 if kernels is None else torch.bfloat16
    engine = tiny_engine(EngineConfig(max_batch_tokens=24, max_num_seqs=4), dtype=dtype, kernels=kernels)
    engine.check_integrity = False
    before = dict(vars(EngineRun)), dict(vars(engine.model))
    found = recipe.profile(engine, num_rows=4, prompt_tokens=10, steps=6)
    assert (dict(vars(EngineRun)), dict(vars(engine.model))) == before
    # The first row has one token when the last prompt is computed, so it ends a step or more before the others.
    assert 4 <= found["num_steps"] <= 7
    parts = found["parts_s"]
    assert set(parts) >= {"kernels", "schedule", "inputs", "sample", "collect", "advance", "append", "count", "rest"}
    assert ("call" in parts) == (kernels is not None)
    assert all(seconds > 0 for seconds in parts.values())
    assert found["host_s"] == pytest.approx(sum(parts.values()) - parts["kernels"])
    assert 0 < found["host_share"] < 1
    assert found["end_of_a_row_s"]["detokenize"] > 0
    assert found["end_of_a_row_s"]["finish"] > 0


def test_rows_that_cannot_run_together(recipe: ModuleType) -> None:
    engine = tiny_engine(EngineConfig(max_num_seqs=2))
    with pytest.raises(ValueError, match="4 rows never decoded together"):
        recipe.profile(engine, num_rows=4, prompt_tokens=4, steps=3)


def test_prints_tables_and_json_last(recipe: ModuleType, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--model", str(tiny_model), "--rows", "8,2", "--prompt-tokens", "5", "--steps", "4", "--threads", "1"]
    recipe.main(command)
    out = capsys.readouterr().out
    value = json.loads(out.splitlines()[-1])
    assert value["kernels"] == "torch"  # float32
    assert [(of["rows"], of["bar"]) for of in value["results"]] == [(8, 0.2), (2, None)]
    assert "**8 rows**" in out
    assert "(the bar is 20 %)" in out
    assert "| kernels |" in out


@pytest.mark.parametrize("bad", [["--rows", "0"], ["--rows", "x"], ["--steps", "0"]])
def test_bad_arguments_are_refused(recipe: ModuleType, bad: list[str]) -> None:
    with pytest.raises(SystemExit):
        recipe.main(bad)


def test_a_model_of_ones_own_is_profiled_too(recipe: ModuleType) -> None:
    """Whatever answers to LanguageModel: its methods are the kernels."""
    tiny = tiny_engine()
    engine = Engine.from_parts(tiny.model, tiny.tokenizer, (), 64)
    assert recipe.profile(engine, num_rows=2, prompt_tokens=4, steps=3)["num_steps"] >= 2
