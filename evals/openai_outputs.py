"""Result files in the OpenAI Batch format, as services and `batchinfer run --output x.jsonl` write them -> rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

ID_NAME = "custom_id"


def is_openai_output(schema: pa.Schema) -> bool:
    import pyarrow.types as pt

    if ID_NAME not in schema.names or "response" not in schema.names:
        return False
    type_ = schema.field("response").type
    return bool(pt.is_struct(type_)) and type_.get_field_index("body") >= 0


def openai_rows(table: pa.Table) -> pa.Table:
    """One row for each choice, and one for each request that failed: id, sample index, text, how it ended, error."""
    import pyarrow as pa

    schema = pa.schema(
        {
            ID_NAME: table.schema.field(ID_NAME).type,
            "sample_index": pa.int32(),
            "output": pa.string(),
            "finish_reason": pa.string(),
            "num_output_tokens": pa.int32(),
            "error": pa.string(),
        }
    )
    rows = [row for line in table.to_pylist() for row in _rows_of(line)]
    return pa.Table.from_pylist(rows, schema=schema)


def _rows_of(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    response = line["response"] or {}
    body = response.get("body") or {}
    choices = body.get("choices") or []
    if not choices:
        error = line.get("error") or body.get("error") or {}
        said = error.get("code") or error.get("message") if isinstance(error, dict) else str(error)
        yield {
            ID_NAME: line[ID_NAME],
            "sample_index": 0,
            "error": str(said or response.get("status_code") or "no choice"),
        }
    for place, choice in enumerate(choices):
        index = choice.get("index")
        yield {
            ID_NAME: line[ID_NAME],
            "sample_index": place if index is None else index,
            "output": _text(choice),
            "finish_reason": choice.get("finish_reason"),
            # The count is of all choices together.
            "num_output_tokens": (body.get("usage") or {}).get("completion_tokens") if len(choices) == 1 else None,
        }


def _text(choice: dict[str, Any]) -> str | None:
    message = choice.get("message")
    return choice.get("text") if message is None else message.get("content")
