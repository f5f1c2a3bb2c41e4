"""The persistent batch: one row of host arrays per running sequence, changed only where a step differs."""

from __future__ import annotations

import numpy as np
import torch

from batchinfer.attention.tree import RaggedBatch
from batchinfer.engine.pending import PendingTokens
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.staging import Staging
from batchinfer.models.decoder import StepInputs


class PersistentBatch:
    """Arrays allocated once. A sequence keeps its row (`seq.slot`) from admission to its end or preemption."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.staging = Staging(device)
        self.block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int32)
        # What the sampler needs of each row, as columns.
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float64)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.stream_key = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)  # -1: none
        self.is_processed = np.zeros(max_num_seqs, dtype=bool)  # logprobs_mode "processed"
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def add(self, seq: Sequence) -> None:
        """Give an admitted sequence a row; every column of it is written."""
        assert seq.slot < 0
        slot = seq.slot = self._free.pop()
        params = seq.params
        self.num_blocks[slot] = 0
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.stream_key[slot] = seq.stream_key - (1 << 64) if seq.stream_key >> 63 else seq.stream_key
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.is_processed[slot] = params.logprobs_mode == "processed"

    def remove(self, seq: Sequence) -> None:
        """The sequence ended or was preempted."""
        if seq.slot >= 0:
            self._free.append(seq.slot)
            seq.slot = -1

    def inputs(
        self,
        scheduled: list[tuple[Sequence, int]],
        outputs: list[int] | None = None,
        pending: PendingTokens | None = None,
    ) -> StepInputs:
        """The flat tensors of a step, sequences in the given order; `outputs` as in StepInputs.

        Args:
            pending: tokens that only the device knows. They go from there into the step.
        """
        for seq, _ in scheduled:
            known, now = self.num_blocks[seq.slot], len(seq.blocks)
            if now > known:
                self.block_tables[seq.slot, known:now] = seq.blocks[known:]
                self.num_blocks[seq.slot] = now
        slots = np.fromiter((seq.slot for seq, _ in scheduled), np.int64, len(scheduled))
        starts = np.fromiter((seq.num_computed for seq, _ in scheduled), np.int32, len(scheduled))
        lens = np.fromiter((num_tokens for _, num_tokens in scheduled), np.int32, len(scheduled))
        token_ids = np.concatenate([seq.tokens[seq.num_computed : seq.num_computed + n] for seq, n in scheduled])
        firsts = np.cumsum(lens) - lens
        of_seq = np.repeat(np.arange(len(scheduled)), lens)
        positions = np.arange(len(of_seq)) - np.repeat(firsts, lens) + starts[of_seq]
        blocks = self.block_tables[slots[of_seq], positions // self.block_size].astype(np.int64)
        kv_slots = blocks * self.block_size + positions % self.block_size
        arrays = [token_ids.astype(np.int64), positions, kv_slots]
        if outputs is not None:
            arrays.append(np.array(outputs, dtype=np.int64))
        if pending is not None:
            places = pending.places(seq for seq, _ in scheduled)
            is_pending = places >= 0
            arrays += [
                firsts[is_pending].astype(np.int64),
                places[is_pending],
            ]  # a pending token is the sequence's only one
        put = self.staging.put(arrays)
        ids = put[0] if pending is None else put[0].index_copy(0, put[-2], pending.token_ids[put[-1]])
        return StepInputs(
            token_ids=ids,
            positions=put[1],
            slots=put[2],
            ragged=RaggedBatch(
                self.block_tables[slots, : int(self.num_blocks[slots].max())], starts, lens, self.block_size
            ),
            outputs=None if outputs is None else put[3],
        )
