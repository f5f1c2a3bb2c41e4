"""Output in the OpenAI Batch format: one JSON line per input row, joined to the requests by custom_id.

The lines are made of finished parts: what writes those, and goes on with them after a kill, knows nothing of this
format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Protocol

import pyarrow as pa

from batchinfer.dataset.columns import URL_NAME, InputColumns
from batchinfer.dataset.prompts import cells
from batchinfer.output.openai_format import BatchLines, Kind, RowResults
from batchinfer.output.schema import METADATA_KEY

_STEP_ROWS = 1024


class TokenSpeller(Protocol):
    """What is needed of a tokenizer."""

    def token_bytes(self, token_id: int, /) -> bytes: ...


def openai_lines(
    tables: Iterable[pa.Table], *, columns: InputColumns, tokenizer: TokenSpeller, model: str, created: int
) -> Iterator[bytes]:
    """The line of each input row, with its newline.

    Args:
        tables: the output's rows in order, under output_schema(), cut anywhere.
        columns: of the input. The id column is the custom_id; rows without an id column are called row-0, row-1, ...
        model, created: as BatchLines. The same rows and these make the same bytes.
    """
    make = BatchLines(tokenizer.token_bytes, model, created)
    for row in rows_of(tables, columns):
        yield _valid(json.dumps(make.line(row), ensure_ascii=False, allow_nan=False)) + b"\n"


def _valid(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate keeps its escape
        return json.dumps(json.loads(text)).encode()


def rows_of(tables: Iterable[pa.Table], columns: InputColumns) -> Iterator[RowResults]:
    """The rows of output tables, each with its samples together."""
    held: list[dict[str, Any]] = []
    row_index = 0
    for sample in chain(_samples(tables, columns), (None,)):
        if held and (sample is None or sample["sample_index"] == 0):
            yield _row(held, row_index, columns)
            held, row_index = [], row_index + 1
        if sample is not None:
            held.append(sample)


def _row(samples: list[dict[str, Any]], row_index: int, columns: InputColumns) -> RowResults:
    first = samples[0]
    custom_id = first["custom_id"] if columns.id is not None else f"row-{row_index}"
    return RowResults(row_index, custom_id, _kind(first, columns), samples)


def _samples(tables: Iterable[pa.Table], columns: InputColumns) -> Iterator[dict[str, Any]]:
    for table in tables:
        for start in range(0, table.num_rows, _STEP_ROWS):
            yield from _step(table.slice(start, _STEP_ROWS), columns)


def _step(table: pa.Table, columns: InputColumns) -> Iterator[dict[str, Any]]:
    lists = {
        field.metadata[METADATA_KEY].decode(): table.column(place).to_pylist()
        for place, field in enumerate(table.schema)
        if field.metadata and METADATA_KEY in field.metadata
    }
    for name, column in (("custom_id", columns.id), ("body", columns.body), ("url", URL_NAME)):
        is_there = column is not None and column in table.column_names and (name != "url" or columns.body is not None)
        if is_there:
            lists[name] = list(cells(table.column(column)))
    if "custom_id" in lists:
        lists["custom_id"] = [_text(value) for value in lists["custom_id"]]
    for values in zip(*lists.values(), strict=True):
        yield dict(zip(lists, values, strict=True))


def _text(value: str | bytes | int | None) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def _kind(sample: dict[str, Any], columns: InputColumns) -> Kind:
    if columns.body is None:
        return "chat" if columns.messages is not None else "completion"
    url = (sample.get("url") or "").rstrip("/")
    for ending, kind in _ENDPOINTS:
        if url.endswith(ending):
            return kind
    try:
        body = json.loads(sample["body"] or "{}")
    except (ValueError, RecursionError):
        body = {}
    return next((kind for key, kind in _FIELDS if isinstance(body, dict) and body.get(key) is not None), "chat")


_ENDPOINTS: tuple[tuple[str, Kind], ...] = (
    ("/chat/completions", "chat"),
    ("/completions", "completion"),
    ("/responses", "response"),
)
_FIELDS: tuple[tuple[str, Kind], ...] = (("messages", "chat"), ("prompt", "completion"), ("input", "response"))
