"""Outputs of runs that nobody ran, as `batchinfer run` writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.output.schema import output_schema
from batchinfer.types import SamplingParams

_ERROR = {"code": "prompt_null", "message": "the prompt is null"}


def run_metadata(**changes: Any) -> dict[str, Any]:
    """What a run writes; `params` and `digests` are merged, the rest replaced."""
    params = {name: {"value": getattr(SamplingParams(), name), "origin": "default"} for name in SamplingParams.names()}
    params |= {name: {"value": value, "origin": "flag"} for name, value in changes.pop("params", {}).items()}
    digests = {"model": "m" * 64, "tokenizer": "t" * 64, "chat_template": None} | changes.pop("digests", {})
    return {
        "version": "0.1.0",
        "created": "2026-11-30T12:00:00+00:00",
        "model": {"name": "tiny", "format": "hf", "architecture": "LlamaForCausalLM"},
        "digests": digests,
        "params": params,
        "logprobs": {"mode": "raw", "definition": "...", "prompt_logprobs": "...", "head_dtype": "float32"},
        "engine": {"dtype": "float32", "device": "cpu", "kernels": "torch", "max_model_len": 64},
        "input": {"prompts": "p.parquet", "num_rows": 1, "columns": {"prompt": "prompt", "id": "id"}, "system": None},
    } | changes


@pytest.fixture
def make_run() -> Callable[..., pa.Table]:
    """A table of outputs: `inputs` by column, and for each input row its text, or its texts if there are samples.

    A text of None is a row that failed. Token ids are the characters of the text; logprobs all -0.5.
    """

    def make(
        outputs: Sequence[str | Sequence[str | None] | None],
        inputs: dict[str, Any] | None = None,
        *,
        finish_reasons: Sequence[str] | None = None,
        logprobs: bool = False,
        **metadata: Any,
    ) -> pa.Table:
        samples = [[one] if one is None or isinstance(one, str) else list(one) for one in outputs]
        inputs = inputs or {
            "id": [f"row-{i}" for i in range(len(samples))],
            "prompt": [f"prompt {i}" for i in range(len(samples))],
        }
        table = pa.table(inputs)
        rows = [row for row, texts in enumerate(samples) for _ in texts]
        texts = [text for row in samples for text in row]
        ids = [None if text is None else [ord(c) for c in text] for text in texts]
        results: dict[str, list[Any]] = {
            "sample_index": [i for row in samples for i in range(len(row))],
            "output": texts,
            "output_token_ids": [i or [] for i in ids],
            "finish_reason": list(finish_reasons or ("error" if text is None else "stop" for text in texts)),
            "stop_reason": [None] * len(texts),
            "num_prompt_tokens": [4] * len(texts),
            "num_cached_tokens": [0] * len(texts),
            "num_output_tokens": [len(i or []) for i in ids],
            "error": [_ERROR if text is None else None for text in texts],
        }
        if logprobs:
            results["logprobs"] = [[-0.5] * len(i or []) for i in ids]
        said = run_metadata(**metadata)
        schema = output_schema(table.schema, logprobs=logprobs, metadata={"batchinfer": json.dumps(said)})
        columns = [*table.take(rows).columns, *(results[name] for name in schema.names[table.num_columns :])]
        return pa.table([pa.chunked_array(c) if isinstance(c, pa.ChunkedArray) else c for c in columns], schema=schema)

    return make


@pytest.fixture
def write_run(make_run: Callable[..., pa.Table], tmp_path: Path) -> Callable[..., Path]:
    """The same in a file, whose name comes first."""

    def write(name: str, *args: Any, **more: Any) -> Path:
        path = tmp_path / name
        pq.write_table(make_run(*args, **more), path)
        return path

    return write
