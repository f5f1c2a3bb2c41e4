"""Rotary position embedding of q and k, fused with writing k and v into the cache."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer.kernels.fp8_kv import KVScales, as_bytes
from batchinfer.kernels.triton.fp8 import largest_bits, scales_for, to_e4m3
from batchinfer.kernels.triton.launch import Chip, chip_of, next_power_of_2, options
from batchinfer.kernels.triton.variants import DTYPES, SHAPES, Variant

NUM_WARPS = 4


@triton.jit
def _rotate(
    source: tl.tensor,  # the token's first head
    target: tl.tensor,
    source_stride: tl.tensor,  # from head to head; in the target heads are dense
    cos: tl.tensor,  # [BLOCK_HALF]
    sin: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """Heads as in reference.rope, rounded to what the target holds."""
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (head < NUM_HEADS) & (column < HALF)
    read, write = source + head * source_stride + column, target + head * HEAD_DIM + column
    first = tl.load(read, mask=mask, other=0.0)
    second = tl.load(read + HALF, mask=mask, other=0.0).to(tl.float32)
    kind = first.dtype
    first = first.to(tl.float32)
    rotated = first * cos[None, :] - second * sin[None, :]
    tl.store(write, rotated.to(kind), mask=mask)
    rotated = second * cos[None, :] + first * sin[None, :]
    tl.store(write + HALF, rotated.to(kind), mask=mask)
    if 2 * HALF < HEAD_DIM:
        _copy(source, target, source_stride, NUM_HEADS, HEAD_DIM, 2 * HALF, BLOCK_HEADS, BLOCK_REST)


@triton.jit
def _copy(
    source: tl.tensor,
    target: tl.tensor,
    source_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BEGIN: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Channels BEGIN .. HEAD_DIM of each head."""
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    column = BEGIN + tl.arange(0, BLOCK)[None, :]
    mask = (head < NUM_HEADS) & (column < HEAD_DIM)
    values = tl.load(source + head * source_stride + column, mask=mask, other=0.0)
    tl.store(target + head * HEAD_DIM + column, values, mask=mask)


