"""A measurement of a tiny model: its counts, its parts, its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fakes import FakeModelSource
from tiny_models import INSTRUCTION_SETS, SMALL_SPEC, LetterTokenizer, tiny_engine

from batchinfer.bench.job import run_bench
from batchinfer.bench.report import BenchReport, number, size
from batchinfer.bench.show import to_drawn_text, to_text
from batchinfer.bench.startup import process_age_s
from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.errors import InputError
from batchinfer.settings import job_settings

SHARED = "The same beginning of all prompts. "


def bench(folder: Path, prompts: list[str | None], *, window_rows: int | None = None, **flags: Any) -> BenchReport:
    path = folder / "p.parquet"
    pq.write_table(pa.table({"prompt": pa.array(prompts, pa.string())}), path)
    engine = flags.pop("engine", tiny_engine)

    def resolve(name: str) -> FakeModelSource:
        return FakeModelSource(spec=SMALL_SPEC, tokenizer=LetterTokenizer())

    flags = {"prompts": str(path), "model": "m", "ignore_eos": True, "max_tokens": 8, **flags}
    settings = job_settings(flags, {}, None, needs_output=False)
    return run_bench(
        settings,
        engine_factory=lambda source, config: engine(config),
        resolve=resolve,  # type: ignore[arg-type]
        window_rows=window_rows,
        startup_s=100.0,
    )


def strict_json(report: BenchReport) -> dict[str, Any]:
    return json.loads(json.dumps(report.to_dict(), allow_nan=False))


def test_counts_seconds_and_floor(tmp_path: Path) -> None:
    value = strict_json(bench(tmp_path, [SHARED + "a", SHARED + "b", SHARED + "b", None], threads=1))
    assert (value["num_rows_ok"], value["num_rows_failed"], value["failed_by_code"]) == (3, 1, {"prompt_null": 1})
    assert (value["num_output_tokens"], value["num_unique_prompt_tokens"]) == (24, len(SHARED) + 2)
    # The duplicate is neither computed nor due: 37 prompt tokens and two samples of 7 more. In the second of two
    # layers the shared tokens need their keys and values only.
    layer, kv = 48 * 10 * 16 + 96 * 48 + 3 * 48 * 80, 48 * 4 * 16
    num_computed = len(SHARED) + 2 + 2 * 7
    assert value["parts"]["matmul"]["flops"] == 2 * (2 * layer * num_computed - (layer - kv) * len(SHARED))
    assert value["generation_s"] == pytest.approx(sum(value["seconds"].values()) - value["seconds"]["load"])
    assert value["share_of_optimum"] == pytest.approx(value["floor"]["seconds"] / value["generation_s"])
    assert sum(part["share"] for part in value["parts"].values()) == pytest.approx(value["share_of_optimum"])
    assert value["first_row_s"] > 100.0
    assert value["sharing"] == {"achieved": value["sharing"]["possible"], "possible": pytest.approx(71 / 108)}
    assert 0 < value["kv"]["used_bytes"] <= value["kv"]["pool_bytes"]
    assert value["kv"]["planned_bytes"] == (len(SHARED) + 2 + 2 * 7) * 2 * 2 * 2 * 16 * 4
    assert value["params"]["ignore_eos"] is True
    assert value["engine"]["kernels"] == "torch"


def test_the_floor_is_of_rows_and_not_of_what_the_engine_did(tmp_path: Path) -> None:
    prompts: list[str | None] = [SHARED + "a", SHARED + "b", SHARED + "b"]
    shared, alone = (strict_json(bench(tmp_path, prompts, prefix_sharing=sharing)) for sharing in (True, False))
    assert alone["num_prompt_tokens_computed"] == 3 * (len(SHARED) + 1)
    for name in ("matmul", "attention", "head"):
        assert alone["parts"][name]["flops"] == shared["parts"][name]["flops"]


def test_windows_add_up(tmp_path: Path) -> None:
    prompts: list[str | None] = [SHARED + letter for letter in "abcd"]
    value = strict_json(bench(tmp_path, prompts, window_rows=2))
    assert value["num_rows_ok"] == 4
    assert value["num_unique_prompt_tokens"] == 2 * (len(SHARED) + 2)
    assert value["num_output_tokens"] == 4 * 8


def test_rows_that_end_by_themselves(tmp_path: Path) -> None:
    """Without --ignore-eos fewer tokens may come out, and only they are due."""
    letters: list[str | None] = [chr(ord("a") + i) * 5 for i in range(24)]
    free = strict_json(bench(tmp_path, letters, ignore_eos=False, max_tokens=60))
    assert free["num_output_tokens"] < 24 * 60, "no row of this random model met an end of sequence"
    assert free["num_rows_truncated"] < 24
    forced = strict_json(bench(tmp_path, letters, max_tokens=60))
    assert forced["num_output_tokens"] == 24 * 60
    assert free["parts"]["head"]["flops"] == 2 * 48 * 272 * free["num_output_tokens"]


def test_no_row_can_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no row of .*p\.parquet could run \(prompt_null: 2\)"):
        bench(tmp_path, [None, None])


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ kernels were built")
def test_the_kernels_in_use_are_measured(tmp_path: Path) -> None:
    def engine(config: EngineConfig) -> Engine:
        return tiny_engine(config, dtype=torch.bfloat16, kernels=INSTRUCTION_SETS[0])

    value = strict_json(bench(tmp_path, ["abc", "abd"], engine=engine))
    assert value["engine"]["kernels"] == INSTRUCTION_SETS[0]
    assert value["floor"]["flops_per_s"] > 1e6
    assert value["parts"]["head"]["bytes"] >= 2 * 48 * 272 * 8


class TimesItsParts:
    """What kernels may offer: seconds of their parts since the last call."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> dict[str, float]:
        self.num_calls += 1
        return {"products": 0.004, "attention": 0.002, "head": 0.001, "silu": 0.0005} if self.num_calls > 1 else {}


