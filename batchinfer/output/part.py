"""Parts: the rows of one window with their results; and one file out of all parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.output.durable import OutputError, durable_step, output_errors, rename, sync
from batchinfer.output.journal import result_name
from batchinfer.output.journaled import JournaledResults
from batchinfer.output.repeat import repeated_rows
from batchinfer.output.row_groups import (
    GROUP_BYTES,
    GROUP_ROWS,
    as_stored,
    check_complete,
    file_metadata,
    num_slice_bytes,
    row_groups,
)
from batchinfer.output.storage import storage_schema


def write_part(
    path: Path,
    temporary: Path,
    schema: pa.Schema,
    tables: Iterable[pa.Table],
    first_row_index: int,
    results: JournaledResults,
    metadata: Mapping[str, str],
) -> int:
    """Write the rows of a window under `path`, which is there whole or not at all; returns the number of output rows.

    Args:
        temporary: on the same file system as `path`.
        schema: from output_schema(): the columns of the tables, then the results.
        tables: the window's input rows in order, in tables of any size; a row group of them is held.
        first_row_index: of the rows.
        results: for each of these rows its samples 0, 1, ..., n - 1, and no others.
    Raises:
        OutputError: a write failed; `path` is as it was.
    """
    with _writing(path, temporary, schema, metadata, "part") as writer:
        _write_rows(writer, schema, tables, results, first_row_index)
    return len(results)


def join_parts(
    parts: Sequence[Path], path: Path, temporary: Path, schema: pa.Schema, metadata: Mapping[str, str]
) -> None:
    """Write one file with the rows of all parts, a row group at a time. Raises OutputError as write_part."""
    stored_schema = storage_schema(schema)
    with _writing(path, temporary, schema, metadata, "output") as writer:
        for group in read_parts(parts):
            table = pa.Table.from_arrays(as_stored(group, stored_schema).columns, schema=stored_schema)
            writer.write_table(table, row_group_size=GROUP_ROWS)


def read_parts(parts: Sequence[Path]) -> Iterator[pa.Table]:
    """The row groups of the parts, in order. Raises OutputError for a part that is damaged."""
    for part in parts:
        try:
            with pq.ParquetFile(part, pre_buffer=False, page_checksum_verification=True) as file:
                for group in range(file.num_row_groups):
                    yield file.read_row_group(group)
        except (pa.ArrowException, OSError) as error:
            raise OutputError(
                f"{part} is damaged ({error}): remove it and run the same command again, which runs its rows again"
            ) from error


@contextmanager
def _writing(
    path: Path, temporary: Path, schema: pa.Schema, metadata: Mapping[str, str], what: str
) -> Iterator[pq.ParquetWriter]:
    """A writer to `temporary`, which gets the name `path` at the end, durably."""
    with output_errors(path):
        try:
            with pq.ParquetWriter(
                temporary, storage_schema(schema), compression="zstd", write_page_checksum=True
            ) as writer:
                yield writer
                writer.add_key_value_metadata(file_metadata(schema, metadata))
            durable_step(f"{what} written")
            sync(temporary)
            durable_step(f"{what} synced")
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        rename(temporary, path, what)


def _write_rows(
    writer: pq.ParquetWriter,
    schema: pa.Schema,
    tables: Iterable[pa.Table],
    results: JournaledResults,
    first_row_index: int,
) -> None:
    stored_schema = storage_schema(schema)
    result_bytes = results.num_bytes()
    row = first_row_index
    done = 0
    for table in _collected(tables, stored_schema):
        stop = int(np.searchsorted(results.rows, row + table.num_rows))
        rows = results.rows[done:stop] - row
        check_complete(rows, results.samples[done:stop], table.num_rows)
        names = [result_name(field) for field in list(schema)[table.num_columns :]]
        for start, end in row_groups(table, rows, result_bytes[done:stop]):
            columns = repeated_rows(table, rows[start:end]).columns
            columns += results.take(done + start, done + end, names)
            writer.write_table(pa.Table.from_arrays(columns, schema=stored_schema), row_group_size=GROUP_ROWS)
        row += table.num_rows
        done = stop
    assert done == len(results), "a result has no row"


def _collected(tables: Iterable[pa.Table], stored_schema: pa.Schema) -> Iterator[pa.Table]:
    """Tables with about as much as fits a row group."""
    held: list[pa.Table] = []
    num_rows = num_bytes = 0
    for table in tables:
        stored = as_stored(table, stored_schema)
        held.append(stored)
        num_rows += stored.num_rows
        num_bytes += sum(num_slice_bytes(column) for column in stored.columns)
        if num_rows >= GROUP_ROWS or num_bytes >= GROUP_BYTES:
            yield pa.concat_tables(held)
            held, num_rows, num_bytes = [], 0, 0
    if held:
        yield pa.concat_tables(held)
