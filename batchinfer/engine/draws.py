"""From hidden states to drawn tokens: which way through the head each row takes. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer.engine.batch import PersistentBatch
from batchinfer.engine.pending import PendingTokens
from batchinfer.engine.sampler import Drawn, Report, Sampled, Sampler
from batchinfer.engine.sequence import Sequence
from batchinfer.models.decoder import FusedHead, LanguageModel

#: fp32 logits held at a time while sampling: 64 MiB, near the caches of a CPU.
MAX_LOGITS = 1 << 24
#: 256 MiB on a GPU, where each part reads the head's weights again: 523 rows of 128,256 ids at once. The profile
#: run before the KV pool is made leaves room for them; see kv_memory.
MAX_LOGITS_GPU = 1 << 26


def rows_at_a_time(model: LanguageModel) -> int:
    """Rows that the sampler takes together."""
    most = MAX_LOGITS if model.device.type == "cpu" else MAX_LOGITS_GPU
    return max(16, most // model.spec.vocab_size)


@dataclass(frozen=True, slots=True)
class LaunchedDraws:
    """The draws of a step, on the device."""

    seqs: list[Sequence] = field(default_factory=list)
    parts: list[Drawn] = field(default_factory=list)  # one after the other, of all sequences

    def tensors(self) -> list[Tensor]:
        """All there is to bring to the host."""
        return [tensor for part in self.parts for tensor in part.tensors()]

    def read(self, arrays: Iterator[npt.NDArray[Any]]) -> Iterator[tuple[list[Sequence], Sampled]]:
        """Sequences and what was drawn for them, with the values of `tensors` off the front of `arrays`."""
        begin = 0
        for part in self.parts:
            end = begin + len(part.token_ids)
            yield self.seqs[begin:end], part.read(arrays)
            begin = end

    def pending(self) -> PendingTokens | None:
        if not self.seqs:
            return None
        return PendingTokens(torch.cat([part.token_ids.long() for part in self.parts]), self.seqs)


class Drawer:
    """Draws the next token of sequences from their final hidden states."""

    def __init__(self, model: LanguageModel, sampler: Sampler, batch: PersistentBatch) -> None:
        self.model = model
        self.sampler = sampler
        self.batch = batch
        self._fused = model if isinstance(model, FusedHead) else None
        self._max_rows = rows_at_a_time(model)

    def launch(
        self, hidden: Tensor, seqs: list[Sequence], tokens: list[int], pending: PendingTokens | None
    ) -> LaunchedDraws:
        """Draw for each of `seqs`, from the hidden state of its token: row tokens[i] of hidden, ascending."""
        if not seqs:
            return LaunchedDraws()
        is_plain = [self._fused is not None and seq.is_plain for seq in seqs]
        num_plain = sum(is_plain)
        if 0 < num_plain < len(seqs):
            order = sorted(range(len(seqs)), key=lambda row: not is_plain[row])
            seqs, tokens = [seqs[row] for row in order], [tokens[row] for row in order]
        if num_plain not in (0, len(seqs)) or len(tokens) < len(hidden):
            hidden = hidden[self.batch.staging.put([np.array(tokens)])[0]]
        parts = [self._greedy(hidden[:num_plain], seqs[:num_plain])] if num_plain else []
        for begin in range(num_plain, len(seqs), self._max_rows):
            end = begin + self._max_rows
            logits = self.model.logits(hidden[begin:end])
            parts.append(self.sampler(logits, seqs[begin:end], self.batch, pending))
        return LaunchedDraws(seqs, parts)

    def _greedy(self, hidden: Tensor, seqs: list[Sequence]) -> Drawn:
        """Rows whose token is the plain argmax: no logits are written."""
        assert self._fused is not None
        wants_logprobs = any(seq.params.logprobs is not None for seq in seqs)
        found = self._fused.greedy(hidden, self.sampler.num_ids, wants_logprobs=wants_logprobs)
        reports = [] if found.logprobs is None else [Report(np.arange(len(seqs)), found.logprobs, None)]
        return Drawn(found.token_ids, found.is_finite, reports)
