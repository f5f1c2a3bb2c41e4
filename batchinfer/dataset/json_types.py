"""The Arrow type that holds the values of one JSON key over all lines, exactly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from batchinfer.dataset.json_lines import Record
from batchinfer.errors import InputError

_MAX_EXACT_FLOAT = 2**53
_MAX_KEYS = 1000
_STRING = "a string"
_KINDS = {bool: "a boolean", int: "a number", float: "a number", str: _STRING, list: "a list", dict: "an object"}


@dataclass(slots=True)
class Shape:
    """What the values of one key, over all lines, have in common."""

    kind: str | None = None  # a value of _KINDS; None: only nulls so far
    first: Record | None = None  # where that kind was first seen
    is_float: bool = False
    low: int = 0
    high: int = 0
    item: Shape | None = None  # of a list
    fields: dict[str, Shape] = field(default_factory=dict)  # of an object

    def add(self, value: Any, name: str, record: Record) -> None:
        """Widen to hold `value`; `name` is the dotted path of the key. Raises InputError if it cannot."""
        if value is None:
            return
        kind = _KINDS[type(value)]
        if self.kind is kind and (kind is _STRING or (type(value) is int and self.low <= value <= self.high)):
            return  # most values tell nothing new
        if self.kind is None:
            self.kind, self.first = kind, record
        elif self.kind != kind:
            assert self.first is not None
            raise InputError(
                f"{record.where}: {name!r} is {kind} here and {self.kind} in line {self.first.line} of "
                f"{self.first.path}: a column has one type; write mixed values as JSON text"
            )
        if kind == "a number":
            self._add_number(value, name, record)
        elif kind == "a list":
            self.item = self.item or Shape()
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
                shape = self.fields[key] = Shape()
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
