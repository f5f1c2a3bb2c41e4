"""--kv-dtype on the command line: what runs, what is said of it, what it costs in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_models import INSTRUCTION_SETS
from typer.testing import CliRunner, Result

from batchinfer.cli.main import app
from batchinfer.kernels.cpu import library
from batchinfer.kernels.cpu.choice import TORCH


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Path]) -> Path:
    return tiny_llama(config={"torch_dtype": "bfloat16"})


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.parquet"
    pq.write_table(pa.table({"prompt": [f"a shared beginning, then row {i}" for i in range(5)]}), path)
    return path


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


def run(model: Path, prompts: Path, output: Path, *words: object) -> Result:
    fixed = ("--device", "cpu", "--threads", 1, "--max-tokens", 4, "--prompt-logprobs")
    return invoke("run", prompts, "--model", model, "--output", output, *fixed, *words)


def test_it_runs_and_the_output_says_so(model: Path, prompts: Path, tmp_path: Path) -> None:
    scores: dict[str, Any] = {}
    for kv_dtype, name in (("auto", "float32"), ("fp8", "float8_e4m3fn")):
        output = tmp_path / f"{kv_dtype}.parquet"
        result = run(model, prompts, output, "--dtype", "float32", "--kv-dtype", kv_dtype)
        assert result.exit_code == 0, result.stderr
        assert "slower" not in result.stderr, "float32 runs on plain torch anyway"
        engine = json.loads(pq.read_metadata(output).metadata[b"batchinfer"])["engine"]
        assert (engine["kv_dtype"], engine["dtype"], engine["kernels"]) == (name, "float32", TORCH)
        rows = pq.read_table(output).to_pylist()
        assert all(row["error"] is None for row in rows)
        scores[kv_dtype] = np.concatenate([row["prompt_logprobs"][1:] for row in rows])
    change = np.abs(scores["auto"] - scores["fp8"])
    assert 0 < change.mean() < 0.5


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ kernels were built")
def test_the_cpp_kernels_are_never_given_up_in_silence(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(library.FORCE_VARIABLE, raising=False)
    output = tmp_path / "out.parquet"
    result = run(model, prompts, output, "--dtype", "bfloat16", "--kv-dtype", "fp8")
    assert result.exit_code == 0, result.stderr
    said = " ".join(result.stderr.split())
    assert "running on plain torch, which is slower: the C++ kernels have no fp8 KV" in said
    assert "Leave out --kv-dtype fp8" in said
    engine = json.loads(pq.read_metadata(output).metadata[b"batchinfer"])["engine"]
    assert (engine["kv_dtype"], engine["kernels"]) == ("float8_e4m3fn", TORCH)


def test_another_value_is_refused_before_the_model_is_looked_for(prompts: Path, tmp_path: Path) -> None:
    result = run(tmp_path / "no-model", prompts, tmp_path / "out.parquet", "--kv-dtype", "int8")
    assert result.exit_code == 2
    assert "--kv-dtype: kv_dtype must be one of auto, fp8, got 'int8'" in result.stderr


def test_a_file_can_ask_for_it(model: Path, prompts: Path, tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text('[engine]\nkv_dtype = "fp8"\ndtype = "float32"\n')
    assert run(model, prompts, tmp_path / "out.parquet", "--config", config).exit_code == 0
    engine = json.loads(pq.read_metadata(tmp_path / "out.parquet").metadata[b"batchinfer"])["engine"]
    assert engine["kv_dtype"] == "float8_e4m3fn"


@pytest.mark.parametrize(("dtype", "number_bytes"), [("bfloat16", 2), ("float32", 4)])
def test_a_plan_counts_its_bytes(model: Path, prompts: Path, dtype: str, number_bytes: int) -> None:
    """Two layers, one KV head of 16 channels; a scale of 4 bytes for each key and each value."""
    found = {}
    for kv_dtype in ("auto", "fp8"):
        result = invoke("plan", prompts, "--model", model, "--dtype", dtype, "--kv-dtype", kv_dtype, "--json")
        assert result.exit_code == 0, result.stderr
        found[kv_dtype] = json.loads(result.stdout)
    assert found["auto"]["kv"]["bytes_per_token"] == 2 * 2 * 16 * number_bytes
    assert found["fp8"]["kv"]["bytes_per_token"] == 2 * 2 * (16 + 4)
    assert found["fp8"]["weight_bytes"] == found["auto"]["weight_bytes"]
    assert found["fp8"]["with_sharing"]["kv_bytes_read"] < found["auto"]["with_sharing"]["kv_bytes_read"]