@triton.jit
def _rotate_to_fp8(
    source: tl.tensor,
    target: tl.tensor,
    scales: tl.tensor,  # of the token's first head
    source_stride: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """As `_rotate`, rounded to the source's type and then to fp8."""
    heads = tl.arange(0, BLOCK_HEADS)
    head = heads[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (head < NUM_HEADS) & (column < HALF)
    read = source + head * source_stride
    first = tl.load(read + column, mask=mask, other=0.0)
    second = tl.load(read + column + HALF, mask=mask, other=0.0).to(tl.float32)
    kind = first.dtype
    first = first.to(tl.float32)
    left = (first * cos[None, :] - second * sin[None, :]).to(kind).to(tl.float32)
    right = (second * cos[None, :] + first * sin[None, :]).to(kind).to(tl.float32)
    largest = tl.maximum(largest_bits(left), largest_bits(right))
    rest_column = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    rest_mask = (head < NUM_HEADS) & (rest_column < HEAD_DIM)
    rest = tl.zeros([BLOCK_HEADS, BLOCK_REST], tl.float32)
    if 2 * HALF < HEAD_DIM:
        rest = tl.load(read + rest_column, mask=rest_mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, largest_bits(rest))
    found = scales_for(largest)
    write = target + head * HEAD_DIM
    tl.store(write + column, to_e4m3(left, found), mask=mask)
    tl.store(write + column + HALF, to_e4m3(right, found), mask=mask)
    if 2 * HALF < HEAD_DIM:
        tl.store(write + rest_column, to_e4m3(rest, found), mask=rest_mask)
    tl.store(scales + heads * BLOCK_SIZE, found, mask=heads < NUM_HEADS)


@triton.jit
def _copy_to_fp8(
    source: tl.tensor,
    target: tl.tensor,
    scales: tl.tensor,
    source_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    heads = tl.arange(0, BLOCK_HEADS)
    head = heads[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (head < NUM_HEADS) & (column < HEAD_DIM)
    values = tl.load(source + head * source_stride + column, mask=mask, other=0.0).to(tl.float32)
    found = scales_for(largest_bits(values))
    tl.store(target + head * HEAD_DIM + column, to_e4m3(values, found), mask=mask)
    tl.store(scales + heads * BLOCK_SIZE, found, mask=heads < NUM_HEADS)


@triton.jit
def rope_and_store_kv_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    k_scales_ptr: tl.tensor,  # of fp8; without, not written
    v_scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    q_stride: tl.tensor,  # from token to token
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # tokens; 0 without fp8
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cos_ptr + token * HALF + column, mask=column < HALF, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + column, mask=column < HALF, other=0.0)
    out = out_ptr + token * (NUM_HEADS * HEAD_DIM)
    q = q_ptr + token * q_stride
    _rotate(q, out, q_head_stride, cos, sin, NUM_HEADS, HEAD_DIM, HALF, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        place = slot * (NUM_KV_HEADS * HEAD_DIM)
        k, v = k_ptr + token * k_stride, v_ptr + token * v_stride
        k_out, v_out = k_cache_ptr + place, v_cache_ptr + place
        if BLOCK_SIZE > 0:
            scale_at = slot // BLOCK_SIZE * (NUM_KV_HEADS * BLOCK_SIZE) + slot % BLOCK_SIZE
            _rotate_to_fp8(
                k, k_out, k_scales_ptr + scale_at, k_head_stride, cos, sin,
                NUM_KV_HEADS, HEAD_DIM, HALF, BLOCK_SIZE, BLOCK_KV_HEADS, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
            _copy_to_fp8(
                v, v_out, v_scales_ptr + scale_at, v_head_stride,
                NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_KV_HEADS, BLOCK_DIM,
            )  # fmt: skip
        else:
            _rotate(
                k, k_out, k_head_stride, cos, sin,
                NUM_KV_HEADS, HEAD_DIM, HALF, BLOCK_KV_HEADS, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
            _copy(v, v_out, v_head_stride, NUM_KV_HEADS, HEAD_DIM, 0, BLOCK_KV_HEADS, BLOCK_DIM)


def _constants(num_heads: int, num_kv_heads: int, head_dim: int, half: int, block_size: int) -> dict[str, Any]:
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": half,
        "BLOCK_SIZE": block_size,
        "BLOCK_HEADS": next_power_of_2(num_heads),
        "BLOCK_KV_HEADS": next_power_of_2(num_kv_heads),
        "BLOCK_DIM": next_power_of_2(head_dim),
        "BLOCK_HALF": next_power_of_2(half),
        "BLOCK_REST": next_power_of_2(max(1, head_dim - 2 * half)),
    }


def rope_and_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: KVScales | None = None,
) -> Tensor:
    """See reference.rope_and_store_kv. A token with a negative slot stores nothing.

    q, k and v may be parts of a fused projection (their last dimension contiguous); cos, sin and the caches
    are contiguous; slots are of any integer type.
    """
    num_tokens, num_heads, head_dim = q.shape
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_scales, v_scales = scales if scales is not None else (cos, cos)
    assert k_scales.is_contiguous()
    assert v_scales.is_contiguous()
    if num_tokens:
        rope_and_store_kv_kernel[(num_tokens,)](
            q,
            k,
            v,
            cos,
            sin,
            slots,
            as_bytes(k_cache),
            as_bytes(v_cache),
            k_scales,
            v_scales,
            out,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            q.stride(1),
            k.stride(1),
            v.stride(1),
            **_constants(num_heads, k.shape[1], head_dim, cos.shape[1], 0 if scales is None else scales.k.shape[2]),
            **options(chip_of(q.device), NUM_WARPS),
        )
    return out


def aot_variants(chip: Chip) -> list[Variant]:
    found = []
    strides = ("q_stride", "k_stride", "v_stride", "q_head_stride", "k_head_stride", "v_head_stride")
    for dtype in DTYPES:
        signature = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}") | dict.fromkeys(
            strides, "i32:16"
        )
        signature |= dict.fromkeys(("cos_ptr", "sin_ptr", "k_scales_ptr", "v_scales_ptr"), "*fp32")
        signature |= {"slots_ptr": "*i64"}
        for shape, kv in product(SHAPES, ("", ", fp8 KV")):
            caches = dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), "*u8" if kv else f"*{dtype}")
            for what, half in (("", shape.head_dim // 2), (" partial", shape.head_dim // 8)):
                sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim, half, 64 if kv else 0)
                label = f"{shape.name}{what}{kv}, {dtype}"
                launch = options(chip, NUM_WARPS)
                found.append(Variant(label, rope_and_store_kv_kernel, signature | caches, _constants(*sizes), launch))
    return found
