"""One Parquet file of completions that is either whole or not there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.errors import InputError
from batchinfer.output import arrays
from batchinfer.output.durable import OutputError as OutputError
from batchinfer.output.durable import rename, sync
from batchinfer.output.repeat import repeated_rows
from batchinfer.output.row_groups import GROUP_ROWS, as_stored, check_complete, file_metadata, row_groups
from batchinfer.output.schema import METADATA_KEY
from batchinfer.output.storage import storage_schema


class Result(Protocol):
    """One output row."""

    @property
    def row_index(self) -> int: ...

    @property
    def sample_index(self) -> int: ...


class ResultColumns(Protocol):
    """How results become columns."""

    def build_column(self, name: str, type_: pa.DataType, results: Sequence[Any]) -> pa.Array:
        """The result `name` of each, an array of `type_`."""

    def num_bytes(self, results: Sequence[Any]) -> npt.NDArray[np.int64]:
        """[num_results] about what each takes in Arrow."""


def check_output(path: Path | str, overwrite: bool = False) -> None:
    """Refuse an output that could not be written at the end. Raises InputError."""
    path = Path(path)
    if path.is_dir():
        raise InputError(f"output {path} is a folder: name a file in it, such as {path / 'out.parquet'}")
    if path.exists() and not overwrite:
        raise InputError(f"output {path} exists: choose another name or give --overwrite")
    folder = _target(path).parent
    if not folder.exists():
        raise InputError(f"folder {folder} of output {path} does not exist: make it first")
    if not folder.is_dir():
        raise InputError(f"output {path}: {folder} is not a folder")
    probe = _temporary_beside(path)
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        probe.unlink()
    except OSError as error:
        raise InputError(f"cannot write to folder {folder} of output {path}: {error.strerror}") from error


class ParquetOutput:
    """Writes windows of rows to a temporary file beside `path`, which `commit` renames to `path`.

    Without commit `path` is untouched: leaving the context, `abort` and errors remove the temporary
    file, and a killed process leaves it behind under a hidden name.

    Args:
        path: where the file goes; a symbolic link is followed.
        schema: from output_schema(): the columns of the windows' tables, then the results.
        overwrite: replace a file that is there, at commit.
        columns: of the results; None: of completions.
    Raises:
        InputError: the output exists or cannot be written, as check_output.
        OutputError: of the methods: a write failed; the temporary file is gone then.
    """

    def __init__(
        self, path: Path | str, schema: pa.Schema, overwrite: bool = False, columns: ResultColumns | None = None
    ) -> None:
        check_output(path, overwrite)
        self._path = Path(path)
        self._schema = schema
        self._stored_schema = storage_schema(schema)
        self._overwrite = overwrite
        self._columns: ResultColumns = arrays if columns is None else columns
        self._temporary = _temporary_beside(self._path)
        self._num_rows = 0
        self._writer: pq.ParquetWriter | None = None
        with self._cleaned_up_on_error():
            self._writer = pq.ParquetWriter(
                self._temporary, self._stored_schema, compression="zstd", write_page_checksum=True
            )

    def write_window(self, table: pa.Table, first_row_index: int, results: Iterable[Result]) -> None:
        """Append the rows of `table`, one output row per sample.

        `table` holds input rows from `first_row_index` on; windows come in input order. Results (completions)
        may come in any order; every row has its samples 0, 1, ..., n - 1.
        """
        assert self._writer is not None, "the output is closed"
        assert first_row_index == self._num_rows, f"rows from {self._num_rows} are next, got {first_row_index}"
        assert table.schema.equals(pa.schema(list(self._schema)[: table.num_columns])), "not the input's columns"
        ordered = sorted(results, key=lambda c: (c.row_index, c.sample_index))
        rows = np.array([c.row_index for c in ordered], dtype=np.int64) - first_row_index
        check_complete(rows, np.array([c.sample_index for c in ordered], dtype=np.int64), table.num_rows)
        self._num_rows += table.num_rows
        table = as_stored(table, self._stored_schema)
        with self._cleaned_up_on_error():
            for start, stop in row_groups(table, rows, self._columns.num_bytes(ordered)):
                columns = repeated_rows(table, rows[start:stop]).columns
                columns += self._result_columns(table.num_columns, ordered[start:stop])
                group = pa.Table.from_arrays(columns, schema=self._stored_schema)
                self._writer.write_table(group, row_group_size=GROUP_ROWS)

    def _result_columns(self, num_input_columns: int, results: Sequence[Result]) -> list[pa.Array]:
        fields = list(self._schema)[num_input_columns:]
        build_column = self._columns.build_column
        return [build_column(field.metadata[METADATA_KEY].decode(), field.type, results) for field in fields]

    def commit(self, finish_metadata: Mapping[str, str] | None = None) -> None:
        """Make the file durable and give it its name; `finish_metadata` goes over the schema's metadata."""
        assert self._writer is not None, "the output is closed"
        with self._cleaned_up_on_error():
            self._writer.add_key_value_metadata(file_metadata(self._schema, finish_metadata or {}))
            self._writer.close()
            sync(self._temporary)
        if not self._overwrite and self._path.exists():
            self._writer = None  # the work is done and must not be lost
            raise InputError(f"output {self._path} appeared meanwhile and is left alone; this run is {self._temporary}")
        with self._cleaned_up_on_error():
            rename(self._temporary, _target(self._path), "output")
        self._writer = None

    def abort(self) -> None:
        """Remove what was written. Does nothing after commit or a second time."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError, pa.ArrowException):  # it writes its footer to the end
                writer.close()
            self._temporary.unlink(missing_ok=True)

    @contextmanager
    def _cleaned_up_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.abort()
            self._temporary.unlink(missing_ok=True)  # also where the writer could not be made
            if isinstance(error, OSError):
                raise OutputError(f"cannot write {self._path}: {error.strerror or error}") from error
            raise

    def __enter__(self) -> ParquetOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()


def _target(path: Path) -> Path:
    """Where the bytes go: a link's target, so that the link stays."""
    return path.resolve()


def _temporary_beside(path: Path) -> Path:
    return _target(path).parent / f".batchinfer-{os.getpid()}-{secrets.token_hex(4)}.tmp"
