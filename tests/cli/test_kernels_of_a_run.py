"""What a run says of the kernels it uses, in Python and on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_models import INSTRUCTION_SETS
from typer.testing import CliRunner, Result

from batchinfer.cli.main import app
from batchinfer.kernels.cpu import library
from batchinfer.kernels.cpu.choice import TORCH

MISSING = "running on plain torch, which is slower"


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Path]) -> Path:
    return tiny_llama(config={"torch_dtype": "bfloat16"})


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.parquet"
    pq.write_table(pa.table({"prompt": [f"a shared beginning, then row {i}" for i in range(5)]}), path)
    return path


def run(model: Path, prompts: Path, output: Path, dtype: str) -> Result:
    words = ["run", prompts, "--model", model, "--output", output, "--device", "cpu", "--threads", 1]
    words += ["--dtype", dtype, "--max-tokens", 4, "--logprobs", 0]
    return CliRunner().invoke(app, list(map(str, words)))


def engine_metadata(path: Path) -> dict[str, Any]:
    return json.loads(pq.read_metadata(path).metadata[b"batchinfer"])["engine"]


@pytest.mark.parametrize("kernels", ["none", *INSTRUCTION_SETS])
def test_output_tells_the_kernels(
    model: Path, prompts: Path, tmp_path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities are the same bits only with the same kernels."""
    monkeypatch.setenv(library.FORCE_VARIABLE, kernels)
    result = run(model, prompts, tmp_path / "out.parquet", "bfloat16")
    assert result.exit_code == 0, result.stderr
    assert MISSING not in result.stderr, "who turns them off knows"
    assert engine_metadata(tmp_path / "out.parquet")["kernels"] == (TORCH if kernels == "none" else kernels)
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert all(row["error"] is None and row["num_output_tokens"] > 0 for row in rows)


def test_all_kernels_mean_the_same(model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First tokens' log-probabilities lie as near as bf16 lets them."""
    found = {}
    for kernels in ("none", *INSTRUCTION_SETS):
        monkeypatch.setenv(library.FORCE_VARIABLE, kernels)
        output = tmp_path / f"{kernels}.parquet"
        assert run(model, prompts, output, "bfloat16").exit_code == 0
        found[kernels] = [row["logprobs"][0] for row in pq.read_table(output).to_pylist()]
    for values in found.values():
        assert values == pytest.approx(found["none"], abs=0.1)


@pytest.mark.parametrize(("dtype", "num_lines"), [("bfloat16", 1), ("float32", 0)])
def test_missing_kernels_are_one_line(
    model: Path, prompts: Path, tmp_path: Path, dtype: str, num_lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none where they would not have run anyway."""
    monkeypatch.delenv(library.FORCE_VARIABLE, raising=False)
    monkeypatch.setattr(library, "library_path", lambda name: tmp_path / name)
    library.load_library.cache_clear()
    try:
        result = run(model, prompts, tmp_path / "out.parquet", dtype)
    finally:
        library.load_library.cache_clear()
    assert result.exit_code == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if MISSING in line]
    assert len(lines) == num_lines
    assert all(line.startswith("batchinfer: ") and ".py" not in line for line in lines)
    assert engine_metadata(tmp_path / "out.parquet")["kernels"] == TORCH


def test_wrong_name_in_the_environment_is_an_error_before_the_weights_are_read(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.FORCE_VARIABLE, "sse9")
    monkeypatch.setattr("batchinfer.models.source.ModelSource.load_weights", None)
    result = run(model, prompts, tmp_path / "out.parquet", "bfloat16")
    assert result.exit_code == 2
    assert "BATCHINFER_CPU_KERNELS must be one of" in result.stderr


ENGINE_WITHOUT_LIBRARIES = """
import sys
from pathlib import Path
from batchinfer.kernels.cpu import library
library.library_path = lambda name: Path("nowhere") / name
from batchinfer import Engine
from batchinfer.config import EngineConfig
for _ in range(2):
    engine = Engine(sys.argv[1], EngineConfig(dtype="bfloat16", device="cpu", threads=1))
    print(engine.kernels)
"""


def test_python_warns_once(model: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != library.FORCE_VARIABLE}
    command = [sys.executable, "-c", ENGINE_WITHOUT_LIBRARIES, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    assert done.stdout.split() == [TORCH, TORCH]
    assert done.stderr.count(f"KernelsWarning: {MISSING}") == 1
