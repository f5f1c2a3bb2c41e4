"""Whether written rows were made of the rows that the input has now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.output.journal import result_name
from batchinfer.output.storage import storage_schema


def hold_rows(parts: Sequence[Path], schema: pa.Schema, num_input_columns: int, tables: Iterable[pa.Table]) -> bool:
    """Whether the input columns of each row's first sample are those of `tables`, bit for bit and in order.

    Args:
        schema: of the parts, from output_schema().
        tables: input rows, in tables of any size; a row group is in memory at a time.
    """
    stored = _Cutter(_first_samples(parts, schema, num_input_columns))
    for table in tables:
        for piece in stored.take(table.num_rows):
            if piece is None or not _are_equal(piece, table.slice(0, piece.num_rows)):
                return False
            table = table.slice(piece.num_rows)
    return next(stored.take(1), None) is None


def _first_samples(parts: Sequence[Path], schema: pa.Schema, num_input_columns: int) -> Iterator[pa.Table]:
    names = schema.names[:num_input_columns]
    sample_index = next(
        field.name for field in list(schema)[num_input_columns:] if result_name(field) == "sample_index"
    )
    for part in parts:
        with pq.ParquetFile(part, pre_buffer=False) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=[*names, sample_index])
                table = table.cast(storage_schema(table.schema))  # rows of views cannot be taken
                yield table.filter(pc.equal(table.column(sample_index), 0)).select(names)


class _Cutter:
    """Cuts tables of one size into pieces of another."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._rest: pa.Table | None = None

    def take(self, num_rows: int) -> Iterator[pa.Table | None]:
        """Pieces of `num_rows` rows together; None where there are no more."""
        while num_rows:
            if self._rest is None or not self._rest.num_rows:
                self._rest = next(self._tables, None)
                if self._rest is None:
                    yield None
                    return
                continue
            piece = self._rest.slice(0, num_rows)
            self._rest = self._rest.slice(piece.num_rows)
            num_rows -= piece.num_rows
            yield piece


def _are_equal(stored: pa.Table, rows: pa.Table) -> bool:
    if stored.column_names != rows.column_names:
        return False
    rows = pa.Table.from_arrays(rows.columns, names=rows.column_names)
    try:
        mine = stored.cast(pa.schema(list(storage_schema(rows.schema))))
    except (pa.ArrowException, ValueError):
        return False
    theirs = rows.cast(mine.schema)
    return all(
        # NaN is not equal to itself, but written out it is.
        a.equals(b) or repr(a.to_pylist()) == repr(b.to_pylist())
        for a, b in zip(mine.columns, theirs.columns, strict=True)
    )
