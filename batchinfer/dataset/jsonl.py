"""JSON Lines: one object per line, under a schema that holds for every line.

The file is read twice. The first pass checks every line and finds the types, so that a bad or odd
last line is known before any work; the second one makes the tables. Arrow's own reader infers from
its first block and turns strings that look like dates into dates.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from batchinfer.dataset.openai_batch import is_openai_batch, open_openai_batch
from batchinfer.dataset.windows import StreamSource
from batchinfer.errors import InputError

_BATCH_ROWS = 1024
_BATCH_BYTES = 64 * 2**20
_MAX_EXACT_FLOAT = 2**53
_MAX_KEYS = 1000
_BOM = b"\xef\xbb\xbf"


class Record(NamedTuple):
    path: Path
    line: int  # from 1
    num_bytes: int  # of the line
    values: dict[str, Any]

    @property
    def where(self) -> str:
        return f"{self.path}, line {self.line}"


def open_jsonl(paths: Sequence[Path], limit: int | None = None) -> StreamSource:
    """JSON Lines, or the OpenAI Batch format where the first line has custom_id and body.

    Raises InputError naming file and line for a line that is not UTF-8, not JSON or not an object,
    and for a key whose values have no common type.
    """
    name = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    first = next(read_records(paths), None)
    if first is None:
        raise InputError(f"{name} has no rows")
    if is_openai_batch(first.values):
        return open_openai_batch(name, lambda: islice(read_records(paths), limit))
    num_rows = 0
    shape = _Shape()
    for record in islice(read_records(paths), limit):
        shape.add(record.values, "", record)
        num_rows += 1
    if not shape.fields:
        raise InputError(f"{name} has no columns: every line is an empty object")
    schema = pa.schema([pa.field(key, inner.arrow_type()) for key, inner in shape.fields.items()])
    return StreamSource(name, schema, num_rows, lambda: _read_tables(paths, schema, num_rows))


def _read_tables(paths: Sequence[Path], schema: pa.Schema, num_rows: int) -> Iterator[pa.Table]:
    for batch in batches(islice(read_records(paths), num_rows)):
        try:
            columns = [pa.array([r.values.get(f.name) for r in batch], type=f.type) for f in schema]
        except (pa.ArrowException, OverflowError) as error:
            raise InputError(f"{batch[0].where}: changed since it was opened: {error}") from error
        yield pa.Table.from_arrays(columns, schema=schema)


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


def read_records(paths: Sequence[Path]) -> Iterator[Record]:
    """The objects of all lines; blank lines are no rows."""
    for path in paths:
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    line = line.removeprefix(_BOM) if number == 1 else line
                    if line.strip():
                        yield Record(path, number, len(line), _parse(line, path, number))
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    where = f"{path}, line {number}"
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 at byte {error.start} of the line") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from error
    if isinstance(values, dict):
        return values
    kind = "an array" if isinstance(values, list) else f"{json.dumps(values)[:50]}"
    raise InputError(f"{where}: found {kind}; JSON Lines have one object per line")


def _check_text(text: str, name: str, record: Record) -> None:
    """Escapes such as \\ud83d without their other half are no text; Arrow strings cannot hold them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise InputError(f"{record.where}: {name!r} holds {half}, half of a surrogate pair: not valid text") from error


_KINDS = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}


@dataclass(slots=True)
class _Shape:
    """What the values of one key, over all lines, have in common."""

    kind: str | None = None  # a value of _KINDS; None: only nulls so far
    first: Record | None = None  # where that kind was first seen
    is_float: bool = False
    low: int = 0
    high: int = 0
    item: _Shape | None = None  # of a list
    fields: dict[str, _Shape] = field(default_factory=dict)  # of an object

    def add(self, value: Any, name: str, record: Record) -> None:
        """Widen to hold `value`; `name` is the dotted path of the key. Raises InputError if it cannot."""
        if value is None:
            return
        kind = _KINDS[type(value)]
        if self.kind is None:
            self.kind, self.first = kind, record
        elif self.kind != kind:
            assert self.first is not None
            raise InputError(
                f"{record.where}: {name!r} is {kind} here and {self.kind} in line {self.first.line} of "
                f"{self.first.path}: a column has one type; write mixed values as JSON text"
            )
        if kind == "a string":
            _check_text(value, name, record)
        elif kind == "a number":
            self._add_number(value, name, record)
        elif kind == "a list":
            self.item = self.item or _Shape()
            for item in value:
                self.item.add(item, f"{name}[]", record)
        elif kind == "an object":
            self._add_object(value, name, record)

    def _add_number(self, value: int | float, name: str, record: Record) -> None:
        if isinstance(value, float):
            self.is_float = True
        else:
            self.low, self.high = min(self.low, value), max(self.high, value)
        if self.is_float and max(-self.low, self.high) > _MAX_EXACT_FLOAT:
            raise InputError(
                f"{record.where}: {name!r} mixes fractions with whole numbers beyond 2^53, which no number type "
                "holds exactly: write them as strings"
            )
        if self.high >= 2**64 or self.low < -(2**63) or (self.low < 0 and self.high >= 2**63):
            raise InputError(f"{record.where}: {name!r} needs more than 64 bits ({value}): write it as a string")

    def _add_object(self, value: dict[str, Any], name: str, record: Record) -> None:
        for key, inner in value.items():
            shape = self.fields.get(key)
            if shape is None:
                if len(self.fields) == _MAX_KEYS:
                    raise InputError(
                        f"{record.where}: {name or 'the lines'!r} have more than {_MAX_KEYS} different keys: "
                        "write the object as JSON text"
                    )
                _check_text(key, key, record)
                shape = self.fields[key] = _Shape()
            shape.add(inner, f"{name}.{key}" if name else key, record)

    def arrow_type(self) -> pa.DataType:
        if self.kind == "a number":
            if self.is_float:
                return pa.float64()
            return pa.uint64() if self.high >= 2**63 else pa.int64()
        if self.kind == "a list":
            assert self.item is not None
            return pa.list_(self.item.arrow_type())
        if self.kind == "an object":
            # Parquet has no struct without fields: always empty objects get one that is always null.
            fields = {key: shape.arrow_type() for key, shape in self.fields.items()} or {"_": pa.null()}
            return pa.struct(list(fields.items()))
        return {"a boolean": pa.bool_(), "a string": pa.string(), None: pa.null()}[self.kind]
