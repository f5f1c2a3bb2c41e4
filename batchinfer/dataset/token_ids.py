"""Prompts that are given as token ids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from batchinfer.dataset.row_input_error import RowInputError
from batchinfer.types import ErrorCode, TokenIds


def checked_token_ids(values: Any, vocab_size: int) -> TokenIds:
    """[num_ids] int32 of whole numbers, lists of them or numpy arrays.

    Raises RowInputError (invalid_prompt) naming the first that is null or outside the model's vocabulary.
    """
    ids = np.asarray(values)
    if ids.dtype.kind not in "iu":  # empty, or with nulls or numbers beyond 64 bits
        _check_each(values, vocab_size)
        return np.array(values, dtype=np.int32)
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(bad):
        raise _outside(ids[bad[0]], bad[0], vocab_size)
    return ids.astype(np.int32)


def _check_each(values: Iterable[int | None], vocab_size: int) -> None:
    for position, token_id in enumerate(values):
        if token_id is None or not 0 <= token_id < vocab_size:
            raise _outside("null" if token_id is None else token_id, position, vocab_size)


def _outside(token_id: Any, position: int, vocab_size: int) -> RowInputError:
    message = f"token id {token_id} at position {position} is not between 0 and {vocab_size - 1}"
    return RowInputError(ErrorCode.INVALID_PROMPT, message)
