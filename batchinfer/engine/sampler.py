"""Draws the next token of each row from its logits, by that row's own parameters.

All in fp32 on the logits' device, vectorised over rows. A row's result is a function of its logits,
parameters and stream alone: whatever runs along a long dimension keeps a fixed length (the vocabulary).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer.engine.batch import PersistentBatch
from batchinfer.engine.random import gumbel_noise, gumbel_noise_all
from batchinfer.engine.sequence import Sequence

#: Rows of Gumbel noise for the whole vocabulary made at a time; more would leave the caches.
NOISE_ROWS = 16
NEG_INF = float("-inf")


@dataclass(slots=True)
class Sampled:
    """One drawn token of each row, in the order of the rows given."""

    token_ids: list[int]
    logprobs: list[float | None]  # None where not asked for
    top_logprobs: list[list[tuple[int, float]] | None]
    is_finite: list[bool]  # False: the model gave NaN or infinity, and the row's token means nothing


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """Parameters of the rows that have a temperature, as contiguous host arrays [rows]; see SamplingParams."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    keys: npt.NDArray[np.int64]  # see random.stream_key
    positions: npt.NDArray[np.int64]  # of the drawn token in the output

    @classmethod
    def of(cls, seqs: list[Sequence], slots: npt.NDArray[np.int64], batch: PersistentBatch) -> DrawColumns:
        return cls(
            temperature=batch.temperature[slots],
            top_k=batch.top_k[slots],
            top_p=batch.top_p[slots],
            min_p=batch.min_p[slots],
            keys=batch.stream_key[slots],
            positions=np.fromiter((seq.num_output for seq in seqs), np.int64, len(seqs)),
        )


@runtime_checkable
class FusedDraw(Protocol):
    """A model whose device draws by itself, with the same steps and random numbers as `draw` here."""

    def draw(self, logits: Tensor, columns: DrawColumns, *, writes: bool) -> Tensor:
        """Ids [rows] int64 drawn from logits [rows, vocab] fp32, contiguous.

        With `writes` the logits become the scaled and truncated ones that the ids were drawn from.
        """


class Sampler:
    """See SamplingParams for the order of the steps.

    Args:
        num_ids: ids from here on are rows of a padded vocabulary that no text has; never drawn.
        eos_token_ids: banned before `min_tokens`.
        model: asked to draw if it is a FusedDraw.
    """

    def __init__(self, num_ids: int, eos_token_ids: tuple[int, ...], model: object = None) -> None:
        self.num_ids = num_ids
        self.eos_token_ids = eos_token_ids
        self._draw = model.draw if isinstance(model, FusedDraw) else draw

    def __call__(self, logits: Tensor, seqs: list[Sequence], batch: PersistentBatch) -> Sampled:
        """Draw from `logits` [rows, vocab] fp32, which is overwritten. Row i belongs to seqs[i]."""
        slots = np.fromiter((seq.slot for seq in seqs), np.int64, len(seqs))
        is_finite = torch.isfinite(logits.amax(-1))
        wanted = batch.num_logprobs[slots]
        raw_rows = np.flatnonzero((wanted >= 0) & ~batch.is_processed[slots])
        raw = torch.log_softmax(logits[_index(raw_rows, logits)], -1) if len(raw_rows) else None
        for row, seq in enumerate(seqs):
            _penalise(logits, row, seq)
            self._ban(logits, row, seq)
        logits[:, self.num_ids :] = NEG_INF
        token_ids = logits.argmax(-1)
        drawn = np.flatnonzero(batch.temperature[slots] > 0)
        if len(drawn):
            columns = DrawColumns.of([seqs[row] for row in drawn], slots[drawn], batch)
            writes = bool((batch.is_processed[slots[drawn]] & (wanted[drawn] >= 0)).any())
            rows = _index(drawn, logits)
            part = logits if len(drawn) == len(seqs) else logits[rows]
            token_ids[rows] = self._draw(part, columns, writes=writes)
            if writes and part is not logits:
                logits[rows] = part
        out = Sampled(token_ids.tolist(), [None] * len(seqs), [None] * len(seqs), is_finite.tolist())
        if raw is not None:
            _report(out, raw, raw_rows, wanted)
        processed_rows = np.flatnonzero((wanted >= 0) & batch.is_processed[slots])
        if len(processed_rows):
            processed = torch.log_softmax(logits[_index(processed_rows, logits)], -1)
            _report(out, processed, processed_rows, wanted)
        return out

    def _ban(self, logits: Tensor, row: int, seq: Sequence) -> None:
        if seq.num_output < seq.params.min_tokens:
            banned = [i for i in (*self.eos_token_ids, *seq.params.stop_token_ids) if i < logits.shape[1]]
            logits[row, banned] = NEG_INF


