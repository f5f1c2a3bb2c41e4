"""The comparisons with lm-evaluation-harness run offline, agree, and say by their exit code when they do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from peer_models import save_model

STEM = " ".join(f"w{i * 7 % 300}" for i in range(40))


@pytest.fixture
def recipe(repo_root: Path, bench_recipe: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(repo_root / "recipes"))
    return bench_recipe


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """Arguments for a model with an end-of-sequence token and texts that share a beginning."""
    texts = [f"{STEM} w{i} w{i + 1} " + " ".join(f"w{(i + 3) * j % 300}" for j in range(20)) for i in range(6)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "texts.parquet")
    folder = tmp_path / "model"
    save_model("qwen2", folder, num_ids=310, eos_token_id=2)
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return [str(tmp_path / "texts.parquet"), "--model", str(folder), "--dtype", "float32", "--threads", "1"]


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("window", [None, 40, 17])
def test_log_likelihoods_are_equal(
    window: int | None, recipe: Any, job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Rolling ones in windows, too: the same windows."""
    more = [] if window is None else ["--window", str(window)]
    assert recipe("score_parity").main([*job, "--rows", "5", *more]) == 0
    result = last_line(capsys)
    assert (result["num_rolling"], result["num_continuations"]) == (5, 0 if window == 17 else 20)
    assert result["num_tokens"] > 300
    assert result["max_difference_per_token"] < 1e-5
    assert result["num_greedy_differ"] == 0


def test_a_difference_is_seen(
    recipe: Any, job: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = recipe("score_parity")
    original = module.loglikelihood
    monkeypatch.setattr(module, "loglikelihood", lambda *args: [(nll + 1, top) for nll, top in original(*args)])
    assert module.main([*job, "--rows", "3"]) == 1
    assert last_line(capsys)["worst"]["kind"] == "continuation"


def test_texts_are_split_where_a_word_ends(recipe: Any) -> None:
    module = recipe("score_parity")
    assert module.split("one two three four") == ("one two three", " four")
    assert module.split("oneword") == ("", "oneword")
    assert [row for row, _, _ in module.continuations(["some text a", "some text b", "some text a"])] == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]


def test_speed_is_told_with_what_was_read(
    recipe: Any, job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "figures.md"
    document.write_text("# Figures\n")
    options = [
        "--rows",
        "3",
        "--slices",
        "2",
        "--continuation",
        " w5 w6",
        "--continuation",
        " w7 w8",
        "--write",
        document,
    ]
    assert recipe("score_speed").main([*job, *map(str, options)]) == 0
    result = last_line(capsys)
    assert (result["num_prompts"], result["num_pairs"], len(result["ours_each_s"])) == (3, 6, 2)
    assert result["num_tokens_computed"] <= result["num_unique_tokens"] + 6 < result["num_tokens"]
    assert result["max_difference_per_token"] < 1e-5
    assert "<!-- score:speed:begin -->" in document.read_text()


def test_bad_input_is_named(recipe: Any, job: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe("score_parity").main(["none.parquet", *job[1:]]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert recipe("score_speed").main(["none.parquet", *job[1:]]) == 2
