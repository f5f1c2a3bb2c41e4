"""--device where there is no GPU: told before anything is read, and `auto` says what it came to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner, Result

from batchinfer.cli.main import app
from batchinfer.engine.machine import fallback_note

NOTE = f"torch {torch.__version__} finds no GPU here: running on the CPU"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "text": ["a", "b"]}), path)
    return path


def call(command: str, prompts: Path, model: object, *options: object) -> Result:
    words: list[object] = [command, prompts, "--model", model, *options]
    if command in ("run", "score"):
        words += ["--output", prompts.parent / "out.parquet"]
    if command == "run":
        words += ["--prompt-column", "prompt"]
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("command", ["run", "score", "bench"])
def test_cuda_without_a_gpu_is_told_before_the_model_is_looked_for(
    command: str, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(name: str) -> None:
        raise AssertionError("the model must not be looked for, much less downloaded")

    monkeypatch.setattr("batchinfer.models.source.resolve_model", resolve)
    result = call(command, prompts, "some/model", "--device", "cuda")
    assert result.exit_code == 2
    assert f"--device cuda: torch {torch.__version__} finds no GPU here; use --device cpu or auto" in result.stderr
    assert "Traceback" not in result.output
    assert not (prompts.parent / "out.parquet").exists()


@pytest.mark.parametrize(("command", "option"), [("run", "--max-tokens=1"), ("score", "--text-column=text")])
def test_auto_falls_back_and_says_so_once(
    command: str, option: str, prompts: Path, tiny_llama: Callable[..., Path]
) -> None:
    result = call(command, prompts, tiny_llama(), option)
    assert result.exit_code == 0, result.output
    assert result.stderr.count(f"batchinfer: {NOTE}\n") == 1


def test_who_asks_for_the_cpu_is_told_nothing(prompts: Path, tiny_llama: Callable[..., Path]) -> None:
    result = call("run", prompts, tiny_llama(), "--max-tokens", 1, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "GPU" not in result.stderr


def test_the_note_is_for_auto_on_a_cpu_alone() -> None:
    assert fallback_note("auto", torch.device("cpu")) == NOTE
    assert fallback_note("cpu", torch.device("cpu")) is None
    assert fallback_note("auto", torch.device("cuda")) is None