def test_seconds_of_parts_where_the_kernels_tell(tmp_path: Path) -> None:
    times = TimesItsParts()

    def engine(config: EngineConfig) -> Engine:
        engine = tiny_engine(config)
        engine.model.kernel_times = times  # type: ignore[attr-defined]
        return engine

    report = bench(tmp_path, ["abc", "abd"], engine=engine)
    value = strict_json(report)
    assert times.num_calls == 2  # once before, to begin at zero
    measured = {name: part["measured_s"] for name, part in value["parts"].items()}
    assert measured == {
        "matmul": 0.004,
        "attention": 0.002,
        "head": 0.001,
        "silu": 0.0005,
        "rest": pytest.approx(value["generation_s"] - 0.0075),
    }
    text = to_text(report)
    assert "measured s" in text
    assert "\nsilu " in text


def test_text(tmp_path: Path) -> None:
    report = bench(tmp_path, [SHARED + "a", SHARED + "b"])
    text = to_text(report)
    share = round(100 * report.share_of_optimum)
    assert text.startswith(f"{share} % of the optimum: matmul ")
    assert "measured s" not in text
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[2:7]] == ["part", "matmul", "attention", "head", "total"]
    for label in ("machine", "reaches", "tokens", "sharing", "KV", "seconds", "tokens/s"):
        assert f"\n{label} " in text


def test_a_drawn_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    report = bench(tmp_path, [SHARED + "a", SHARED + "b"])
    text = to_drawn_text(report)
    assert "─" in text
    for expected in (report.headline(), "matmul", "total", "tokens/s"):
        assert expected in text


def test_numbers_have_three_digits() -> None:
    assert (number(0), number(999), number(14_249_123_456_789), number(9.996e17)) == ("0", "999", "14.2 T", "1 E")
    assert (size(12), size(61_900_000_000)) == ("12 B", "61.9 GB")


def test_the_age_of_this_process(tmp_path: Path) -> None:
    assert 0 < process_age_s() < 1e6
    assert process_age_s() <= process_age_s()
    assert process_age_s(tmp_path / "none") > 0
