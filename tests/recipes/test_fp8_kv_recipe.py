"""The recipe that measures what KV in fp8 changes, on a tiny model."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_folder import write_tiny_llama

from batchinfer.kernels.choice import FORCE_VARIABLE


def test_it_tells_what_fp8_changes(
    repo_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(repo_root / "recipes" / "bench"))
    monkeypatch.setenv(FORCE_VARIABLE, "torch")  # which the recipe sets: put back behind the test
    recipe = importlib.import_module("fp8_kv")
    (tmp_path / "model").mkdir()
    model = write_tiny_llama(tmp_path / "model")
    pq.write_table(pa.table({"prompt": [f"row {i} says" for i in range(6)]}), tmp_path / "p.parquet")
    words = [str(tmp_path / "p.parquet"), "--model", str(model), "--rows", "3", "--max-tokens", "4", "--threads", "1"]
    assert recipe.main([*words, "--dtype", "float32"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["num_prompts"] == 3
    assert found["kv_bytes_per_token_auto"] == 2 * 2 * 16 * 4
    assert found["kv_bytes_per_token_fp8"] == 2 * 2 * (16 + 4)
    assert found["num_scored_tokens"] > 3 * 4
    assert 0 < found["logprob_difference_mean"] <= found["logprob_difference_p99"] <= found["logprob_difference_max"]
    assert found["equal_before_first_difference"] <= found["equal_tokens"] <= 1


def test_tokens_count_up_to_the_first_other_one(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repo_root / "recipes" / "bench"))
    recipe = importlib.import_module("fp8_kv")
    found = recipe.equal_tokens({"auto": [[1, 2, 3, 4], [5, 6, 7, 8]], "fp8": [[1, 9, 3, 4], [5, 6, 7, 8]]})
    assert found == {
        "equal_tokens": 7 / 8,
        "equal_rows": 0.5,
        "equal_first_tokens": 1.0,
        "equal_before_first_difference": 5 / 8,
    }
