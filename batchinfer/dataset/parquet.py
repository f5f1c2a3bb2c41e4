"""Parquet files, folders and globs, a few rows of one row group at a time."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.dataset.file_stamp import FileStamp
from batchinfer.dataset.windows import StreamSource, check_column_names, limited
from batchinfer.errors import InputError

MAGIC = b"PAR1"
# Rows decoded at once. How large they are shows only then: what the footer tells is less where values are
# repeated, which are stored once. A pass begins with few rows, and goes on with as many as take about so many bytes.
_BATCH_ROWS = (1024, 256, 64, 16, 4, 1)
_FIRST_ROWS = 16
_BATCH_BYTES = 32 * 2**20


def find_parquet_files(spec: str) -> list[Path]:
    """The files of a path, a folder (all *.parquet below it) or a glob, sorted by path.

    Files and folders whose name starts with "." or "_" are other programs' temporary or side files
    and are left out. Raises InputError if none is left.
    """
    path = Path(spec)
    if path.is_file():
        return [path]
    if path.is_dir():
        files = _files_below(path)
        if not files:
            raise InputError(f"folder {spec} holds no *.parquet file{_what_else(path)}")
        return files
    if not glob.has_magic(spec):
        raise InputError(f"{spec} does not exist")
    matches = [Path(match) for match in sorted(glob.glob(spec, recursive=True))]
    files = [file for match in matches for file in (_files_below(match) if match.is_dir() else [match])]
    files = [file for file in dict.fromkeys(files) if _is_visible(file.name)]
    if not files:
        raise InputError(f"no file matches {spec}")
    return files


def _files_below(folder: Path) -> list[Path]:
    """Raises InputError for a folder that may not be looked into: its rows would be missing without a word."""

    def refuse(error: OSError) -> None:
        raise InputError(f"cannot read {error.filename}: {error.strerror}") from error

    files = []
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if _is_visible(name)]
        files += [Path(place, name) for name in names if _is_visible(name) and name.endswith(".parquet")]
    return sorted(file for file in files if file.is_file())


def _is_visible(name: str) -> bool:
    return not name.startswith((".", "_"))


def _what_else(folder: Path) -> str:
    others = sorted(file.name for file in folder.iterdir() if file.suffix in (".jsonl", ".ndjson", ".json"))
    return f"; it holds {others[0]}: name that file" if others else ""


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    stamp: FileStamp
    group_rows: tuple[int, ...]  # rows of each row group

    @property
    def num_rows(self) -> int:
        return sum(self.group_rows)


def open_parquet(paths: Sequence[Path], limit: int | None = None) -> StreamSource:
    """Files of one schema, one after the other. Reads the footers only.

    Raises InputError naming the file, and the field where schemas differ.
    """
    schema, first = _read_footer(paths[0])
    check_column_names(schema, str(paths[0]))
    files = [first]
    for path in paths[1:]:
        other, file = _read_footer(path)
        check_column_names(other, str(path))
        _check_same_fields(schema, paths[0], other, path)
        files.append(file)
    name = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    num_rows = limited(sum(file.num_rows for file in files), limit)
    return StreamSource(name, schema, num_rows, lambda start, columns: _read_files(files, start, columns))


def _read_footer(path: Path) -> tuple[pa.Schema, _File]:
    try:
        stamp = FileStamp.of(path)
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    if stamp.size_bytes == 0:
        raise InputError(f"{path} is empty (0 bytes), not a Parquet file")
    if magic != MAGIC:
        raise InputError(f"{path} is not a Parquet file (JSON Lines files are known by the ending .jsonl)")
    try:
        with pq.ParquetFile(path) as parquet:
            footer = parquet.metadata
            group_rows = tuple(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
            return parquet.schema_arrow, _File(path, stamp, group_rows)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is cut short or damaged: {_first_line(error)}") from error


def _check_same_fields(schema: pa.Schema, first: Path, other: pa.Schema, path: Path) -> None:
    for field in schema:
        if field.name not in other.names:
            raise InputError(f"{path} lacks column {field.name!r}, which {first} has ({field.type})")
        found = other.field(field.name)
        if found.type != field.type:
            raise InputError(
                f"column {field.name!r} has type {found.type} in {path} and {field.type} in {first}: "
                "all files need the same columns and types"
            )
        if found.nullable and not field.nullable:
            raise InputError(f"column {field.name!r} may be null in {path} and may not in {first}")
    extra = [name for name in other.names if name not in schema.names]
    if extra:
        raise InputError(f"{path} has column {extra[0]!r} ({other.field(extra[0]).type}), which {first} lacks")


class _Pace:
    """How many rows of a pass are decoded at once."""

    def __init__(self) -> None:
        self.batch_rows = _FIRST_ROWS
        self._may_grow = True  # once: going back and forth would decode rows again and again

    def note(self, batch: pa.RecordBatch) -> bool:
        """Whether the next batches should have another size than this one; `batch_rows` is it then."""
        fitting = _BATCH_BYTES * batch.num_rows / max(batch.nbytes, 1)
        rows = next((rows for rows in _BATCH_ROWS if rows <= fitting), 1)
        is_first, self._may_grow = self._may_grow, False
        if rows < self.batch_rows or (rows > self.batch_rows and is_first):
            self.batch_rows = rows
            return True
        return False

    def halve(self) -> bool:
        """Whether there is a smaller size, which `batch_rows` is then."""
        smaller = [rows for rows in _BATCH_ROWS if rows < self.batch_rows]
        self.batch_rows = smaller[0] if smaller else self.batch_rows
        return bool(smaller)


def _read_files(files: Sequence[_File], start: int, columns: Sequence[str] | None) -> Iterator[pa.Table]:
    """All rows from row `start` on; files and row groups before it are not opened or decoded."""
    pace = _Pace()
    for file in files:
        if start < file.num_rows:
            yield from _read_file(file, start, columns, pace)
        start = max(start - file.num_rows, 0)


def _read_file(file: _File, start: int, columns: Sequence[str] | None, pace: _Pace) -> Iterator[pa.Table]:
    file.stamp.check(file.path)
    group = row = 0
    try:
        # Without pre_buffer pages are read as they are needed, not the whole row group at once.
        with pq.ParquetFile(file.path, pre_buffer=False, page_checksum_verification=True) as parquet:
            for group, num_rows in enumerate(file.group_rows):
                if start < row + num_rows:
                    for table in _read_row_group(parquet, group, max(start - row, 0), columns, pace):
                        start = max(start, row) + table.num_rows
                        yield table
                row += num_rows
    except (pa.ArrowException, OSError) as error:
        where = f"row {max(start, row)} on (row group {group})"
        raise InputError(f"cannot read {file.path} from {where}: {_first_line(error)}") from error


def _read_row_group(
    parquet: pq.ParquetFile, group: int, start: int, columns: Sequence[str] | None, pace: _Pace
) -> Iterator[pa.Table]:
    """The rows of one row group from its row `start` on."""
    names = None if columns is None else list(columns)
    num_rows = parquet.metadata.row_group(group).num_rows
    while start < num_rows:
        num_skip = start
        try:
            for batch in parquet.iter_batches(pace.batch_rows, row_groups=[group], columns=names):
                part = batch.slice(num_skip) if num_skip < batch.num_rows else batch.slice(0, 0)
                num_skip -= batch.num_rows - part.num_rows
                start += part.num_rows
                if part.num_rows:
                    yield pa.Table.from_batches([part])
                    if pace.note(part):
                        break
            else:
                return  # also where the group has fewer rows than its footer says
        except pa.ArrowNotImplementedError:  # nested strings of more than 2 GiB in one batch
            if not pace.halve():
                raise


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
