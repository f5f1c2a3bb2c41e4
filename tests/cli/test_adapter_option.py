"""LoRA adapters on the command line: merged for run, score and plan, by option or as the model itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from batchinfer.cli.main import app

MakeModel = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tiny_llama: MakeModel) -> Path:
    return tiny_llama()


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(model)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    name = "base_model.model.model.layers.0.mlp.up_proj"
    sides = {"A": torch.randn(2, 32, generator=generator), "B": torch.randn(48, 2, generator=generator)}
    tensors = {f"{name}.lora_{side}.weight": value for side, value in sides.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"text": ["one text", "another one"]}), tmp_path / "t.parquet")
    return tmp_path / "t.parquet"


def command(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words), "--device", "cpu"])


def rows(path: Path, column: str) -> list[Any]:
    return pq.read_table(path).column(column).to_pylist()


def test_score(model: Path, adapter: Path, texts: Path, tmp_path: Path) -> None:
    for name, words in {
        "base": ("--model", model),
        "option": ("--model", model, "--adapter", adapter),
        "itself": ("--model", adapter),
    }.items():
        result = command("score", texts, *words, "--output", tmp_path / f"{name}.parquet")
        assert result.exit_code == 0, result.stderr
    base, option, itself = (rows(tmp_path / f"{name}.parquet", "nll") for name in ("base", "option", "itself"))
    assert option == itself
    assert all(one != two for one, two in zip(base, option, strict=True))
    found = [
        json.loads(pq.read_schema(tmp_path / f"{name}.parquet").metadata[b"batchinfer.score"])
        for name in ("base", "option")
    ]
    assert [one["model"]["adapter"] for one in found] == [None, str(adapter)]
    assert found[0]["digests"]["model"] != found[1]["digests"]["model"]


def test_run_and_plan(model: Path, adapter: Path, texts: Path, tmp_path: Path) -> None:
    for name, words in {"base": (), "adapted": ("--adapter", adapter)}.items():
        output = tmp_path / f"{name}.parquet"
        result = command("run", texts, "--model", model, *words, "--max-tokens", 20, "--output", output)
        assert result.exit_code == 0, result.stderr
    assert rows(tmp_path / "base.parquet", "output") != rows(tmp_path / "adapted.parquet", "output")
    metadata = json.loads(pq.read_schema(tmp_path / "adapted.parquet").metadata[b"batchinfer"])
    assert (metadata["model"]["name"], metadata["model"]["adapter"]) == (str(model), str(adapter))
    assert command("plan", texts, "--model", model, "--adapter", adapter).exit_code == 0


def test_what_is_no_adapter_is_refused(model: Path, texts: Path, tmp_path: Path) -> None:
    result = command("score", texts, "--model", model, "--adapter", model, "--output", tmp_path / "o.parquet")
    assert result.exit_code == 2
    assert "no adapter_config.json" in result.stderr
