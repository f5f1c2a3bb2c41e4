"""Steps made by hand: what a decoder is given by the engine, without the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_setup import Check

if TYPE_CHECKING:
    from torch import Tensor

    from batchinfer.kernels.triton.floors import Chip
    from batchinfer.models.decoder import StepInputs

BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class Step:
    """A step and the pool that it needs."""

    inputs: StepInputs
    num_blocks: int


def decode_step(
    check: Check, rows: int, own: int, *, prefixes: int = 0, prefix_tokens: int = 0, shared: bool = True
) -> Step:
    """One token of each row, at the end of `own` tokens behind one of the prefixes; a prefix is whole blocks.

    Args:
        shared: False: every row has a copy of its prefix.
    """
    import numpy as np

    own_blocks, prefix_blocks = -(-own // BLOCK_SIZE), prefix_tokens // BLOCK_SIZE
    assert prefix_tokens % BLOCK_SIZE == 0
    owners = (np.arange(rows) * max(prefixes, 1)) // rows if shared else np.arange(rows)
    num_prefixes = (prefixes if shared else rows) if prefixes else 0
    heads = owners[:, None] * prefix_blocks + np.arange(prefix_blocks)
    own_first = num_prefixes * prefix_blocks + np.arange(rows) * own_blocks
    tables = np.concatenate([heads, own_first[:, None] + np.arange(own_blocks)], axis=1)
    length = prefix_tokens + own
    starts = np.full(rows, length - 1, dtype=np.int32)
    return _step(check, tables, starts, np.ones(rows, dtype=np.int32), None)


def prefill_step(check: Check, tokens: int) -> Step:
    """A whole prompt, whose last token is sampled from."""
    import numpy as np

    tables = np.arange(-(-tokens // BLOCK_SIZE))[None]
    starts, lens = np.zeros(1, dtype=np.int32), np.full(1, tokens, dtype=np.int32)
    return _step(check, tables, starts, lens, [tokens - 1])


def _step(check: Check, tables: Any, starts: Any, lens: Any, outputs: list[int] | None) -> Step:
    import numpy as np
    import torch

    from batchinfer.attention.tree import RaggedBatch
    from batchinfer.models.decoder import StepInputs

    of_seq = np.repeat(np.arange(len(lens)), lens)
    positions = np.arange(len(of_seq)) - np.repeat(np.cumsum(lens) - lens, lens) + starts[of_seq]
    slots = tables[of_seq, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    ids = np.random.default_rng().integers(0, check.spec.vocab_size, len(of_seq))

    def put(values: Any) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(check.device)

    ragged = RaggedBatch(tables.astype(np.int32), starts, lens, BLOCK_SIZE)
    inputs = StepInputs(put(ids), put(positions), put(slots), ragged, None if outputs is None else put(outputs))
    return Step(inputs, int(tables.max()) + 1)


def random_kv(model: Any, num_blocks: int) -> Any:
    """A pool full of numbers, as after a prefill."""
    from batchinfer.kernels.fp8_kv import as_bytes

    kv = model.make_kv(num_blocks, BLOCK_SIZE)
    for cache in (kv.k, kv.v):
        for layer in cache:
            if kv.all_scales is None:
                layer.normal_()
            else:  # up to 224; of the codes one in 128 would be NaN
                as_bytes(layer).random_(0, 120)
    for scales in kv.all_scales or ():
        scales.uniform_(0.001, 0.01)
    return kv


def greedy_step(model: Any, step: Step, kv: Any) -> Callable[[], object]:
    """The step as the engine runs it for greedy rows, up to the tokens."""

    def run() -> object:
        hidden = model.forward(step.inputs, kv)
        hidden = hidden if step.inputs.outputs is None else hidden[step.inputs.outputs]
        return model.greedy(hidden, model.spec.vocab_size, wants_logprobs=False).token_ids

    return run


def measured_chip(rates: dict[str, float]) -> Chip:
    """Ceilings as measured here, for the floors."""
    from batchinfer.kernels.triton.floors import Chip

    return Chip("measured", rates["copy_bytes_per_s"], rates["product_flops_per_s"])
