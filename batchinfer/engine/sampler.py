"""Draws the next token of each row from its logits, by that row's own parameters.

All in fp32 on the logits' device, vectorised over rows. A row's result is a function of its logits,
parameters and stream alone: whatever runs along a long dimension keeps a fixed length (the vocabulary).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer.engine.batch import PersistentBatch
from batchinfer.engine.penalties import penalise
from batchinfer.engine.pending import PendingTokens
from batchinfer.engine.random import gumbel_noise, gumbel_noise_all
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.staging import Staging

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
class Report:
    """Log-probabilities of some rows' tokens, and their k most probable ids."""

    rows: npt.NDArray[np.int64]  # [n] which rows of the draw
    logprobs: Tensor  # [n] fp32
    top: tuple[Tensor, Tensor] | None  # ids [n, k] int64 and log-probabilities [n, k] fp32, best first; None: k is 0


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was drawn, on the device: nobody has waited for it."""

    token_ids: Tensor  # [rows] int
    is_finite: Tensor  # [rows] bool
    reports: list[Report]

    def tensors(self) -> list[Tensor]:
        """All there is to bring to the host."""
        found = [self.token_ids, self.is_finite]
        for report in self.reports:
            found += (report.logprobs, *(report.top or ()))
        return found

    def read(self, arrays: Iterator[npt.NDArray[Any]]) -> Sampled:
        """Takes the values of `tensors` off the front of `arrays`."""
        token_ids, is_finite = next(arrays).tolist(), next(arrays).tolist()
        out = Sampled(token_ids, [None] * len(token_ids), [None] * len(token_ids), is_finite)
        for report in self.reports:
            rows, logprobs = report.rows.tolist(), next(arrays).tolist()
            tops: Iterable[list[tuple[int, float]]] = ([] for _ in rows)
            if report.top is not None:
                pairs = zip(next(arrays).tolist(), next(arrays).tolist(), strict=True)
                tops = (list(zip(ids, values, strict=True)) for ids, values in pairs)
            for row, logprob, top in zip(rows, logprobs, tops, strict=True):
                out.logprobs[row], out.top_logprobs[row] = logprob, top
        return out


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
            positions=np.fromiter((seq.num_drawn for seq in seqs), np.int64, len(seqs)),
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

    def __call__(
        self, logits: Tensor, seqs: list[Sequence], batch: PersistentBatch, pending: PendingTokens | None = None
    ) -> Drawn:
        """Draw from `logits` [rows, vocab] fp32, which is overwritten. Row i belongs to seqs[i]. Reads nothing back.

        Args:
            pending: last tokens of some of the sequences. Positions and min_tokens need their number alone.
        """
        slots = np.fromiter((seq.slot for seq in seqs), np.int64, len(seqs))
        is_drawn = batch.temperature[slots] > 0
        wanted, is_processed = batch.num_logprobs[slots], batch.is_processed[slots]
        asked = [_Asked.of(wanted, (wanted >= 0) & is_kind) for is_kind in (~is_processed, is_processed)]
        rows = np.flatnonzero(is_drawn)
        put = iter(batch.staging.put([rows, *asked[0].arrays(), *asked[1].arrays()]))
        index, raw, processed = next(put), asked[0].on_device(put), asked[1].on_device(put)
        is_finite = torch.isfinite(logits.amax(-1))
        raw_logprobs = raw.logprobs(logits)
        penalise(logits, seqs, batch.staging, pending)
        self._ban(logits, seqs, batch.staging)
        logits[:, self.num_ids :] = NEG_INF
        writes = bool((is_processed & (wanted >= 0) & is_drawn).any())
        if len(rows) == len(seqs):
            token_ids = self._draw(logits, DrawColumns.of(seqs, slots, batch), writes=writes)
        else:
            token_ids = logits.argmax(-1)
        if 0 < len(rows) < len(seqs):
            part = logits[index]
            columns = DrawColumns.of([seqs[row] for row in rows], slots[rows], batch)
            token_ids[index] = self._draw(part, columns, writes=writes)
            if writes:
                logits[index] = part
        reports = raw.reports(raw_logprobs, token_ids) + processed.reports(processed.logprobs(logits), token_ids)
        return Drawn(token_ids, is_finite, reports)

    def _ban(self, logits: Tensor, seqs: list[Sequence], staging: Staging) -> None:
        """What would end a row before its min_tokens is not drawn."""
        banned = [
            (row, token_id)
            for row, seq in enumerate(seqs)
            if seq.params.min_tokens and seq.num_drawn < seq.params.min_tokens
            for token_id in (*self.eos_token_ids, *seq.params.stop_token_ids)
            if token_id < logits.shape[1]
        ]
        if banned:
            rows, ids = staging.put(list(np.array(banned, dtype=np.int64).T))
            logits[rows, ids] = NEG_INF


@dataclass(frozen=True, slots=True)
class _Asked:
    """Rows that ask for log-probabilities of one kind, by how many of the most probable ids they want."""

    rows: npt.NDArray[np.int64]
    # Rows with the same k together: which of equal values topk takes may depend on k, never on other rows.
    groups: dict[int, npt.NDArray[np.int64]]  # k -> places among `rows`

    @classmethod
    def of(cls, wanted: npt.NDArray[np.int64], is_asked: npt.NDArray[np.bool_]) -> _Asked:
        rows = np.flatnonzero(is_asked)
        return cls(rows, {k: np.flatnonzero(wanted[rows] == k) for k in sorted(set(wanted[rows].tolist()))})

    def arrays(self) -> list[npt.NDArray[np.int64]]:
        return [self.rows, *self.groups.values()]

    def on_device(self, put: Iterator[Tensor]) -> _AskedOnDevice:
        """With the tensors of `arrays`, taken off the front of `put`."""
        return _AskedOnDevice(self, next(put), [next(put) for _ in self.groups])


class _AskedOnDevice(NamedTuple):
    host: _Asked
    rows: Tensor
    groups: list[Tensor]

    def logprobs(self, logits: Tensor) -> Tensor | None:
        """[rows asked, vocab] fp32; None if nobody asks."""
        if not len(self.host.rows):
            return None
        return torch.log_softmax(logits if len(self.host.rows) == len(logits) else logits[self.rows], -1)

    def reports(self, logprobs: Tensor | None, token_ids: Tensor) -> list[Report]:
        if logprobs is None:
            return []
        of_drawn = logprobs.gather(1, token_ids[self.rows][:, None])[:, 0]
        found = []
        for (k, places), index in zip(self.host.groups.items(), self.groups, strict=True):
            best = logprobs[index].topk(min(k, logprobs.shape[1]), -1) if k else None
            top = None if best is None else (best.indices, best.values)
            found.append(Report(self.host.rows[places], of_drawn[index], top))
        return found


def _index(rows: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(like.device)


def draw(logits: Tensor, columns: DrawColumns, *, writes: bool) -> Tensor:
    """A Gumbel-max draw from the scaled and truncated logits; see FusedDraw. Waits for the device."""

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
