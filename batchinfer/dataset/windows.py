"""What every input format becomes: a stream of Arrow tables of one schema, cut into windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from batchinfer.errors import InputError

#: Rows that are planned, run and written together.
WINDOW_ROWS = 65_536

#: Starts a pass over the data at a row, with some columns or all (None); tables of any size.
Pass = Callable[[int, Sequence[str] | None], Iterator[pa.Table]]


class PromptSource(Protocol):
    """A dataset of prompts.

    `schema` is known up front and every window has exactly it. `num_rows` is None only where the
    source cannot know it. Rows come in input order; row i of the source is row i of every pass.
    """

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def num_rows(self) -> int | None: ...

    @property
    def rereads(self) -> bool:
        """Whether reading rows a second time is possible and cheaper than holding them meanwhile."""
        ...

    @property
    def row_errors(self) -> Mapping[int, str]:
        """Why rows cannot be read, by row; what could not be read of them is null."""
        ...

    def windows(
        self, num_rows: int = WINDOW_ROWS, *, columns: Sequence[str] | None = None, start: int = 0
    ) -> Iterator[pa.Table]:
        """Tables of exactly `num_rows` rows, the last one shorter, from row `start` on.

        `columns` (None: all) are the only ones that are read; they come in the schema's order.
        Raises InputError when the data cannot be read or changed since it was opened.
        """
        ...

    def read_rows(self, start: int, num_rows: int | None = None) -> Iterator[pa.Table]:
        """All columns of `num_rows` rows (None: to the end) from row `start` on, in tables of any size.

        Raises InputError as windows() does.
        """
        ...


@dataclass(frozen=True, slots=True)
class StreamSource:
    """A PromptSource over a function that starts a new pass over the data.

    Attributes:
        name: what messages call it.
        schema: of every table.
        num_rows: rows of the whole source, `limit` applied; None: unknown.
        tables: starts a pass; from row 0 on at least `num_rows` rows in all.
        limit: rows to read at most, where num_rows is None.
        rereads, row_errors: see PromptSource.
    """

    name: str
    schema: pa.Schema
    num_rows: int | None
    tables: Pass
    limit: int | None = None
    rereads: bool = True
    row_errors: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_column_names(self.schema, self.name)
        if self.num_rows == 0:
            raise InputError(f"{self.name} has no rows")

    def windows(
        self, num_rows: int = WINDOW_ROWS, *, columns: Sequence[str] | None = None, start: int = 0
    ) -> Iterator[pa.Table]:
        if num_rows < 1:
            raise ValueError(f"a window has at least 1 row, got {num_rows}")
        schema = self.schema if columns is None else projected(self.schema, columns)
        num_left = self._num_left(start)
        if num_left == 0:
            return
        num_read = 0
        for window in cut_windows(self.tables(start, columns), schema, num_rows, num_left):
            num_read += window.num_rows
            yield window
        self._check_num_read(start + num_read)

    def read_rows(self, start: int, num_rows: int | None = None) -> Iterator[pa.Table]:
        num_left = self._num_left(start)
        wanted = min((n for n in (num_left, num_rows) if n is not None), default=None)
        if wanted == 0:
            return
        num_read = 0
        for table in self.tables(start, None):
            table = conform(table, self.schema).slice(0, None if wanted is None else wanted - num_read)
            num_read += table.num_rows
            yield table
            if num_read == wanted:
                return
        self._check_num_read(start + num_read)

    def _num_left(self, start: int) -> int | None:
        total = self.limit if self.num_rows is None else self.num_rows
        if start < 0 or (total is not None and start > total):
            raise ValueError(f"{self.name} has {total} rows, none of them is row {start}")
        return None if total is None else total - start

    def _check_num_read(self, num_rows: int) -> None:
        if self.num_rows is not None and num_rows != self.num_rows:
            raise InputError(f"{self.name} had {self.num_rows} rows when it was opened and has {num_rows} now")


@dataclass(frozen=True, slots=True)
class InputWindow:
    """Rows that are run together: what their prompts are made of now, and all of them again when they are written.

    Attributes:
        first_row_index: of the rows, in the whole input.
        table: [num_rows] only the columns that prompts are made of.
        full: all columns of the same rows, under exactly the source's schema, in tables of any size. Raises
            InputError as PromptSource.read_rows. Any thread may call it, one at a time; the windows of a pass share
            a reader, which goes on where it stopped when they are written in order.
    """

    first_row_index: int
    table: pa.Table
    full: Callable[[], Iterator[pa.Table]]

    @property
    def num_rows(self) -> int:
        return self.table.num_rows


def input_windows(
    source: PromptSource, num_rows: int = WINDOW_ROWS, *, columns: Sequence[str], start: int = 0
) -> Iterator[InputWindow]:
    """Windows of `num_rows` rows from row `start` on.

    Columns beside `columns`, however wide, are not in memory while a window runs, except where the source
    cannot be read twice. Raises InputError as PromptSource.windows.
    """
    names = projected(source.schema, columns).names
    reader = _RowReader(source)
    first = start
    for table in source.windows(num_rows, columns=names if source.rereads else None, start=start):
        full = _read_again(reader, first, table.num_rows) if source.rereads else _held(table)
        yield InputWindow(first, table.select(names), full)
        first += table.num_rows


def _read_again(reader: _RowReader, start: int, num_rows: int) -> Callable[[], Iterator[pa.Table]]:
    return lambda: reader.read(start, num_rows)


def _held(table: pa.Table) -> Callable[[], Iterator[pa.Table]]:
    return lambda: iter([table])


class _RowReader:
    """Rows of a source in full. Where one reading ended, the next one goes on without seeking."""

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        self._position: int | None = None  # the row that comes next
        self._tables: Iterator[pa.Table] = iter(())
        self._rest: pa.Table | None = None  # read and not yet asked for

    def read(self, start: int, num_rows: int) -> Iterator[pa.Table]:
        if start != self._position:
            self._tables, self._rest = self._source.read_rows(start), None
        self._position = None  # a reading that is not finished leaves it unknown
        num_left = num_rows
        while num_left:
            table = next(self._tables, None) if self._rest is None else self._rest
            assert table is not None, "read_rows ends with an error where rows are missing"
            piece = table.slice(0, num_left)
            self._rest = table.slice(piece.num_rows) if piece.num_rows < table.num_rows else None
            num_left -= piece.num_rows
            if not num_left:
                self._position = start + num_rows
            yield piece


def check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1 row, got {limit}")


def limited(num_rows: int, limit: int | None) -> int:
    return num_rows if limit is None else min(num_rows, limit)


def check_column_names(schema: pa.Schema, name: str) -> None:
    twice = [column for column, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise InputError(f"{name} has more than one column named {twice[0]!r}: rename one")


def projected(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """`schema` with only `columns`, in its own order."""
    return pa.schema([one for one in schema if one.name in columns], metadata=schema.metadata)


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` under exactly `schema`: its columns by name, its metadata.

    Types differ only in form here: an extension type that was registered after the schema was
    read, or the name of a list's item field.
    """
    if table.schema.equals(schema, check_metadata=True):
        return table
    columns = []
    for one in schema:
        column = table.column(one.name)
        columns.append(column if column.type == one.type else column.cast(one.type))
    return pa.Table.from_arrays(columns, schema=schema)


def cut_windows(tables: Iterable[pa.Table], schema: pa.Schema, num_rows: int, total: int | None) -> Iterator[pa.Table]:
    """Regroup tables of any size into tables of `num_rows` rows, stopping after `total` rows. Nothing is copied."""
    held: list[pa.Table] = []
    num_held = num_seen = 0
    for table in tables:
        table = conform(table, schema)
        if total is not None:
            table = table.slice(0, total - num_seen)
        num_seen += table.num_rows
        while num_held + table.num_rows >= num_rows:
            head = table.slice(0, num_rows - num_held)
            table = table.slice(head.num_rows)
            yield pa.concat_tables([*held, head])
            held, num_held = [], 0
        if table.num_rows:
            held.append(table)
            num_held += table.num_rows
        if num_seen == total:
            break
    if held:
        yield pa.concat_tables(held)
