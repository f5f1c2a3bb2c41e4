"""JSON Lines: one object per line, under a schema that holds for every line.

The first pass reads every line and finds the types, so that they are known before any work; later ones make
the tables. Arrow's own reader infers from its first block and turns strings that look like dates into dates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from batchinfer.dataset.json_lines import JsonLines, Record, batches, first_record, name_of, without_invalid_text
from batchinfer.dataset.json_types import Shape
from batchinfer.dataset.openai_batch import batch_columns, clean_request, is_openai_batch, request_tables
from batchinfer.dataset.windows import StreamSource, projected
from batchinfer.errors import InputError

# Parsing a short line again costs more than holding what it says.
_REREAD_LINE_BYTES = 1024


def open_jsonl(paths: Sequence[Path], limit: int | None = None) -> StreamSource:
    """JSON Lines, or the OpenAI Batch format where the first object has custom_id and body.

    A line that is not UTF-8, not JSON, not an object or too long, and text that is not valid Unicode, are errors of
    their rows. Raises InputError naming file and line for a key whose values have no common type, and for a file
    most of whose lines are bad.
    """
    if is_openai_batch(first_record(paths).values):
        lines = JsonLines(paths, clean_request, limit)
        schema = batch_columns(lines.scan())
        make_tables = request_tables
    else:
        lines = JsonLines(paths, without_invalid_text, limit)
        schema = _find_schema(lines, name_of(paths))
        make_tables = _make_tables

    def tables(start: int, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        wanted = schema if columns is None else projected(schema, columns)
        return make_tables(lines.records(start), wanted)

    rereads = lines.mean_line_bytes() > _REREAD_LINE_BYTES
    return StreamSource(name_of(paths), schema, lines.num_rows, tables, rereads=rereads, row_errors=lines.row_errors)


def _find_schema(lines: JsonLines, name: str) -> pa.Schema:
    shape = Shape()
    for record in lines.scan():
        shape.add(record.values, "", record)
    if not shape.fields:
        raise InputError(f"{name} has no columns: every line is an empty object")
    return pa.schema([pa.field(key, inner.arrow_type()) for key, inner in shape.fields.items()])


def _make_tables(records: Iterable[Record], schema: pa.Schema) -> Iterator[pa.Table]:
    for batch in batches(records):
        try:
            columns = [pa.array([r.values.get(f.name) for r in batch], type=f.type) for f in schema]
        except (pa.ArrowException, OverflowError) as error:
            raise InputError(f"{batch[0].where}: changed since it was opened: {error}") from error
        yield pa.Table.from_arrays(columns, schema=schema)
