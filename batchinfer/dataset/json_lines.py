"""The lines of JSON Lines files, from any row on. A line that is no JSON object is a row all the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from batchinfer.dataset.file_stamp import FileStamp
from batchinfer.errors import InputError

_BATCH_ROWS = 1024
_BATCH_BYTES = 64 * 2**20
_MARK_ROWS = 1024
# Far below the 2 GiB that an Arrow array of strings can hold, and no prompt comes near it.
_MAX_LINE_BYTES = 256 * 2**20
_CANNOT_BE_JSON_LINES = 1000  # bad lines before any good one
_BOM = b"\xef\xbb\xbf"


class Record(NamedTuple):
    path: Path
    line: int  # from 1
    num_bytes: int  # of the line
    values: dict[str, Any]  # none where the line has a problem
    problem: str | None = None  # why there is no JSON object on the line, or not all of one
    has_escaped_surrogates: bool = False  # maybe in pairs, which is how JSON writes characters beyond U+FFFF

    @property
    def where(self) -> str:
        return f"{self.path}, line {self.line}"

    @property
    def error(self) -> str | None:
        """The problem and its place."""
        return None if self.problem is None else f"{self.where}: {self.problem}"


class _Mark(NamedTuple):
    """Where a row's line begins."""

    file: int
    line: int
    offset: int  # bytes


_BEGIN = _Mark(0, 1, 0)


def first_record(paths: Sequence[Path]) -> Record:
    """The first good row. Raises InputError where there is none, or none among very many lines."""
    first_bad: Record | None = None
    for record in islice(_read(paths, _BEGIN, lambda mark: None), _CANNOT_BE_JSON_LINES):
        if record.problem is None:
            return record
        first_bad = first_bad or record
    if first_bad is None:
        raise InputError(f"{name_of(paths)} has no rows")
    raise InputError(_not_json_lines(paths, first_bad))


class JsonLines:
    """The rows of files that are read more than once: every line but blank ones.

    Args:
        clean: makes every record what its row can hold.
        limit: rows, None: all.
    Raises:
        InputError: of the methods too: a file cannot be read, or changed meanwhile.
    """

    def __init__(self, paths: Sequence[Path], clean: Callable[[Record], Record], limit: int | None = None) -> None:
        self.num_rows = 0
        self.row_errors: dict[int, str] = {}
        self._paths = paths
        self._clean = clean
        self._limit = limit
        self._marks: list[_Mark] = []  # of every _MARK_ROWS-th row
        self._num_bytes = 0
        try:
            self._stamps = [FileStamp.of(path) for path in paths]
        except OSError as error:
            raise InputError(f"cannot read {error.filename}: {error.strerror}") from error

    def scan(self) -> Iterator[Record]:
        """All rows, once, before records(): counts them, notes where they are and which are bad.

        Raises InputError, after the last row, where most are no JSON objects.
        """
        num_bad = 0
        first_bad: Record | None = None
        for record in islice(_read(self._paths, _BEGIN, self._note), self._limit):
            if record.problem is not None:
                num_bad += 1
                first_bad = first_bad or record
            record = self._clean(record)
            if record.error is not None:
                self.row_errors[self.num_rows] = record.error
            self.num_rows += 1
            self._num_bytes += record.num_bytes
            yield record
        if first_bad is not None and 2 * num_bad > self.num_rows:
            raise InputError(_not_json_lines(self._paths, first_bad, f"{num_bad} of {self.num_rows} lines have none; "))

    def _note(self, mark: _Mark) -> None:
        if self.num_rows % _MARK_ROWS == 0:
            self._marks.append(mark)

    def mean_line_bytes(self) -> float:
        """Of the rows that scan() has seen, of which there is one at least."""
        return self._num_bytes / self.num_rows

    def records(self, start: int = 0) -> Iterator[Record]:
        """The rows from `start` on, as scan() saw them."""
        for path, stamp in zip(self._paths, self._stamps, strict=True):
            stamp.check(path)
        num_skip = start % _MARK_ROWS
        mark = self._marks[start // _MARK_ROWS] if start < self.num_rows else _BEGIN
        records = islice(_read(self._paths, mark, lambda mark: None), num_skip, num_skip + self.num_rows - start)
        return map(self._clean, records)


def name_of(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _not_json_lines(paths: Sequence[Path], bad: Record, how_many: str = "") -> str:
    return f"{name_of(paths)} is not JSON Lines, one object per line: {how_many}{bad.error}"


def _read(paths: Sequence[Path], mark: _Mark, on_row: Callable[[_Mark], None]) -> Iterator[Record]:
    """Rows from `mark` on; `on_row` gets the place of each before it comes."""
    for index in range(mark.file, len(paths)):
        path = paths[index]
        _, line, offset = mark if index == mark.file else _Mark(index, 1, 0)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                for text, num_bytes in _lines(file):
                    if text is None or text.strip():
                        on_row(_Mark(index, line, offset))
                        yield _parse(text, num_bytes, path, line)
                    line += 1
                    offset += num_bytes
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error


def _lines(file: BinaryIO) -> Iterator[tuple[bytes | None, int]]:
    """(line, its bytes in the file); None for one that is too long."""
    while line := file.readline(_MAX_LINE_BYTES + 1):
        num_bytes = len(line)
        is_whole = num_bytes <= _MAX_LINE_BYTES or line.endswith(b"\n")
        while line and not line.endswith(b"\n") and not is_whole:
            line = file.readline(_MAX_LINE_BYTES)
            num_bytes += len(line)
        yield line if is_whole else None, num_bytes


def _parse(line: bytes | None, num_bytes: int, path: Path, number: int) -> Record:
    def bad(problem: str) -> Record:
        return Record(path, number, num_bytes, {}, problem)

    if line is None:
        return bad(f"{num_bytes} bytes; a line has at most {_MAX_LINE_BYTES}")
    line = line.removeprefix(_BOM) if number == 1 else line
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return bad(f"not UTF-8 at byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        return bad(f"not JSON: {error}")
    if not isinstance(values, dict):
        kind = "an array" if isinstance(values, list) else f"{json.dumps(values)[:50]}"
        return bad(f"found {kind}; JSON Lines have one object per line")
    has_escaped_surrogates = b"\\ud" in line or b"\\uD" in line
    return Record(path, number, num_bytes, values, None, has_escaped_surrogates)


def without_invalid_text(record: Record) -> Record:
    """Escapes such as \\ud83d without their other half are no text, which Arrow strings cannot hold.

    The values that hold one are left out and become the record's problem.
    """
    if not record.has_escaped_surrogates:
        return record
    bad = [key for key, value in record.values.items() if not _is_text(json.dumps([key, value], ensure_ascii=False))]
    if not bad:
        return record
    values = {key: value for key, value in record.values.items() if key not in bad}
    return record._replace(values=values, problem=f"{bad[0]!r} holds half of a surrogate pair: not valid text")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Few enough bytes together that no Arrow array of them passes 2 GiB."""
    batch: list[Record] = []
    num_bytes = 0
    for record in records:
        if batch and (len(batch) == _BATCH_ROWS or num_bytes + record.num_bytes > _BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(record)
        num_bytes += record.num_bytes
    if batch:
        yield batch
