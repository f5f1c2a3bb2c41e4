"""How much KV a GPU can hold, with made-up memory and a real model's step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import SMALL_SPEC, random_weights

from batchinfer.attention.backend import ReferenceAttention
from batchinfer.config import EngineConfig
from batchinfer.engine.kv_memory import RESERVED_SHARE, KVMemory, prompts_step
from batchinfer.errors import InputError
from batchinfer.models.decoder import Decoder

CONFIG = EngineConfig(max_batch_tokens=40, max_num_seqs=8, block_size=16)


class Memory:
    """Runs what is measured, and says what it was told."""

    def __init__(self, total: int, free: int, peaks: list[int]) -> None:
        self.total, self.free, self.peaks = total, free, peaks
        self.num_calls = 0

    def total_bytes(self) -> int:
        return self.total

    def free_bytes(self) -> int:
        return self.free

    def peak_bytes(self, call: Callable[[], object]) -> int:
        call()
        self.num_calls += 1
        return self.peaks[(self.num_calls - 1) % len(self.peaks)]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(SMALL_SPEC, random_weights(SMALL_SPEC, torch.float32), ReferenceAttention, 64)


def test_a_pool_takes_what_steps_leave(model: Decoder) -> None:
    memory = Memory(total=100_000, free=50_000, peaks=[7_000, 9_000])
    kv = KVMemory(model, 64, memory)
    expected = 50_000 - 9_000 - int(RESERVED_SHARE * 100_000)
    assert kv.limit_bytes(CONFIG) == expected
    assert kv.limit_bytes(CONFIG, held_bytes=1_000) == expected + 1_000, "of the pool that goes"
    assert memory.num_calls == 2, "a step is measured once"
    kv.limit_bytes(replace(CONFIG, max_batch_tokens=41))
    assert memory.num_calls == 4


@pytest.mark.parametrize("free", [0, 9_000])
def test_a_step_that_does_not_fit_is_the_users_error(model: Decoder, free: int) -> None:
    kv = KVMemory(model, 64, Memory(total=100_000, free=free, peaks=[9_000]))
    with pytest.raises(InputError, match=r"a step of 40 tokens: lower --max-batch-tokens \(it needs 9,000 bytes"):
        kv.limit_bytes(CONFIG)


def test_a_step_that_runs_out_of_memory_is_the_users_error(model: Decoder) -> None:
    def out_of_memory(call: Callable[[], object]) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    memory = Memory(100, 100, [])
    memory.peak_bytes = out_of_memory  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"lower --max-batch-tokens \(CUDA out of memory\)"):
        KVMemory(model, 64, memory).limit_bytes(CONFIG)


@pytest.mark.parametrize(("num_tokens", "longest", "lens"), [(40, 64, [40]), (40, 16, [16, 16, 8]), (32, 16, [16, 16])])
def test_the_step_holds_as_many_tokens_as_it_may(num_tokens: int, longest: int, lens: list[int]) -> None:
    step = prompts_step(num_tokens, longest, 16, torch.device("cpu"))
    assert step.ragged.query_lens.tolist() == lens
    assert len(step.token_ids) == num_tokens
    assert step.outputs is None, "all may be scored"
    slots = step.slots.numpy()
    assert len(np.unique(slots)) == num_tokens
    assert slots.max() < step.ragged.block_tables.size * 16
