"""How much KV a GPU can hold: what is free there, less what a step needs beside it. Found by running one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from batchinfer.attention.tree import RaggedBatch
from batchinfer.config import EngineConfig
from batchinfer.engine.draws import rows_at_a_time
from batchinfer.errors import InputError
from batchinfer.models.decoder import LanguageModel, StepInputs

#: Part of the device's memory that is left alone: recorded steps, workspaces of libraries, gaps between tensors.
RESERVED_SHARE = 0.03
#: Tensors as large as the logits that the sampler makes of them.
LOGITS_COPIES = 4


class DeviceMemory(Protocol):
    """Of one device."""

    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int:
        """That can be had, what torch keeps for later included."""

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """The most that the call holds at a time beyond what was held before."""


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1]

    def free_bytes(self) -> int:
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + kept

    def peak_bytes(self, call: Callable[[], object]) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before


class KVMemory:
    """Limits of the KV pool of one model."""

    def __init__(self, model: LanguageModel, max_model_len: int, memory: DeviceMemory) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self._memory = memory
        self._step_bytes: dict[tuple[int, int], int] = {}

    def limit_bytes(self, config: EngineConfig, held_bytes: int = 0) -> int:
        """The largest pool that leaves room for every step.

        Args:
            held_bytes: of a pool that will be given up for it.

        Raises:
            InputError: a step does not fit, whatever the pool.
        """
        key = (config.max_batch_tokens, config.max_num_seqs)
        if key not in self._step_bytes:
            self._step_bytes[key] = self._measure(config)
        reserved = int(RESERVED_SHARE * self._memory.total_bytes())
        limit = self._memory.free_bytes() + held_bytes - self._step_bytes[key] - reserved
        if limit <= 0:
            raise _too_large(config, f"it needs {self._step_bytes[key]:,} bytes beside the weights")
        return limit

    def _measure(self, config: EngineConfig) -> int:
        try:
            return max(
                self._memory.peak_bytes(lambda: self._forward(config)),
                self._memory.peak_bytes(lambda: self._sample(config)),
            )
        except torch.OutOfMemoryError as error:
            raise _too_large(config, str(error)) from error

    def _forward(self, config: EngineConfig) -> None:
        """As many prompt tokens as a step takes, all scored. Its KV counts too, which leaves a little more room."""
        model = self._model
        inputs = prompts_step(config.max_batch_tokens, self._max_model_len, config.block_size, model.device)
        kv = model.make_kv(inputs.ragged.block_tables.size, config.block_size)
        hidden = model.forward(inputs, kv)
        model.target_logprobs(hidden, torch.zeros_like(inputs.token_ids))

    def _sample(self, config: EngineConfig) -> None:
        """As many rows as the sampler takes at a time."""
        model = self._model
        rows = min(config.max_num_seqs, rows_at_a_time(model))
        logits = model.logits(torch.zeros((rows, model.spec.hidden_size), dtype=model.dtype, device=model.device))
        _ = [torch.empty_like(logits) for _ in range(LOGITS_COPIES)]


def prompts_step(num_tokens: int, max_model_len: int, block_size: int, device: torch.device) -> StepInputs:
    """A step that begins prompts, as long as they can be, with this many tokens of id 0."""
    length = min(num_tokens, max_model_len)
    num_seqs, last = -(-num_tokens // length), num_tokens % length or length
    lens = np.full(num_seqs, length, dtype=np.int32)
    lens[-1] = last
    per_seq = -(-length // block_size)
    tables = np.arange(num_seqs * per_seq, dtype=np.int32).reshape(num_seqs, per_seq)
    positions = np.concatenate([np.arange(n) for n in lens])
    of_seq = np.repeat(np.arange(num_seqs), lens)
    slots = tables[of_seq, positions // block_size].astype(np.int64) * block_size + positions % block_size

    def put(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device)

    ragged = RaggedBatch(tables, np.zeros(num_seqs, dtype=np.int32), lens, block_size)
    return StepInputs(put(np.zeros(num_tokens)), put(positions), put(slots), ragged)


def _too_large(config: EngineConfig, why: str) -> InputError:
    return InputError(
        f"no memory on the device for a step of {config.max_batch_tokens} tokens: lower --max-batch-tokens ({why})"
    )
