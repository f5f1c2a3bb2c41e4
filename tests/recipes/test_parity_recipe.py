"""The comparison with transformers runs, sees a difference where there is one, and says so by its exit code."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from peer_models import parity_recipe, save_model

from batchinfer.types import Completion


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return parity_recipe()


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """Arguments for 6 of 12 prompts and a model whose answers end at different places."""
    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(300)}" for _ in range(rng.randrange(3, 30))) for _ in range(12)]
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"id": [f"row-{i}" for i in range(12)], "prompt": texts}), path)
    save_model("qwen2", tmp_path / "model", num_ids=310, eos_token_id=list(range(40)))
    return [str(path), "--model", str(tmp_path / "model"), "--rows", "6", "--max-tokens", "8", "--batch-size", "4"]


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_equal_models(recipe: ModuleType, job: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe.main(job) == 0
    result = last_line(capsys)
    assert (result["num_rows"], result["num_rows_equal"], result["num_rows_different"]) == (6, 6, 0)
    assert 6 < result["num_tokens_compared"] < 6 * 8  # some rows ended early
    assert 0 < result["max_logprob_difference"] < 1e-4


def test_unequal_models(
    recipe: ModuleType, job: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = recipe.load_transformers

    def load_changed(*args: Any) -> Any:
        model = load(*args)
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight *= 1.3
        return model

    monkeypatch.setattr(recipe, "load_transformers", load_changed)
    assert recipe.main(job) == 1
    out = capsys.readouterr().out.splitlines()
    result = json.loads(out[-1])
    assert result["num_rows_different"] >= 1
    assert sum("DIFFERENT" in line for line in out) == result["num_rows_different"]
    assert result["max_logprob_difference"] > 1e-2


def test_compares_up_to_the_first_difference(recipe: ModuleType) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 1.99995, 0.0], [5.0, 0.0, 0.0]])
    logprobs = torch.log_softmax(logits, -1)
    ours = [1, 1, 2]
    completion = Completion(0, token_ids=ours, logprobs=[float(logprobs[i, token]) for i, token in enumerate(ours)])
    completion.logprobs[0] += 0.25
    source = SimpleNamespace(tokenizer=SimpleNamespace(num_ids=3), eos_token_ids=())
    row = recipe.compare(completion, logits, source, 1e-4)
    assert (row.num_tokens, row.num_near_ties) == (2, 1)
    assert (row.difference.step, row.difference.ours, row.difference.theirs) == (1, 1, 0)
    assert row.difference.gap == row.smallest_gap == pytest.approx(5e-5, rel=1e-2)
    assert row.max_logprob_difference == pytest.approx(0.25, abs=1e-6)


def test_near_tie_is_no_fault(recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [recipe.RowParity(3, 1, 5e-5, 0.0, recipe.Difference(2, 1, 0, 5e-5)), recipe.RowParity(3, 0, 1.0, 0.0, None)]
    assert recipe.report(["a", "b"], rows, 1e-4, 1.0, 1.0) == 0
    assert last_line(capsys)["num_rows_differ_at_near_tie"] == 1
    assert recipe.report(["a", "b"], rows, 1e-5, 1.0, 1.0) == 1


def test_bad_input(recipe: ModuleType, job: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe.main([*job, "--prompt-column", "question"]) == 2
    assert "question" in capsys.readouterr().err
