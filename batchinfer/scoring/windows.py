"""Long rows -> pieces that a model can read, each scored token in exactly one of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from batchinfer.errors import InputError
from batchinfer.scoring.item import ScoreItem, Spans
from batchinfer.types import ScoreRequest, TokenIds


@dataclass(frozen=True, slots=True)
class Window:
    """How rows that are longer than a model's context are cut.

    A window reads `size` tokens and scores the last `stride` or fewer of those that they predict, so each
    scored token sees at least size - stride + 1 tokens before it, or all that there are. Windows end at the
    row's end: the last one is as full as the others.

    Attributes:
        size: tokens that a window reads; the token behind the last one is scored too.
        stride: tokens that each further window adds.
    """

    size: int
    stride: int

    @property
    def min_context(self) -> int:
        """Tokens that every scored token sees before it, unless the row has fewer there."""
        return self.size - self.stride + 1

    @classmethod
    def of(cls, size: int | None, stride: int | None, max_model_len: int) -> Window:
        """By default a window is the model's whole context, and the next one begins where it ends.

        Raises InputError for a window longer than the context, and for a stride beyond the window.
        """
        size = max_model_len if size is None else size
        stride = size if stride is None else stride
        if not 1 <= size <= max_model_len:
            raise InputError(f"--window must be between 1 and the {max_model_len} tokens of the context, got {size}")
        if not 1 <= stride <= size:
            raise InputError(f"--stride must be between 1 and the window of {size} tokens, got {stride}")
        return cls(size, stride)

    def pieces(self, item: ScoreItem) -> Iterator[tuple[TokenIds, ScoreRequest]]:
        """(tokens to read, what to score of them) of each window with something to score.

        A row that fits is one piece, cut behind the last token that is scored.
        """
        if not item.spans:
            return
        last = item.spans[-1][1] - 1
        if last <= self.size:
            yield item.token_ids[:last], ScoreRequest(item.spans, int(item.token_ids[last]))
            return
        positions = np.concatenate([np.arange(*span) for span in item.spans])
        done = 0  # of positions
        while done < len(positions):
            end = min(last, max(self.size, int(positions[done]) - 1 + self.stride))
            begin = max(0, end - self.size)
            stop = int(np.searchsorted(positions, end, side="right"))
            end = int(positions[stop - 1])  # nothing behind the last scored token is read
            spans = _shifted(item.spans, int(positions[done]), end + 1, begin)
            yield item.token_ids[begin:end], ScoreRequest(spans, int(item.token_ids[end]))
            done = stop

    def sees_all(self, item: ScoreItem) -> bool:
        """Whether each scored token sees everything before it."""
        return not item.spans or item.spans[-1][1] - 1 <= self.size


def _shifted(spans: Spans, low: int, high: int, offset: int) -> Spans:
    """The parts of the spans within [low, high), counted from `offset`."""
    cut = ((max(begin, low), min(end, high)) for begin, end in spans)
    return tuple((begin - offset, end - offset) for begin, end in cut if begin < end)
