"""Results in the OpenAI Batch format, beside the Parquet file of the same run and from services."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_folder import write_tiny_llama
from typer.testing import CliRunner

from batchinfer.cli.main import app
from batchinfer.evals import compare
from batchinfer.evals.run_output import load_run_output


def line(name: str, choices: list[Any] | None, **more: Any) -> dict[str, Any]:
    body = None if choices is None else {"choices": choices, "usage": {"completion_tokens": 7}}
    return {"custom_id": name, "response": {"status_code": 200, "body": body}, "error": None} | more


def chat(index: int, text: str | None) -> dict[str, Any]:
    return {"index": index, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}


def test_choices_and_failures_are_rows(tmp_path: Path) -> None:
    lines = [
        line("a", [chat(1, "second"), chat(0, "first")]),
        line("b", [chat(0, "only")]),
        line("c", None, error={"code": "prompt_too_long", "message": "..."}),
        line("d", None, response={"status_code": 500, "body": None}),
        line("e", [chat(0, None)]),
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    run = load_run_output(path)
    assert run.id_column == "custom_id"
    rows = run.table.to_pylist()
    assert [(row["custom_id"], row["sample_index"], row["output"]) for row in rows] == [
        ("a", 1, "second"), ("a", 0, "first"), ("b", 0, "only"), ("c", 0, None), ("d", 0, None), ("e", 0, None),
    ]  # fmt: skip
    assert [row["num_output_tokens"] for row in rows] == [None, None, 7, None, None, 7]
    assert [row["error"] for row in rows] == [None, None, None, "prompt_too_long", "500", None]


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_run_in_either_format_is_the_same_run(is_chat: bool, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = write_tiny_llama(tmp_path / "model")
    value: Any = [[{"role": "user", "content": f"w{i}"}] for i in range(6)] if is_chat else [f"w{i}" for i in range(6)]
    column = "messages" if is_chat else "prompt"
    rows = {"custom_id": [f"r{i}" for i in range(6)], column: value, "reference": ["a"] * 6}
    pq.write_table(pa.table(rows), tmp_path / "p.parquet")
    for name in ("out.parquet", "out.jsonl"):
        words = ["run", tmp_path / "p.parquet", "--model", model, "--output", tmp_path / name, "--max-tokens", 5]
        done = CliRunner().invoke(app, [*map(str, words), "--device", "cpu", "--threads", "1"])
        assert done.exit_code == 0, done.stderr
    result = compare(tmp_path / "out.parquet", tmp_path / "out.jsonl", metrics=["length", "accuracy", "diversity"])
    assert result.pairing.num_pairs == 6
    assert all(metric.losses + metric.wins == 0 for metric in result.metrics)
    assert {metric.name for metric in result.metrics} >= {"output_tokens", "truncated", "accuracy"}
    assert {notice.code for notice in result.warnings} >= {"unknown_run", "retokenized"}