def _index(rows: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(like.device)


def _penalise(logits: Tensor, row: int, seq: Sequence) -> None:
    seen = seq.penalised()
    if seen is None:
        return
    params = seq.params
    ids = torch.from_numpy(seen.ids[: seen.num_ids]).to(logits.device)
    counts = torch.from_numpy(seen.counts[: seen.num_ids]).to(logits.device)
    values = logits[row, ids]
    if params.repetition_penalty != 1:
        values = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    values = values - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    logits[row, ids] = values


def draw(logits: Tensor, columns: DrawColumns, *, writes: bool) -> Tensor:
    """A Gumbel-max draw from the scaled and truncated logits; see FusedDraw."""

    def put(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(logits.device)

    keys, at = put(columns.keys), put(columns.positions)
    # From the maximum, so that a low temperature cannot make it infinite.
    scaled = (logits - logits.amax(-1, keepdim=True)) / put(columns.temperature)[:, None]
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    is_cut = (columns.top_k > 0) | (columns.top_p < 1) | (columns.min_p > 0)
    for begin in range(0, len(logits), NOISE_ROWS):
        part = np.arange(begin, min(begin + NOISE_ROWS, len(logits)))
        whole, cut = _index(part[~is_cut[part]], logits), _index(part[is_cut[part]], logits)
        if len(whole):
            noise = gumbel_noise_all(keys[whole], at[whole], logits.shape[1])
            token_ids[whole] = (scaled[whole] + noise).argmax(-1)
        if len(cut):
            limits = Limits(put(columns.top_k)[cut], put(columns.top_p)[cut], put(columns.min_p)[cut])
            kept = _truncate(scaled[cut], limits)
            noise = gumbel_noise(keys[cut], at[cut], kept.ids)
            token_ids[cut] = kept.ids.gather(1, (kept.logits + noise).argmax(-1, keepdim=True))[:, 0]
            scaled[cut] = torch.full_like(scaled[cut], NEG_INF).scatter_(1, kept.ids, kept.logits)
    if writes:
        logits.copy_(scaled)
    return token_ids


@dataclass(frozen=True, slots=True)
class Limits:
    """[rows] each; see SamplingParams."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True, slots=True)
class Kept:
    """The ids that truncation leaves, most probable first; padded with -inf to the longest row."""

    ids: Tensor  # [rows, n] int64
    logits: Tensor  # [rows, n]


def _truncate(logits: Tensor, limits: Limits) -> Kept:
    """top_k, then top_p over what is left, then min_p. A stable sort breaks ties towards lower ids."""
    ordered, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)[None]
    keep = (rank < limits.top_k[:, None]) | (limits.top_k[:, None] == 0)
    probs = torch.softmax(ordered.masked_fill(~keep, NEG_INF), -1)
    before = probs.double().cumsum(-1) - probs  # probability of the ids above this one
    # top_p = 1 keeps all, whatever the rounding of the sum.
    keep &= (before < limits.top_p[:, None]) | (limits.top_p[:, None] >= 1)
    keep &= probs >= limits.min_p[:, None] * probs[:, :1]
    keep[:, 0] = True
    count = int(keep.sum(-1).max())
    return Kept(ids[:, :count], ordered.masked_fill(~keep, NEG_INF)[:, :count])


def _report(out: Sampled, logprobs: Tensor, rows: np.ndarray, wanted: np.ndarray) -> None:
    """Fill in the log-probabilities of `rows`; logprobs[i] [vocab] belongs to rows[i]."""
    chosen = torch.tensor([out.token_ids[row] for row in rows], device=logprobs.device)
    values = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    for row, value in zip(rows, values, strict=True):
        out.logprobs[row] = value
    # Rows with the same k together: which of equal values topk takes may depend on k, never on other rows.
    for k in sorted(set(wanted[rows])):
        of_k = np.flatnonzero(wanted[rows] == k)
        best = logprobs[_index(of_k, logprobs)].topk(min(int(k), logprobs.shape[1]), -1) if k else None
        for at, i in enumerate(of_k):
            pairs = [] if best is None else list(zip(best.indices[at].tolist(), best.values[at].tolist(), strict=True))
            out.top_logprobs[rows[i]] = pairs
