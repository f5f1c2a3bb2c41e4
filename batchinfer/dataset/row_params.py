"""A row's own sampling parameters: the `sampling_params` struct column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from batchinfer.dataset.row_input_error import RowInputError
from batchinfer.errors import InputError
from batchinfer.types import ErrorCode, RowError, SamplingParams

_WHOLE = ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs")
_REAL = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_TRUTH = ("include_stop", "ignore_eos", "prompt_logprobs")


def is_text(type_: pa.DataType) -> bool:
    """A string of any layout, or a dictionary of strings."""
    if pt.is_dictionary(type_):
        type_ = type_.value_type
    return bool(pt.is_string(type_) or pt.is_large_string(type_) or pt.is_string_view(type_))


def is_list(type_: pa.DataType) -> bool:
    return bool(
        pt.is_list(type_)
        or pt.is_large_list(type_)
        or pt.is_fixed_size_list(type_)
        or pt.is_list_view(type_)
        or pt.is_large_list_view(type_)
    )


def check_params_type(column: str, type_: pa.DataType) -> None:
    """Refuse a column whose struct has a field that is no sampling parameter or cannot hold one. Raises InputError."""
    if not pt.is_struct(type_):
        raise InputError(f"column {column!r} must be a struct of sampling parameters, not {type_}")
    for field in type_:
        if field.name not in SamplingParams.names():
            raise InputError(
                f"column {column!r} has field {field.name!r}, which is no sampling parameter; "
                f"known: {', '.join(SamplingParams.names())}"
            )
        if not pt.is_null(field.type) and not _can_hold(field.name, field.type):
            raise InputError(f"column {column!r}: field {field.name!r} cannot have type {field.type}")


def _can_hold(name: str, type_: pa.DataType) -> bool:
    if name in _WHOLE or name in _REAL:
        return bool(pt.is_integer(type_) or pt.is_floating(type_))
    if name in _TRUTH:
        return bool(pt.is_boolean(type_))
    if name == "stop":
        return is_text(type_) or (is_list(type_) and (is_text(type_.value_type) or pt.is_null(type_.value_type)))
    if name == "stop_token_ids":
        return is_list(type_) and bool(pt.is_integer(type_.value_type) or pt.is_null(type_.value_type))
    return is_text(type_)  # logprobs_mode


class RowParams:
    """Puts rows' own values over the defaults. Equal values are checked once and share one object."""

    def __init__(self, defaults: SamplingParams) -> None:
        self._defaults = defaults
        self._known: dict[str, SamplingParams | RowError] = {}

    def over_defaults(self, values: Mapping[str, Any] | None) -> SamplingParams:
        """The defaults with the non-null `values` on top. Raises RowInputError (invalid_params)."""
        given = {name: value for name, value in (values or {}).items() if value is not None}
        return self.override(given)

    def override(self, values: Mapping[str, Any]) -> SamplingParams:
        """As over_defaults, but None is a value: `logprobs=None` turns the default off."""
        if not values:
            return self._defaults
        key = repr(sorted(values.items()))  # tells 1, 1.0 and True apart
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._check(values)
        if isinstance(found, RowError):
            raise RowInputError(found.code, found.message)
        return found

    def _check(self, values: Mapping[str, Any]) -> SamplingParams | RowError:
        try:
            return replace(self._defaults, **{name: _as_kind(name, value) for name, value in values.items()})
        except (TypeError, ValueError) as error:
            return RowError(ErrorCode.INVALID_PARAMS, f"the row's sampling parameters: {error}")


def _as_kind(name: str, value: Any) -> Any:
    """Tables hold whole numbers with gaps as floats, and JSON holds 1 for 1.0."""
    if name in _WHOLE and isinstance(value, float) and value.is_integer():
        return int(value)
    if name in _REAL and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value
