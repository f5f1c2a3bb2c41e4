"""`make eval-demo` at a tiny scale: it trains, evaluates, and ends with the report's path."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import InputError
from batchinfer.models.source import resolve_model


@pytest.fixture
def recipe(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repo_root / "recipes"))
    return importlib.import_module("eval_demo")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two families of questions whose answers are letters."""
    num = 24
    table = pa.table(
        {
            "id": [f"row-{i}" for i in range(num)],
            "family": [("first", "second")[i % 2] for i in range(num)],
            "prompt": [f"{'an example ' * (i % 3)}question {i}:" for i in range(num)],
            "reference": [("yes", "no")[i % 2] for i in range(num)],
        }
    )
    path = tmp_path / "prompts.parquet"
    pq.write_table(table, path)
    return path


def test_each_family_is_split_by_threes(recipe: ModuleType, prompts: Path) -> None:
    train, held_out = recipe.split_rows(pq.read_table(prompts))
    assert train.column("id").to_pylist() == [f"row-{i}" for i in (0, 1, 6, 7, 12, 13, 18, 19)]
    assert train.num_rows + held_out.num_rows == 24
    with pytest.raises(InputError, match="no column reference; there are prompt"):
        recipe.split_rows(pa.table({"prompt": ["a"]}))
    with pytest.raises(InputError, match="1 rows are too few"):
        recipe.split_rows(pa.table({"prompt": ["a"], "reference": ["b"]}))


def test_only_answers_are_learned(recipe: ModuleType, tiny_model: Path) -> None:
    tokenizer = resolve_model(str(tiny_model)).tokenizer
    rows = pa.table({"prompt": ["a long prompt", None, "b"], "reference": ["yes", "no", None]})
    (example,) = recipe.make_examples(rows, tokenizer, 6)
    assert tokenizer.decode(example.token_ids.tolist()) == "prompt yes\n\n"
    assert example.labels.tolist() == [-100] * 6 + example.token_ids[6:].tolist()
    token_ids, labels, mask = recipe.padded([example, recipe.Example(np.array([5]), np.array([5]))])
    assert token_ids.shape == labels.shape == mask.shape == (2, len(example.token_ids))
    assert labels[1].tolist() == [5] + [-100] * (len(example.token_ids) - 1)
    assert mask.sum(dim=1).tolist() == [len(example.token_ids), 1]


def test_training_lowers_the_loss_and_writes_an_adapter_folder(
    recipe: ModuleType, prompts: Path, tiny_model: Path, tmp_path: Path
) -> None:
    source = resolve_model(str(tiny_model))
    examples = recipe.make_examples(pq.read_table(prompts), source.tokenizer, 16)
    losses = recipe.train_adapter(source, examples, tmp_path / "a", num_steps=30, batch_size=4, seed=0)
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["peft_type"], config["base_model_name_or_path"]) == ("LORA", str(tiny_model))
    assert (tmp_path / "a" / "adapter_model.safetensors").is_file()


def test_ends_with_the_path_of_the_report(
    recipe: ModuleType, prompts: Path, tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "demo"
    options = ["--model", str(tiny_model), "--output", str(folder), "--steps", "4", "--max-tokens", "4"]
    assert recipe.main([str(prompts), *options, "--metrics", "accuracy,length", "--dtype", "float32"]) == 0
    last = capfd.readouterr().out.splitlines()[-1]
    assert last == f"report: {folder / 'report' / 'report.html'}"
    report = json.loads((folder / "report" / "report.json").read_text(encoding="utf-8"))
    assert report["pairing"]["num_pairs"] == 16
    assert report["after"]["model"] == str(folder / "adapter")
    assert {one["column"] for one in report["slices"]} == {"family"}
    assert "<h1>" in (folder / "report" / "report.html").read_text(encoding="utf-8")


def test_a_file_without_references_is_refused(recipe: ModuleType, tmp_path: Path, tiny_model: Path, capsys) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"]}), path)
    assert recipe.main([str(path), "--model", str(tiny_model), "--output", str(tmp_path / "out")]) == 2
    assert "no column reference" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
