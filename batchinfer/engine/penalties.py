"""Repetition, frequency and presence penalties of many rows at once. See SamplingParams for what they do."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.pending import PendingTokens
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.staging import Staging


def penalise(logits: Tensor, seqs: list[Sequence], staging: Staging, pending: PendingTokens | None) -> None:
    """Penalise logits [rows, vocab] fp32 in place; row i belongs to seqs[i].

    An entry is a distinct id of a row's prompt and output, with how often it is in the output. The host counts the
    tokens that it knows. One that it has not read is counted on the device, so that nobody waits for it.
    """
    rows = [row for row, seq in enumerate(seqs) if seq.penalised() is not None]
    if not rows:
        return
    some = [seqs[row] for row in rows]
    seen = [penalties for seq in some if (penalties := seq.penalties) is not None]
    sizes = np.array([penalties.num_ids for penalties in seen])
    params = [seq.params for seq in some]
    strengths = np.array(
        [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params], dtype=np.float32
    )
    arrays = [
        np.array(rows),
        np.repeat(np.arange(len(rows)), sizes),
        np.concatenate([penalties.ids[: penalties.num_ids] for penalties in seen]),
        np.concatenate([penalties.counts[: penalties.num_ids] for penalties in seen]),
        *strengths.T,
    ]
    row_of, owner, ids, counts, repetition, frequency, presence = staging.put(arrays)
    if pending is not None:
        owner, ids, counts = _with_pending(owner, ids, counts, some, staging, pending)
    values = logits[row_of[owner], ids]
    repetition = repetition[owner]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - frequency[owner] * counts - presence[owner] * (counts > 0)
    logits[row_of[owner], ids] = values  # an id that a row has twice has one value


def _with_pending(
    owner: Tensor, ids: Tensor, counts: Tensor, seqs: list[Sequence], staging: Staging, pending: PendingTokens
) -> tuple[Tensor, Tensor, Tensor]:
    """The entries, with each row's last token counted where only the device knows it.

    Whether it is among the row's entries only the device knows too. So it gets one more, of the same count.
    """
    places = pending.places(seqs)
    has_one = np.flatnonzero(places >= 0)
    if not len(has_one):
        return owner, ids, counts
    of_row, at = staging.put([has_one, places[has_one]])
    last = pending.token_ids[at]
    last_of = torch.full((len(seqs),), -1, dtype=last.dtype, device=last.device).index_copy(0, of_row, last)
    is_last = ids == last_of[owner]
    counts = counts + is_last
    known = torch.zeros(len(seqs), dtype=counts.dtype, device=counts.device).index_add(0, owner, counts * is_last)
    of_last = known[of_row].clamp_min(1)
    return torch.cat([owner, of_row]), torch.cat([ids, last]), torch.cat([counts, of_last])
