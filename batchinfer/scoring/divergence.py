"""Two models on the same tokens: how their distributions over the vocabulary differ, token by token.

Each model reads the tokens once, in its own engine, with shared beginnings computed once, and gives back
the hidden states that the scored tokens are predicted from. The heads of both then run side by side, a
few rows at a time: logits of more than that are never held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from batchinfer.errors import InputError
from batchinfer.planner.prefix_tree import build_prefix_tree
from batchinfer.scoring.item import ScoreItem
from batchinfer.scoring.windows import Window
from batchinfer.types import Prompt, RowError, SamplingParams, ScoreRequest, TokenIds

if TYPE_CHECKING:  # torch is imported where it is used: evaluators are looked at before any work
    from torch import Tensor

    from batchinfer.engine.engine import Engine
    from batchinfer.kernels import reference

    _Hidden = list[Tensor | RowError]

#: Logits held at a time, of each model: 16 MiB in fp32.
MAX_LOGITS = 1 << 22
#: Scored tokens whose hidden states are held at a time, of each model.
MAX_TOKENS = 1 << 14

_Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenDivergence:
    """One row under two models, over its scored tokens in order. All in nats, all of the raw distributions.

    Attributes:
        token_ids: [num_scored] the scored tokens.
        logprobs_before, logprobs_after: [num_scored] of the token under each model.
        kl_before_after: [num_scored] KL(before || after) over the whole vocabulary, >= 0.
        kl_after_before: [num_scored] KL(after || before).
        entropies_before, entropies_after: [num_scored]
        is_same_top: [num_scored] both models find the same token most probable.
        error: why there are none of these; the arrays are empty then.
    """

    token_ids: TokenIds
    logprobs_before: _Doubles
    logprobs_after: _Doubles
    kl_before_after: _Doubles
    kl_after_before: _Doubles
    entropies_before: _Doubles
    entropies_after: _Doubles
    is_same_top: npt.NDArray[np.bool_]
    error: RowError | None = None

    @classmethod
    def failed(cls, error: RowError) -> TokenDivergence:
        none = np.empty(0)
        ids, same = np.empty(0, np.int32), np.empty(0, np.bool_)
        return cls(ids, none, none, none, none, none, none, same, error)

    def __len__(self) -> int:
        return len(self.token_ids)


def compare_tokens(
    before: Engine,
    after: Engine,
    items: Sequence[ScoreItem],
    *,
    on_step: Callable[[Any], None] | None = None,
    max_tokens: int = MAX_TOKENS,
) -> list[TokenDivergence]:
    """Both models on the scored tokens of `items`, in order. The engines may be one and the same.

    Rows longer than the shorter context of the two are read in windows side by side, by both alike.

    Args:
        on_step: called after each step of either engine with its stats; it may raise to stop.
        max_tokens: scored tokens whose hidden states are held at a time, of each model.

    Raises:
        InputError: the vocabularies are not of one size: no divergence is defined over them.
    """
    sizes = before.model.spec.vocab_size, after.model.spec.vocab_size
    if sizes[0] != sizes[1]:
        raise InputError(
            f"the models have vocabularies of {sizes[0]} and {sizes[1]} ids: a divergence needs the same one"
        )
    window = Window.of(None, None, min(before.max_model_len, after.max_model_len))
    rows: list[dict[int, TokenDivergence]] = [{} for _ in items]  # by window
    for batch in _batches(items, window, max_tokens):
        hidden = [_hidden(engine, batch, on_step) for engine in (before, after)]
        for piece, found in zip(batch, _compare(before, after, batch, *hidden), strict=True):
            rows[piece.row][piece.window] = found
    return [_joined(item, [found[key] for key in sorted(found)]) for item, found in zip(items, rows, strict=True)]


class _Piece(NamedTuple):
    """What is read at once."""

    row: int
    window: int
    token_ids: TokenIds
    request: ScoreRequest

    @property
    def targets(self) -> TokenIds:
        """[num_scored]"""
        return np.append(self.token_ids, np.int32(self.request.next_id))[self.request.positions()]


def _batches(items: Sequence[ScoreItem], window: Window, max_tokens: int) -> Iterator[list[_Piece]]:
    """Pieces of at most `max_tokens` scored tokens together (or one piece), those with a common beginning together."""
    pieces = [
        _Piece(row, number, token_ids, replace(request, keeps_hidden=True))
        for row, item in enumerate(items)
        for number, (token_ids, request) in enumerate(window.pieces(item))
    ]
    batch: list[_Piece] = []
    num_tokens = 0
    for index in build_prefix_tree([piece.token_ids for piece in pieces]).order.tolist():
        size = len(pieces[index].targets)
        if batch and num_tokens + size > max_tokens:
            yield batch
            batch, num_tokens = [], 0
        batch.append(pieces[index])
        num_tokens += size
    if batch:
        yield batch


def _hidden(engine: Engine, batch: Sequence[_Piece], on_step: Callable[[Any], None] | None) -> _Hidden:
    """[num_scored, hidden_size] of each piece, or why there is none."""
    prompts = [
        Prompt(index, piece.token_ids, SamplingParams(), score=piece.request) for index, piece in enumerate(batch)
    ]
    found: dict[int, Tensor | RowError] = {}
    with closing(engine.run(prompts, on_step)) as finished:  # type: ignore[type-var]
        for completion in finished:
            value = completion.error if completion.hidden is None else completion.hidden
            assert value is not None
            found[completion.row_index] = value
    return [found[index] for index in range(len(batch))]


def _compare(before: Engine, after: Engine, batch: Sequence[_Piece], p: _Hidden, q: _Hidden) -> list[TokenDivergence]:
    import torch

    from batchinfer.kernels import reference

    pairs = list(zip(p, q, strict=True))
    good = [i for i, pair in enumerate(pairs) if not any(map(_is_error, pair))]
    found = {i: TokenDivergence.failed(error) for i, pair in enumerate(pairs) for error in pair if _is_error(error)}
    if good:
        targets = [batch[i].targets for i in good]
        sides = [torch.cat([side[i] for i in good]) for side in (p, q)]  # type: ignore[misc]
        values = _divergence(before, after, sides[0], sides[1], np.concatenate(targets))
        ends = np.cumsum([len(ids) for ids in targets])
        for i, ids, end in zip(good, targets, ends.tolist(), strict=True):
            found[i] = _row(ids, reference.Divergence(*(value[end - len(ids) : end] for value in values)))
    return [found[i] for i in range(len(batch))]


def _is_error(value: Tensor | RowError) -> TypeGuard[RowError]:
    return isinstance(value, RowError)


def _divergence(before: Engine, after: Engine, p: Tensor, q: Tensor, targets: TokenIds) -> reference.Divergence:
    """Of all rows of hidden states p and q [rows, hidden_size], a few rows of logits at a time; on the CPU."""
    import torch
    import torch.nn.functional as F

    from batchinfer.kernels import reference

    vocab_size = before.model.spec.vocab_size
    step = max(reference.ROW_MULTIPLE, MAX_LOGITS // vocab_size // reference.ROW_MULTIPLE * reference.ROW_MULTIPLE)
    ids = torch.from_numpy(targets.astype(np.int64)).to(after.device)
    out = reference.empty_divergence(len(ids), torch.device("cpu"))
    for begin in range(0, len(ids), step):
        count = min(step, len(ids) - begin)
        pad = (0, 0, 0, reference.pad_rows(count) - count)
        one, two = (
            engine.model.logits(F.pad(hidden[begin : begin + count], pad))[:count].to(after.device)
            for engine, hidden in ((before, p), (after, q))
        )
        for values, found in zip(out, reference.divergence(one, two, ids[begin : begin + count]), strict=True):
            values[begin : begin + count] = found
    return out


def _row(token_ids: TokenIds, found: reference.Divergence) -> TokenDivergence:
    return TokenDivergence(
        token_ids=token_ids,
        logprobs_before=found.logprob_p.numpy(),
        logprobs_after=found.logprob_q.numpy(),
        kl_before_after=found.kl_pq.numpy(),
        kl_after_before=found.kl_qp.numpy(),
        entropies_before=found.entropy_p.numpy(),
        entropies_after=found.entropy_q.numpy(),
        is_same_top=(found.argmax_p == found.argmax_q).numpy(),
    )


def _joined(item: ScoreItem, windows: list[TokenDivergence]) -> TokenDivergence:
    """A row's windows, in order."""
    error = item.error or next((one.error for one in windows if one.error is not None), None)
    if error is not None:
        return TokenDivergence.failed(error)

    def joined(name: str) -> Any:
        return np.concatenate([getattr(one, name) for one in windows])

    return TokenDivergence(
        token_ids=joined("token_ids"),
        logprobs_before=joined("logprobs_before"),
        logprobs_after=joined("logprobs_after"),
        kl_before_after=joined("kl_before_after"),
        kl_after_before=joined("kl_after_before"),
        entropies_before=joined("entropies_before"),
        entropies_after=joined("entropies_after"),
        is_same_top=joined("is_same_top"),
    )
