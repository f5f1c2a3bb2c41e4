"""What every input format becomes: a stream of Arrow tables of one schema, cut into windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from batchinfer.errors import InputError

#: Rows that are planned, run and written together.
WINDOW_ROWS = 65_536


class PromptSource(Protocol):
    """A dataset of prompts.

    `schema` is known up front and every window has exactly it. `num_rows` is None only where the
    source cannot know it. Rows come in input order; row i of the source is row i of every pass.
    """

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def num_rows(self) -> int | None: ...

    def windows(self, num_rows: int = WINDOW_ROWS) -> Iterator[pa.Table]:
        """Tables of exactly `num_rows` rows, the last one shorter. Every call starts at row 0.

        Raises InputError when the data cannot be read or changed since it was opened.
        """
        ...


@dataclass(frozen=True, slots=True)
class StreamSource:
    """A PromptSource over a function that starts a new pass over the data.

    Attributes:
        name: what messages call it.
        schema: of every table.
        num_rows: rows of the whole source, `limit` applied; None: unknown.
        tables: starts a pass; tables of any size, at least `num_rows` rows in all.
        limit: rows to read at most, where num_rows is None.
    """

    name: str
    schema: pa.Schema
    num_rows: int | None
    tables: Callable[[], Iterator[pa.Table]]
    limit: int | None = None

    def __post_init__(self) -> None:
        check_column_names(self.schema, self.name)
        if self.num_rows == 0:
            raise InputError(f"{self.name} has no rows")

    def windows(self, num_rows: int = WINDOW_ROWS) -> Iterator[pa.Table]:
        if num_rows < 1:
            raise ValueError(f"a window has at least 1 row, got {num_rows}")
        wanted = self.limit if self.num_rows is None else self.num_rows
        num_read = 0
        for window in cut_windows(self.tables(), self.schema, num_rows, wanted):
            num_read += window.num_rows
            yield window
        if self.num_rows is not None and num_read != self.num_rows:
            raise InputError(f"{self.name} had {self.num_rows} rows when it was opened and has {num_read} now")


def check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1 row, got {limit}")


def limited(num_rows: int, limit: int | None) -> int:
    return num_rows if limit is None else min(num_rows, limit)


def check_column_names(schema: pa.Schema, name: str) -> None:
    twice = [column for column, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise InputError(f"{name} has more than one column named {twice[0]!r}: rename one")


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` under exactly `schema`: its columns by name, its metadata.

    Types differ only in form here: an extension type that was registered after the schema was
    read, or the name of a list's item field.
    """
    if table.schema.equals(schema, check_metadata=True):
        return table
    columns = []
    for field in schema:
        column = table.column(field.name)
        columns.append(column if column.type == field.type else column.cast(field.type))
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
