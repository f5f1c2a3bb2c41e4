"""The kernels of attention over the prefix tree; attention.py launches them.

A program takes one item of the plan (see plan.py) for one KV head: query lanes, which are tokens x the query
heads of the KV head, over a stretch of KV tiles. Each tile is met by itself (its maximum, sum and accumulator) and
then merged into the running result, in order of position: `merged = running * 2^(m - M) + tile * 2^(m_tile - M)`
(Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023, section 3.1). A second small launch merges, by the same
arithmetic, the partial results of tokens whose tiles were met by several programs, since programs of one launch
cannot wait for each other safely.

So under an invariant plan the bits of a token's result depend on its query and its KV alone, given that `tl.dot` and
`tl.sum` treat a row the same whatever its place among the lanes and whatever the other lanes hold.
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchinfer.kernels.triton import plan as host
from batchinfer.kernels.triton.fp8 import AS_THEY_ARE, FP8_UNIT, widened

_FIELDS = tl.constexpr(len(host.ITEM_FIELDS))
_IS_DIRECT = tl.constexpr(host.IS_DIRECT)
_IS_WIDE = tl.constexpr(host.IS_WIDE)
#: Start value of maxima: finite, so that a result of nothing merges with factor 0 and gives no NaN.
_LOWEST = tl.constexpr(-1e30)
_AS_THEY_ARE = tl.constexpr(AS_THEY_ARE)


@triton.jit
def _merge(
    top: tl.tensor, total: tl.tensor, acc: tl.tensor, new_top: tl.tensor, new_total: tl.tensor, new_acc: tl.tensor
) -> tl.tensor:
    """The running result and that of the next tiles. The order of operations is the contract: see the module."""
    both = tl.maximum(top, new_top)
    old = tl.exp2(top - both)
    new = tl.exp2(new_top - both)
    return both, tl.fma(total, old, new_total * new), tl.fma(acc, old[:, None], new_acc * new[:, None])


@triton.jit
def _walk(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    out: tl.tensor,
    partial_acc: tl.tensor,
    partial_sums: tl.tensor,
    item: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    head: tl.tensor,
    multiplier: tl.tensor,
    cap_factor: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    window: tl.tensor,
    Q_STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    FORMAT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One item's lanes over its tiles."""
    lane = tl.load(item + 1) + tl.arange(0, LANES)
    is_lane = lane < tl.load(item + 2)
    table = tables + tl.load(item + 3).to(tl.int64) * table_stride
    first_tile = tl.load(item + 4)
    last_tile = first_tile + tl.load(item + 5) - 1
    min_position = tl.load(item + 7)
    max_position = tl.load(item + 8)

    row = tl.load(rows + tl.load(item) + lane // PER_GROUP, mask=is_lane, other=0)
    position = tl.load(positions + row, mask=is_lane, other=max_position)
    q_head = head * PER_GROUP + lane % PER_GROUP
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < DIM
    q_at = row.to(tl.int64) * Q_STRIDE + q_head * DIM
    query = tl.load(q + q_at[:, None] + dims[None, :], mask=is_lane[:, None] & is_dim[None, :], other=0.0)
    num_heads: tl.constexpr = NUM_KV_HEADS * PER_GROUP

    top = tl.full([LANES], _LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    acc = tl.zeros([LANES, BLOCK_D], tl.float32)
    keys = tl.arange(0, TILE)
    for tile in tl.range(first_tile, last_tile + 1, num_stages=NUM_STAGES):
        key = tile * TILE + keys
        is_key = key <= max_position
        kv_mask = is_key[:, None] & is_dim[None, :]
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(table + tile * TILE // BLOCK_SIZE).to(tl.int64)
            kv_base = (block * BLOCK_SIZE + tile * TILE % BLOCK_SIZE) * (NUM_KV_HEADS * DIM) + head * DIM
            kv_at = keys * (NUM_KV_HEADS * DIM)
            scale_at = (block * NUM_KV_HEADS + head) * BLOCK_SIZE + tile * TILE % BLOCK_SIZE + keys
        else:
            block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
            kv_base = head * DIM
            kv_at = (block * BLOCK_SIZE + key % BLOCK_SIZE) * (NUM_KV_HEADS * DIM)
            scale_at = (block * NUM_KV_HEADS + head) * BLOCK_SIZE + key % BLOCK_SIZE
        k = tl.load(k_cache + kv_base + (kv_at[:, None] + dims[None, :]), mask=kv_mask, other=0)
        k = widened(k, query.dtype, FORMAT)
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION)
        if FORMAT != _AS_THEY_ARE:
            scores = scores * (tl.load(k_scales + scale_at, mask=is_key, other=0.0) * FP8_UNIT)[None, :]
        if HAS_CAP:  # tanh, the multiplier holds the cap
            scores = 1 - 2 / (tl.exp2(scores * cap_factor) + 1)
        is_cut = (tile + 1) * TILE - 1 > min_position
        if HAS_WINDOW:
            is_cut = is_cut | (tile * TILE <= max_position - window)
        if is_cut:
            sees = key[None, :] <= position[:, None]
            if HAS_WINDOW:
                sees = sees & (key[None, :] > position[:, None] - window)
            scores = tl.where(sees, scores, float("-inf"))
        tile_top = tl.maximum(tl.max(scores, 1) * multiplier, _LOWEST)
        weights = tl.exp2(tl.fma(scores, multiplier, -tile_top[:, None]))
        v = tl.load(v_cache + kv_base + (kv_at[:, None] + dims[None, :]), mask=kv_mask, other=0)
        v = widened(v, query.dtype, FORMAT)
        sums = tl.sum(weights, 1)
        if FORMAT != _AS_THEY_ARE:
            weights = weights * (tl.load(v_scales + scale_at, mask=is_key, other=0.0) * FP8_UNIT)[None, :]
        mixed = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top, total, acc = _merge(top, total, acc, tile_top, sums, mixed)
    # Read again, not kept over the loop: registers are short there.
    lane = tl.load(item + 1, volatile=True) + tl.arange(0, LANES)
    is_lane = lane < tl.load(item + 2)
    row = tl.load(rows + tl.load(item) + lane // PER_GROUP, mask=is_lane, other=0)
    q_head = head * PER_GROUP + lane % PER_GROUP
    mask = is_lane[:, None] & is_dim[None, :]
    if (tl.load(item + 6) & _IS_DIRECT) != 0:
        out_at = row.to(tl.int64) * (num_heads * DIM) + q_head * DIM
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_at[:, None] + dims[None, :], result, mask=mask)
    else:
        slot = tl.load(slots + row, mask=is_lane, other=0) + tl.load(item + 9)
        at = slot.to(tl.int64) * num_heads + q_head
        tl.store(partial_sums + 2 * at, top, mask=is_lane)
        tl.store(partial_sums + 2 * at + 1, total, mask=is_lane)
        tl.store(partial_acc + at[:, None] * DIM + dims[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["table_stride", "window"])
def attend_items(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    out: tl.tensor,
    partial_acc: tl.tensor,
    partial_sums: tl.tensor,
    items: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    multiplier: tl.tensor,
    cap_factor: tl.tensor,
    window: tl.tensor,
    Q_STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW_STAGES: tl.constexpr,
    WIDE_STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    FORMAT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Program (item, KV head). multiplier: of scores, for exponents of 2. cap_factor: of scores within the cap."""
    head = tl.program_id(0) % NUM_KV_HEADS
    item = items + tl.program_id(0) // NUM_KV_HEADS * _FIELDS
    if tl.load(item + 5) > 0:
        if (tl.load(item + 6) & _IS_WIDE) != 0:
            _walk(
                q, k_cache, v_cache, out, partial_acc, partial_sums, item, rows, positions, slots, tables,
                table_stride, head, multiplier, cap_factor, k_scales, v_scales, window,
                Q_STRIDE, NUM_KV_HEADS, PER_GROUP, DIM, BLOCK_D, BLOCK_SIZE, TILE, WIDE, WIDE_STAGES,
                HAS_WINDOW, HAS_CAP, FORMAT, PRECISION,
            )  # fmt: skip
        else:
            _walk(
                q, k_cache, v_cache, out, partial_acc, partial_sums, item, rows, positions, slots, tables,
                table_stride, head, multiplier, cap_factor, k_scales, v_scales, window,
                Q_STRIDE, NUM_KV_HEADS, PER_GROUP, DIM, BLOCK_D, BLOCK_SIZE, TILE, NARROW, NARROW_STAGES,
                HAS_WINDOW, HAS_CAP, FORMAT, PRECISION,
            )  # fmt: skip


@triton.jit
def merge_partials(
    out: tl.tensor,
    partial_acc: tl.tensor,
    partial_sums: tl.tensor,
    merges: tl.tensor,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """Program (query token, BLOCK_H heads). Loads of UNROLL partial results are under way at a time."""
    num_blocks: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    merge = merges + tl.program_id(0) // num_blocks * 3
    head = tl.program_id(0) % num_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    row = tl.load(merge)
    count = tl.load(merge + 2)
    dims = tl.arange(0, BLOCK_D)
    is_head = head < NUM_HEADS
    mask = is_head[:, None] & (dims < DIM)[None, :]
    if count > 0:
        at = tl.load(merge + 1).to(tl.int64) * NUM_HEADS + head
        top = tl.load(partial_sums + 2 * at, mask=is_head, other=0.0)
        total = tl.load(partial_sums + 2 * at + 1, mask=is_head, other=1.0)
        acc = tl.load(partial_acc + at[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
        counts = tl.where(is_head, count, 0)
        for begin in range(1, count, UNROLL):
            for i in tl.static_range(UNROLL):
                is_there = begin + i < counts
                here = at + (begin + i) * NUM_HEADS
                new_top = tl.load(partial_sums + 2 * here, mask=is_there, other=0.0)
                new_total = tl.load(partial_sums + 2 * here + 1, mask=is_there, other=0.0)
                acc_mask = is_there[:, None] & (dims < DIM)[None, :]
                new_acc = tl.load(partial_acc + here[:, None] * DIM + dims[None, :], mask=acc_mask, other=0.0)
                both, sums, accs = _merge(top, total, acc, new_top, new_total, new_acc)
                top = tl.where(is_there, both, top)
                total = tl.where(is_there, sums, total)
                acc = tl.where(is_there[:, None], accs, acc)
        result = acc / total[:, None]
        out_at = row.to(tl.int64) * (NUM_HEADS * DIM) + head * DIM
        tl.store(out + out_at[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=mask)
