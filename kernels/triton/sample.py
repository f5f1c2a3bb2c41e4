"""Draws tokens from logits: the steps, the random numbers and so the tokens of batchinfer/engine/sampler.py.

One program draws for one row, so a row's token depends on that row alone. Truncation is exact and sorts nothing.
The scaled logits are at most 0, so the bits of their absolute values, read as integers ("keys"), order them
from the most probable down. What top-k keeps are the ids with keys up to the least K that at least k ids do not
exceed, of those with key K itself the lowest ids; what top-p keeps is the same with probability in place of
counts. K is found a few bits at a time. Probabilities are summed as integers, so no sum depends on its order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer.engine.sampler import DrawColumns
from batchinfer.engine.staging import Staging
from batchinfer.kernels.triton.launch import Chip, chip_of, next_power_of_2, options
from batchinfer.kernels.triton.random import gumbel_of_ids
from batchinfer.kernels.triton.variants import SHAPES, Variant

#: Ids that a program looks at together.
BLOCK = 2048
#: Candidates for K that are tried in one pass over the row: 3 bits of it.
WAYS = 8
NUM_WARPS = 8
#: Exponentials of at most 1 are counted in parts of 2**-42: MAX_VOCAB of them stay below 2**63.
WEIGHT_PARTS = tl.constexpr(2.0**42)
MAX_VOCAB = 1 << 20
#: Probabilities, which sum up to about 1, in parts of 2**-60.
PARTS = tl.constexpr(2.0**60)
LAST_KEY = tl.constexpr(2**31 - 1)
NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _scaled(logits: tl.tensor, ids: tl.tensor, vocab: tl.tensor, top: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """(logits - top) / temperature of a row, -inf beyond the vocabulary."""
    x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
    return tl.div_rn(x - top, temperature)


@triton.jit
def _key(x: tl.tensor, ids: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    """int32 >= 0, the smaller the more probable; LAST_KEY beyond the vocabulary."""
    return tl.where(ids < vocab, tl.abs(x).to(tl.int32, bitcast=True), LAST_KEY)


@triton.jit
def _is_kept(key: tl.tensor, ids: tl.tensor, limit_key: tl.tensor, limit_id: tl.tensor) -> tl.tensor:
    return (key < limit_key) | ((key == limit_key) & (ids <= limit_id))


@triton.jit
def _amount(x: tl.tensor, is_kept: tl.tensor, total: tl.tensor, IS_MASS: tl.constexpr) -> tl.tensor:
    """int64: the probability exp(x) / total, rounded to fp32, in parts; or 1. 0 for what is not kept."""
    if IS_MASS:
        probability = tl.div_rn(tl.exp(x), total)
        return tl.where(is_kept & (probability <= 1.0), probability * PARTS, 0.0).to(tl.int64)
    else:
        return is_kept.to(tl.int64)


@triton.jit
def _find_key(
    logits: tl.tensor,
    vocab: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    limit_key: tl.tensor,
    limit_id: tl.tensor,
    total: tl.tensor,
    target: tl.tensor,
    IS_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
) -> tl.tensor:
    """Least int64 K such that the kept ids with keys up to K amount to at least `target`.

    Or a greater one with no more ids below it, if those amount to `target` exactly.
    """
    way = tl.arange(0, WAYS)
    low = tl.full((), 0, tl.int64)  # ids with keys below it amount to less than the target
    is_done = tl.full((), 0, tl.int32)
    for step in range(0, 11):
        if is_done == 0:
            width = tl.full((), 1, tl.int64) << tl.maximum(28 - 3 * step, 0)
            bounds = tl.minimum(low + (way + 1).to(tl.int64) * width - 1, LAST_KEY)
            narrow = bounds.to(tl.int32)
            sums = tl.zeros((BLOCK, WAYS), tl.int64)
            for begin in range(0, vocab, BLOCK):
                ids = begin + tl.arange(0, BLOCK)
                x = _scaled(logits, ids, vocab, top, temperature)
                key = _key(x, ids, vocab)
                amount = _amount(x, _is_kept(key, ids, limit_key, limit_id), total, IS_MASS)
                sums += tl.where(key[:, None] <= narrow[None, :], amount[:, None], 0)
            reached_by = tl.sum(sums, axis=0)
            is_below = reached_by < target
            chosen = tl.minimum(tl.sum(is_below.to(tl.int32), axis=0), WAYS - 1)
            reached = tl.sum(tl.where(way == chosen, reached_by, 0), axis=0)
            bound = tl.sum(tl.where(way == chosen, bounds, 0), axis=0)
            is_done = (reached == target).to(tl.int32)
            low = tl.where(reached == target, bound, low + chosen.to(tl.int64) * width)
    return low


@triton.jit
def _find_last(
    logits: tl.tensor,
    vocab: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    limit_key: tl.tensor,
    limit_id: tl.tensor,
    total: tl.tensor,
    target: tl.tensor,
    key_found: tl.tensor,
    IS_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The last id with the key found that is needed to reach the target, int32; NO_ID if all are."""
    below = tl.zeros((BLOCK,), tl.int64)
    ties = tl.zeros((BLOCK,), tl.int32)
    each = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, vocab, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = _scaled(logits, ids, vocab, top, temperature)
        key = _key(x, ids, vocab)
        is_kept = _is_kept(key, ids, limit_key, limit_id)
        amount = _amount(x, is_kept, total, IS_MASS)
        is_tie = is_kept & (key == key_found)
        below += tl.where(key < key_found, amount, 0)
        ties += is_tie.to(tl.int32)
        each = tl.maximum(each, tl.where(is_tie, amount, 0))
    one = tl.maximum(tl.max(each, axis=0), 1)
    needed = (target - tl.sum(below, axis=0) + one - 1) // one
    last = tl.full((), NO_ID, tl.int32)
    if tl.sum(ties, axis=0).to(tl.int64) > needed:
        for begin in range(0, vocab, BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            key = _key(_scaled(logits, ids, vocab, top, temperature), ids, vocab)
            is_tie = (_is_kept(key, ids, limit_key, limit_id) & (key == key_found)).to(tl.int32)
            rank = tl.cumsum(is_tie, axis=0)
            last = tl.minimum(last, tl.min(tl.where((is_tie > 0) & (rank == needed), ids, NO_ID), axis=0))
            needed -= tl.sum(is_tie, axis=0)
    return last


@triton.jit
def _total(
    logits: tl.tensor,
    vocab: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    limit_key: tl.tensor,
    limit_id: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Sum of exp(x) of all kept ids, fp32."""
    sums = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, vocab, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = _scaled(logits, ids, vocab, top, temperature)
        weight = tl.exp(x)
        is_kept = _is_kept(_key(x, ids, vocab), ids, limit_key, limit_id) & (weight <= 1.0)
        sums += tl.where(is_kept, weight * WEIGHT_PARTS, 0.0).to(tl.int64)
    return tl.sum(sums, axis=0).to(tl.float32) / WEIGHT_PARTS


@triton.jit
def sample_kernel(
    logits_ptr: tl.tensor,  # fp32 [rows, vocab]
    temperature_ptr: tl.tensor,  # fp32 [rows]
    top_k_ptr: tl.tensor,  # int64 [rows]
    top_p_ptr: tl.tensor,  # fp64 [rows]
    min_p_ptr: tl.tensor,  # fp32 [rows]
    keys_ptr: tl.tensor,  # int64 [rows]
    positions_ptr: tl.tensor,  # int64 [rows]
    ids_ptr: tl.tensor,  # int64 [rows]
    vocab: tl.tensor,
    row_stride: tl.tensor,
    WRITES: tl.constexpr,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * row_stride
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row).to(tl.int64)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    stream, position = tl.load(keys_ptr + row), tl.load(positions_ptr + row)

    tops = tl.full((BLOCK,), float("-inf"), tl.float32)
    for begin in range(0, vocab, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        tops = tl.maximum(tops, tl.load(logits + ids, mask=ids < vocab, other=float("-inf")))
    top = tl.max(tops, axis=0)

    # Kept are ids with keys below limit_key, and with limit_key itself up to limit_id.
    limit_key = tl.full((), LAST_KEY, tl.int64)
    limit_id = tl.full((), NO_ID, tl.int32)
    if (top_k > 0) & (top_k < vocab):
        one = tl.full((), 1.0, tl.float32)
        key = _find_key(logits, vocab, top, temperature, limit_key, limit_id, one, top_k, False, BLOCK, WAYS)
        limit_id = _find_last(logits, vocab, top, temperature, limit_key, limit_id, one, top_k, key, False, BLOCK)
        limit_key = key
    if top_p < 1.0:
        total = _total(logits, vocab, top, temperature, limit_key, limit_id, BLOCK)
        wanted = top_p * PARTS
        whole = wanted.to(tl.int64)
        target = tl.maximum(whole + (whole.to(tl.float64) < wanted).to(tl.int64), 1)
        key = _find_key(logits, vocab, top, temperature, limit_key, limit_id, total, target, True, BLOCK, WAYS)
        last = _find_last(logits, vocab, top, temperature, limit_key, limit_id, total, target, key, True, BLOCK)
        limit_id = tl.where(key == limit_key, tl.minimum(last, limit_id), last)
        limit_key = key

    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id = tl.full((BLOCK,), NO_ID, tl.int32)
    for begin in range(0, vocab, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = _scaled(logits, ids, vocab, top, temperature)
        is_kept = _is_kept(_key(x, ids, vocab), ids, limit_key, limit_id) & (tl.exp(x) >= min_p)
        x = tl.where(is_kept, x, float("-inf"))
        score = x + gumbel_of_ids(begin, position, stream, BLOCK)
        is_better = score > best
        best = tl.where(is_better, score, best)
        best_id = tl.where(is_better, ids, best_id)
        if WRITES:
            tl.store(logits + ids, x, mask=ids < vocab)
    lowest = tl.min(tl.where(best == tl.max(best, axis=0), best_id, NO_ID), axis=0)
    # NaN leaves no candidate; the row is known to be broken.
    tl.store(ids_ptr + row, tl.where(lowest == NO_ID, 0, lowest).to(tl.int64))


def _launch(chip: Chip, vocab: int) -> dict[str, Any]:
    block = min(BLOCK, max(64, next_power_of_2(vocab)))
    return {"BLOCK": block, "WAYS": WAYS, **options(chip, max(1, NUM_WARPS * block // BLOCK))}


def draw(logits: Tensor, columns: DrawColumns, *, writes: bool, staging: Staging | None = None) -> Tensor:
    """Ids [rows] int64 drawn from logits [rows, vocab] fp32; see engine.sampler.FusedDraw and `draw` there.

    Args:
        logits: contiguous rows; with `writes` they become the scaled and truncated ones.
        staging: brings the columns to the device; without it a new one is used.

    Raises ValueError for a vocabulary above MAX_VOCAB.
    """
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    if vocab > MAX_VOCAB:
        raise ValueError(f"a vocabulary of {vocab} ids is above {MAX_VOCAB}: its probabilities may not fit 63 bits")
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return ids
    arrays = (columns.temperature, columns.top_k, columns.top_p, columns.min_p, columns.keys, columns.positions)
    put = (staging or Staging(logits.device)).put(arrays)
    sample_kernel[(num_rows,)](
        logits, *put, ids, vocab, logits.stride(0), WRITES=writes, **_launch(chip_of(logits.device), vocab)
    )
    return ids


def aot_variants(chip: Chip) -> list[Variant]:
    signature = {"logits_ptr": "*fp32", "temperature_ptr": "*fp32", "top_k_ptr": "*i64", "top_p_ptr": "*fp64"}
    signature |= {"min_p_ptr": "*fp32", "keys_ptr": "*i64", "positions_ptr": "*i64", "ids_ptr": "*i64"}
    signature |= {"vocab": "i32:16", "row_stride": "i32:16"}
    launch = options(chip, NUM_WARPS)
    return [
        Variant(
            f"{shape.name}{', written' if writes else ''}",
            sample_kernel,
            signature,
            {"WRITES": writes, "BLOCK": BLOCK, "WAYS": WAYS},
            launch,
        )
        for shape in SHAPES[:1]
        for writes in (False, True)
    ]
