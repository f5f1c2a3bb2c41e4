"""Rotary position embedding of q and k, fused with writing k and v into the cache."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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
def rope_and_store_kv_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
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
        k, k_out = k_ptr + token * k_stride, k_cache_ptr + place
        _rotate(k, k_out, k_head_stride, cos, sin, NUM_KV_HEADS, HEAD_DIM, HALF, BLOCK_KV_HEADS, BLOCK_HALF, BLOCK_REST)
        v = v_ptr + token * v_stride
        _copy(v, v_cache_ptr + place, v_head_stride, NUM_KV_HEADS, HEAD_DIM, 0, BLOCK_KV_HEADS, BLOCK_DIM)


def _constants(num_heads: int, num_kv_heads: int, head_dim: int, half: int) -> dict[str, Any]:
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": half,
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
    if num_tokens:
        rope_and_store_kv_kernel[(num_tokens,)](
            q,
            k,
            v,
            cos,
            sin,
            slots,
            k_cache,
            v_cache,
            out,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            q.stride(1),
            k.stride(1),
            v.stride(1),
            **_constants(num_heads, k.shape[1], head_dim, cos.shape[1]),
            **options(chip_of(q.device), NUM_WARPS),
        )
    return out


def aot_variants(chip: Chip) -> list[Variant]:
    found = []
    strides = ("q_stride", "k_stride", "v_stride", "q_head_stride", "k_head_stride", "v_head_stride")
    for dtype in DTYPES:
        pointers = ("q_ptr", "k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr", "out_ptr")
        signature = dict.fromkeys(pointers, f"*{dtype}") | dict.fromkeys(strides, "i32:16")
        signature |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "slots_ptr": "*i64"}
        for shape in SHAPES:
            for what, half in (("", shape.head_dim // 2), (" partial", shape.head_dim // 8)):
                constants = _constants(shape.num_heads, shape.num_kv_heads, shape.head_dim, half)
                label = f"{shape.name}{what}, {dtype}"
                launch = options(chip, NUM_WARPS)
                found.append(Variant(label, rope_and_store_kv_kernel, signature, constants, launch))
    return found
