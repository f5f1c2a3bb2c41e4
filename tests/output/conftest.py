"""Completions that can be told apart, whatever order they come in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from batchinfer.types import Completion, ErrorCode, FinishReason, RowError


@pytest.fixture
def complete() -> Callable[..., Completion]:
    """A completion whose text and ids name its row and sample."""

    def make(row: int, sample: int = 0, **changes) -> Completion:
        values = {
            "row_index": row,
            "sample_index": sample,
            "token_ids": [row, sample, 7],
            "text": f"row {row} sample {sample}",
            "finish_reason": FinishReason.STOP,
            "num_prompt_tokens": 5,
            "num_cached_tokens": 3,
        }
        return Completion(**(values | changes))

    return make


@pytest.fixture
def fail() -> Callable[..., Completion]:
    """The completion of a row that could not run."""

    def make(row: int, code: ErrorCode = ErrorCode.PROMPT_NULL) -> Completion:
        return Completion(row_index=row, error=RowError(code, f"row {row} cannot run"))

    return make
