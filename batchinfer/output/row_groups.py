"""Row groups of the output: how rows are cut into them, and the form in which they are written."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_Rows = npt.NDArray[np.int64]

# A row group is at most this large, so that readers can decode it whole: strings inside lists that
# pass 2 GiB in one row group cannot be read by common readers. Small rows make no tiny groups.
GROUP_BYTES = 128 * 2**20
GROUP_ROWS = 65_536
_MIN_GROUP_ROWS = 256
_MAX_TAKE_BYTES = 2**30  # Arrow's 32-bit offsets end at 2 GiB


def file_metadata(schema: pa.Schema, more: Mapping[str, str]) -> dict[bytes, bytes]:
    """Key-value metadata of a file whose columns are those of `schema`.

    With the Arrow schema that Parquet files carry along: readers take types and metadata from there.
    """
    new = {key.encode(): value.encode() for key, value in more.items()}
    whole = schema.with_metadata({**(schema.metadata or {}), **new})
    return {**new, b"ARROW:schema": base64.b64encode(whole.serialize())}


def row_groups(table: pa.Table, rows: _Rows, num_bytes: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of results, each of `num_bytes`, that become one row group each; `rows` is each one's place in `table`."""
    result_bytes = np.concatenate([[0], np.cumsum(num_bytes)])
    # Not a nested function that calls itself: such a one holds the table until the garbage collector comes by.
    left = [(0, len(rows))] if len(rows) else []
    while left:
        start, stop = left.pop()
        count = stop - start
        part = table.slice(rows[start], rows[stop - 1] - rows[start] + 1)
        num_copies = int(np.bincount(rows[start:stop] - rows[start]).max())
        input_bytes = num_copies * sum(num_slice_bytes(column) for column in part.columns)
        total_bytes = input_bytes + int(result_bytes[stop] - result_bytes[start])
        is_large = total_bytes > GROUP_BYTES and count > _MIN_GROUP_ROWS
        if count > 1 and (is_large or count > GROUP_ROWS or total_bytes > _MAX_TAKE_BYTES):
            middle = start + count // 2
            left += [(middle, stop), (start, middle)]
        else:
            yield start, stop


def num_slice_bytes(column: pa.ChunkedArray) -> int:
    """Without dictionaries, which slices share."""
    if pa.types.is_dictionary(column.type):
        return sum(chunk.indices.nbytes for chunk in column.chunks)
    return int(column.nbytes)


def as_stored(table: pa.Table, stored_schema: pa.Schema) -> pa.Table:
    types = [stored_schema.field(i).type for i in range(table.num_columns)]
    columns = [
        column if column.type == type_ else column.cast(type_)
        for column, type_ in zip(table.columns, types, strict=True)
    ]
    return pa.Table.from_arrays(columns, names=table.column_names)


def check_complete(rows: _Rows, samples: npt.NDArray[np.int64], num_rows: int) -> None:
    """Every row has the samples 0, 1, ..., n - 1 and n >= 1; `rows` is ascending."""
    found, first, counts = np.unique(rows, return_index=True, return_counts=True)
    assert np.array_equal(found, np.arange(num_rows)), "a row has no completion, or a completion no row"
    expected = np.arange(len(rows)) - np.repeat(first, counts)
    wrong = np.flatnonzero(samples != expected)
    assert not len(wrong), f"row {rows[wrong[0]]} of the window lacks sample {expected[wrong[0]]} or has it twice"
