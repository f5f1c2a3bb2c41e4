"""One row to score: its tokens, which of them count, and how much text those are."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchinfer.types import ErrorCode, RowError, TokenIds

Spans = tuple[tuple[int, int], ...]

NO_TOKENS: TokenIds = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """A row, tokenized.

    Attributes:
        token_ids: all tokens, context included.
        spans: half-open ranges of positions whose tokens are scored, ascending, apart, from 1.
        num_bytes: UTF-8 bytes of the scored text. Special tokens have none.
        num_words: words of the scored text, separated by whitespace.
        error: why nothing is scored; code nothing_to_score is not a failure.
    """

    token_ids: TokenIds = field(default_factory=lambda: NO_TOKENS)
    spans: Spans = ()
    num_bytes: int = 0
    num_words: int = 0
    error: RowError | None = None

    def __post_init__(self) -> None:
        assert bool(self.spans) == (self.error is None), "scored tokens or a reason why there are none"

    @property
    def num_scored(self) -> int:
        return sum(end - begin for begin, end in self.spans)

    @property
    def scored_ids(self) -> TokenIds:
        """[num_scored]"""
        return np.concatenate([NO_TOKENS, *(self.token_ids[begin:end] for begin, end in self.spans)])

    @classmethod
    def failed(cls, code: ErrorCode, message: str) -> ScoreItem:
        return cls(error=RowError(code, message))

    @classmethod
    def empty(cls, message: str) -> ScoreItem:
        """A row without a token to score, which is no failure."""
        return cls.failed(ErrorCode.NOTHING_TO_SCORE, message)

    @classmethod
    def of_text(
        cls,
        text: str,
        token_ids: TokenIds,
        ends: npt.NDArray[np.int32],
        spans: Spans,
        special_ids: Collection[int] = frozenset(),
    ) -> ScoreItem:
        """`spans`, not empty, of a text whose token i ends behind `ends[i]` characters."""
        num_bytes = num_words = 0
        for piece in scored_texts(text, token_ids, ends, spans, special_ids):
            num_bytes += len(piece.encode())
            num_words += len(piece.split())
        return cls(token_ids, spans, num_bytes, num_words)


def scored_texts(
    text: str, token_ids: TokenIds, ends: npt.NDArray[np.int32], spans: Spans, special_ids: Collection[int]
) -> Iterator[str]:
    """The characters of the scored tokens, cut at special tokens, which are left out."""
    for begin, end in spans:
        start = int(ends[begin - 1])
        for place in range(begin, end) if special_ids else ():
            if int(token_ids[place]) in special_ids:
                yield text[start : int(ends[place - 1])]
                start = int(ends[place])
        yield text[start : len(text) if end == len(ends) else int(ends[end - 1])]


def spans_of(mask: npt.NDArray[np.bool_]) -> Spans:
    """The ranges of True."""
    borders = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return tuple((int(begin), int(end)) for begin, end in zip(borders[::2], borders[1::2], strict=True))
