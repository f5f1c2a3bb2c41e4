"""Completions -> Arrow arrays, one per result column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinfer.types import Completion, RowError

_Values = Sequence[Any] | npt.NDArray[Any]


def build_column(name: str, type_: pa.DataType, completions: Sequence[Completion]) -> pa.Array:
    """The result `name` of each completion. Rows with an error have nulls, except in the counts."""
    return _BUILDERS[name](completions, type_)


def _plain(get: Callable[[Completion], Any]) -> Callable[[Sequence[Completion], pa.DataType], pa.Array]:
    return lambda completions, type_: pa.array([get(c) for c in completions], type=type_)


def _lists(get: Callable[[Completion], Any]) -> Callable[[Sequence[Completion], pa.DataType], pa.Array]:
    return lambda completions, type_: list_column([get(c) for c in completions], type_)


def list_column(lists: Sequence[_Values | None], type_: pa.DataType) -> pa.Array:
    """An array of lists; None is null. The lists may be numpy arrays, all or none of them."""
    if any(isinstance(items, np.ndarray) for items in lists):
        values = pa.array(np.concatenate([items for items in lists if items is not None]), type=type_.value_type)
    else:
        values = pa.array(list(chain.from_iterable(items or () for items in lists)), type=type_.value_type)
    return pa.ListArray.from_arrays(_offsets(lists), values, type=type_, mask=_is_null(lists))


def _top_logprobs(completions: Sequence[Completion], type_: pa.DataType) -> pa.Array:
    tokens = [None if c.error else c.top_logprobs for c in completions]
    flat = list(chain.from_iterable(items or () for items in tokens))
    pairs = list(chain.from_iterable(flat))
    struct = type_.value_type.value_type
    best = pa.StructArray.from_arrays(
        [
            pa.array([token_id for token_id, _ in pairs], type=struct.field("token_id").type),
            pa.array([logprob for _, logprob in pairs], type=struct.field("logprob").type),
        ],
        fields=list(struct),
    )
    inner = pa.ListArray.from_arrays(_offsets(flat), best, type=type_.value_type)
    return pa.ListArray.from_arrays(_offsets(tokens), inner, type=type_, mask=_is_null(tokens))


def error_column(errors: Sequence[RowError | None], type_: pa.DataType) -> pa.Array:
    code = pa.array([e.code.value if e else None for e in errors], type=type_.field("code").type)
    message = pa.array([e.message if e else None for e in errors], type=type_.field("message").type)
    return pa.StructArray.from_arrays([code, message], fields=list(type_), mask=_is_null(errors))


def _offsets(lists: Iterable[_Values | None]) -> pa.Array:
    lengths = [0, *(0 if items is None else len(items) for items in lists)]
    return pa.array(np.cumsum(lengths, dtype=np.int32))


def _is_null(values: Sequence[Any]) -> pa.Array:
    return pa.array([value is None for value in values], type=pa.bool_())


def num_bytes(completions: Sequence[Completion]) -> npt.NDArray[np.int64]:
    """[num_completions] about what each takes in Arrow."""
    return np.array([_num_bytes(c) for c in completions], dtype=np.int64)


def _num_bytes(completion: Completion) -> int:
    num_top = len(completion.top_logprobs[0]) if completion.top_logprobs else 0
    per_token = 12 + 8 * num_top  # id, logprob, offset; (id, logprob) pairs
    num_prompt = len(completion.prompt_logprobs or ())
    return 64 + len(completion.text or "") + len(completion.token_ids) * per_token + 4 * num_prompt


_BUILDERS: dict[str, Callable[[Sequence[Completion], pa.DataType], pa.Array]] = {
    "sample_index": _plain(lambda c: c.sample_index),
    "output": _plain(lambda c: None if c.error else c.text),
    "output_token_ids": _lists(lambda c: None if c.error else c.token_ids),
    "finish_reason": _plain(lambda c: "error" if c.error else c.finish_reason.value),
    "stop_reason": _plain(lambda c: None if c.error or c.stop_reason is None else str(c.stop_reason)),
    "num_prompt_tokens": _plain(lambda c: c.num_prompt_tokens),
    "num_cached_tokens": _plain(lambda c: c.num_cached_tokens),
    "num_output_tokens": _plain(lambda c: 0 if c.error else len(c.token_ids)),
    "logprobs": _lists(lambda c: None if c.error else c.logprobs),
    "top_logprobs": _top_logprobs,
    "prompt_logprobs": _lists(lambda c: None if c.error else c.prompt_logprobs),
    "error": lambda completions, type_: error_column([c.error for c in completions], type_),
}
