"""`batchinfer eval PROMPTS --before MODEL --after ADAPTER`: both run, both read again, drift and perplexity told."""

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


def make_adapter(folder: Path, base: str | None) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name in ("layers.0.mlp.up_proj", "layers.1.mlp.up_proj"):
        for side, shape in (("A", (2, 32)), ("B", (48, 2))):
            key = f"base_model.model.model.{name}.lora_{side}.weight"
            tensors[key] = 0.3 * torch.randn(shape, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def evaluate(folder: Path, before: Path, after: Path, *args: object) -> Result:
    rows = {"prompt": [f"prompt {i}" for i in range(10)], "reference": ["a"] * 10}
    pq.write_table(pa.table(rows), folder / "prompts.parquet")
    words = ["eval", folder / "prompts.parquet", "--before", before, "--after", after, "--output", folder / "out"]
    words += ["--max-tokens", 8, "--temperature", 0.8, "--metrics", "perplexity,drift", "--device", "cpu", *args]
    (folder / "out").mkdir(exist_ok=True)
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.mark.parametrize("names_its_base", [True, False])
def test_an_adapter_against_its_base(names_its_base: bool, model: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", str(model) if names_its_base else None)
    pq.write_table(pa.table({"text": ["a reference text", "another"]}), tmp_path / "texts.parquet")
    result = evaluate(
        tmp_path, model, adapter, "--noise-floor", "--texts", tmp_path / "texts.parquet", "--gate", "kl<=50"
    )
    assert result.exit_code == 0, result.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    metrics = {metric["spec"]["name"]: metric for metric in report["metrics"]}
    assert metrics["kl"]["difference"]["mean"] > 0
    assert metrics["kl"]["noise_floor"]["size"] == 0
    assert metrics["top1_agreement"]["difference"]["mean"] < 1
    tables = {table["name"]: table for table in report["tables"]}
    assert {"perplexity_2x2", "reference_texts", "drift", "policy_ratio", "stored_logprobs"} <= set(tables)
    for _, _, mean, _ in tables["stored_logprobs"]["rows"]:
        assert mean < 1e-5, "the runs' models are those that read their outputs"
    assert not any("another model" in warning["message"] for warning in report["warnings"])
    assert [gate["passed"] for gate in report["gates"]] == [True]
    assert evaluate(tmp_path, model, adapter, "--gate", "kl<=0").exit_code == 5


def test_files_are_read_by_the_models_that_made_them(model: Path, tmp_path: Path) -> None:
    """Without a run: what the models say of the files is what they said after their runs."""
    adapter = make_adapter(tmp_path / "adapter", None)
    assert evaluate(tmp_path, model, adapter).exit_code == 0
    runs = sorted((tmp_path / "out" / "runs").glob("*.parquet"), key=lambda path: path.name.startswith("after"))
    words = ["eval", *runs, "--before", model, "--after", adapter, "--metrics", "perplexity,drift", "--device", "cpu"]
    result = CliRunner().invoke(app, [*map(str, words), "--json", "--quiet"])
    assert result.exit_code == 0, result.stderr
    of_models = json.loads((tmp_path / "out" / "report.json").read_text())
    of_files = json.loads(result.stdout)
    assert of_files["metrics"] == of_models["metrics"]
    assert of_files["tables"] == of_models["tables"]
    assert len(of_files["metrics"]) == 10


def test_a_model_against_itself_has_not_drifted(model: Path, tmp_path: Path) -> None:
    result = evaluate(tmp_path, model, model, "--gate", "kl<=0")
    assert result.exit_code == 0, result.stderr
    report: dict[str, Any] = json.loads((tmp_path / "out" / "report.json").read_text())
    figures = {metric["spec"]["name"]: metric["difference"] for metric in report["metrics"]}
    assert all(figures[name]["mean"] == 0 for name in ("kl", "kl_before_after", "kl_k1", "kl_k3", "clip_rate"))
