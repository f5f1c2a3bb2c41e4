"""Rows of a table as often as they are listed, whatever their types and however large their columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinfer.output.storage import storage_type

_Rows = npt.NDArray[np.int64]


def repeated_rows(table: pa.Table, rows: _Rows) -> pa.Table:
    """The rows of `table` at the places `rows`, which are ascending. Schema and metadata are kept.

    Arrow's own take joins a column's chunks, which fails for strings of more than 2 GiB, and cannot take views.
    """
    chunks: list[list[pa.Array]] = [[] for _ in table.schema]
    first = 0
    for batch in table.to_batches():
        begin, end = np.searchsorted(rows, [first, first + batch.num_rows])
        for place, column in enumerate(batch.columns):
            chunks[place] += _taken(column, rows[begin:end] - first)
        first += batch.num_rows
    columns = [pa.chunked_array(chunks[place], field.type) for place, field in enumerate(table.schema)]
    return pa.Table.from_arrays(columns, schema=table.schema)


def _taken(column: pa.Array, rows: _Rows) -> list[pa.Array]:
    """In one array, or in as many as 32-bit offsets need."""
    if len(rows) == 0:
        return []
    if len(rows) == rows[-1] - rows[0] + 1 and (np.diff(rows) == 1).all():
        return [column.slice(rows[0], len(rows))]
    try:
        return [_take(column, rows)]
    except pa.ArrowInvalid:
        if len(rows) == 1:
            raise
        middle = len(rows) // 2
        return _taken(column, rows[:middle]) + _taken(column, rows[middle:])
    except pa.ArrowNotImplementedError:  # lists of views in views, which nothing can take or cast
        return [column.slice(row, 1) for row in rows]


def _take(column: pa.Array, rows: _Rows) -> pa.Array:
    stored = storage_type(column.type)
    indices = pa.array(rows)
    return column.take(indices) if stored == column.type else column.cast(stored).take(indices).cast(column.type)
