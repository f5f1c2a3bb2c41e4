"""Attention over the prefix tree on a GPU: `reference.tree_attention`, one launch for a mixed batch.

One launch for the items of the plan (plan.py), and a small one that merges partial results where tokens have several:
see attention_kernels.py for what they do. `TritonAttention` is the backend; `TritonAttention.static` gives one
whose buffers and launches stay the same, for CUDA graphs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchinfer.attention.tree import RaggedBatch
from batchinfer.engine.staging import Staging
from batchinfer.kernels.fp8_kv import KVScales, as_bytes
from batchinfer.kernels.triton.attention_kernels import attend_items, merge_partials
from batchinfer.kernels.triton.fp8 import AS_THEY_ARE, kv_format
from batchinfer.kernels.triton.launch import Chip, cdiv, chip_of, next_power_of_2, num_sms, options
from batchinfer.kernels.triton.plan import ITEM_FIELDS, Int32s, ItemShape, PlanLimits, TreePlan, plan_tree
from batchinfer.kernels.triton.variants import LLAMA_8B, SHAPES, SMOLLM2_135M, ModelShape, Variant

LOG2_E = 1 / math.log(2)
#: Of a program that merges.
MERGE_WARPS = 4
#: Programs of attention that a multiprocessor runs at once.
PROGRAMS_PER_SM = 2


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Sizes of the tiles, chosen from head_dim, dtype and chip alone."""

    tile: int  # KV positions; part of the arithmetic's order
    narrow: int  # lanes
    wide: int
    narrow_stages: int  # of the pipeline that loads block ids, then KV
    wide_stages: int
    num_warps: int = 4


def attention_config(head_dim: int, dtype: torch.dtype, chip: Chip) -> AttentionConfig:
    """The configuration of a model's attention; dtype is that of q.

    Tiles of K and V take 16 KiB each, so that two programs fit a multiprocessor, each with two tiles on their way:
    what streaming from memory takes. Heads of 256 get a program of twice the warps instead. Products of fp32 are
    not for speed: their tiles are small.

    Raises ValueError for a head_dim beyond 256 or one that is no multiple of 8.
    """
    if not 8 <= head_dim <= 256 or head_dim % 8:
        raise ValueError(f"head_dim must be a multiple of 8 up to 256, got {head_dim}")
    block_d = _block_d(head_dim)
    tile_bytes = 32 * 1024 if block_d == 256 and chip.name == "sm_90" else 16 * 1024
    tile = min(128, tile_bytes // (block_d * dtype.itemsize))
    num_warps = 8 if block_d == 256 else 4  # the accumulator of 64 lanes must fit the registers
    if dtype.itemsize > 2:
        return AttentionConfig(max(16, tile // 2), 16, 16, 1, 1, num_warps)
    if chip.backend == "hip":
        return AttentionConfig(tile, 16, 64, 2, 2, num_warps)
    # With the block ids in front, 5 stages hold two tiles, 3 hold one; wgmma's operands are held one tile longer.
    wide_stages = 3 if chip.name == "sm_90" or block_d == 256 else 5
    return AttentionConfig(tile, 16, 64, 5, wide_stages, num_warps)


def _block_d(head_dim: int) -> int:
    return max(16, next_power_of_2(head_dim))


class DevicePlan(NamedTuple):
    """A `plan.TreePlan` on the device, for a model's configuration. Items and merges may be padded with zeros."""

    items: Tensor  # [items, 10] int32, as everything here
    rows: Tensor  # [rows]
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens]
    merges: Tensor  # [merges, 3]
    tables: Tensor  # [num_seqs, max_blocks]
    num_partials: int
    block_size: int
    config: AttentionConfig


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: DevicePlan,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    scales: KVScales | None = None,
) -> Tensor:
    """Softmax attention of each query token over the KV on its path from the root of the prefix tree.

    Args:
        q: [tokens, heads, head_dim]; tokens may lie apart, as in a fused projection of q, k and v.
        k_cache, v_cache: [num_slots, kv_heads, head_dim] of one layer, contiguous, of q's dtype; with scales of
            fp8_kv.FP8.
        plan: of this window.
        scale: multiplies the scores.
        window: sliding window W: a query at position p sees keys p - W + 1 .. p.
        soft_cap: scores x become soft_cap * tanh(x / soft_cap).
        scales: of an fp8 cache; see reference.tree_attention.

    Returns:
        [tokens, heads * head_dim] in q's dtype. Rows that the plan does not hold are not written.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    assert q.stride()[1:] == (head_dim, 1)
    assert all(cache.is_contiguous() for cache in (k_cache, v_cache))
    sizes = _Sizes(
        num_heads, num_kv_heads, head_dim, q.stride(0), plan.block_size, window is not None, soft_cap is not None,
        kv_format(q.dtype, head_dim, chip_of(q.device)) if scales is not None else AS_THEY_ARE,
    )  # fmt: skip
    out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
    partial_acc = torch.empty((max(1, plan.num_partials), num_heads, head_dim), dtype=torch.float32, device=q.device)
    partial_sums = torch.empty((max(1, plan.num_partials), num_heads, 2), dtype=torch.float32, device=q.device)
    k_scales, v_scales = scales if scales is not None else (partial_sums, partial_sums)  # not read
    assert k_scales.is_contiguous()
    assert v_scales.is_contiguous()
    # tanh(y) = 1 - 2 / (e^2y + 1); exponents are of 2.
    multiplier, cap_factor = (
        (scale * LOG2_E, 0.0) if soft_cap is None else (soft_cap * LOG2_E, 2 * LOG2_E * scale / soft_cap)
    )
    chip = chip_of(q.device)
    attend_items[(plan.items.shape[0] * num_kv_heads,)](
        q, as_bytes(k_cache), as_bytes(v_cache), out, partial_acc, partial_sums,
        plan.items, plan.rows, plan.positions, plan.slots, plan.tables, plan.tables.stride(0),
        k_scales, v_scales, multiplier, cap_factor, window or 0,
        **sizes.constexprs(plan.config),
        **options(chip, plan.config.num_warps, plan.config.narrow_stages),
    )  # fmt: skip
    if plan.merges.shape[0]:
        constexprs = sizes.merge_constexprs()
        grid = (plan.merges.shape[0] * cdiv(num_heads, constexprs["BLOCK_H"]),)
        merge_partials[grid](out, partial_acc, partial_sums, plan.merges, **constexprs, **options(chip, MERGE_WARPS))
    return out


class _Sizes(NamedTuple):
    """What a model's launches have in common, beside the tensors."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_stride: int
    block_size: int
    has_window: bool
    has_cap: bool
    kv_format: int  # see fp8.py

    def constexprs(self, config: AttentionConfig) -> dict[str, Any]:
        return {
            "Q_STRIDE": self.q_stride,
            "NUM_KV_HEADS": self.num_kv_heads,
            "PER_GROUP": self.num_heads // self.num_kv_heads,
            "DIM": self.head_dim,
            "BLOCK_D": _block_d(self.head_dim),
            "BLOCK_SIZE": self.block_size,
            "TILE": config.tile,
            "NARROW": config.narrow,
            "WIDE": config.wide,
            "NARROW_STAGES": config.narrow_stages,
            "WIDE_STAGES": config.wide_stages,
            "HAS_WINDOW": self.has_window,
            "HAS_CAP": self.has_cap,
            "FORMAT": self.kv_format,
            "PRECISION": "ieee",  # fp32 products are fp32; 16-bit ones are not touched by it
        }

    def merge_constexprs(self) -> dict[str, Any]:
        block_d = _block_d(self.head_dim)
        return {
            "NUM_HEADS": self.num_heads,
            "DIM": self.head_dim,
            "BLOCK_D": block_d,
            "BLOCK_H": min(next_power_of_2(self.num_heads), max(1, 512 // block_d)),
            "UNROLL": 8,
        }


class TritonAttention:
    """AttentionBackend over the Triton kernels.

    Args:
        device: a GPU, or the CPU in Triton's interpreter.
        dtype: of q, and of the KV cache unless that is fp8.
        is_invariant: a token's result does not depend on the rest of the batch, to the last bit. Costs narrow items
            and, where sequences share KV, more partial results.
        soft_cap: see tree_attention.
        config: of tiles; None: what suits the chip.
    """

    def __init__(
        self,
        device: torch.device,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        is_invariant: bool = False,
        soft_cap: float | None = None,
        config: AttentionConfig | None = None,
    ) -> None:
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        self.config = config or attention_config(head_dim, dtype, chip_of(device))
        self.device = device
        self.shape = ItemShape(
            tile=self.config.tile,
            narrow=self.config.narrow,
            wide=self.config.wide,
            per_group=num_heads // num_kv_heads,
            num_programs=max(1, PROGRAMS_PER_SM * num_sms(device) // num_kv_heads),
            is_invariant=is_invariant,
        )
        self._soft_cap = soft_cap
        self._staging = Staging(device)
        self._plans: dict[int | None, DevicePlan] = {}

    def plan(self, batch: RaggedBatch, windows: frozenset[int | None]) -> None:
        tables = np.ascontiguousarray(batch.block_tables, dtype=np.int32)
        plans = {window: plan_tree(batch, self.shape, window) for window in windows}
        arrays = [array for plan in plans.values() for array in _arrays(plan)]
        put = self._staging.put([tables, *arrays])
        for index, (window, plan) in enumerate(plans.items()):
            items, rows, positions, slots, merges = put[1 + 5 * index : 6 + 5 * index]
            self._plans[window] = DevicePlan(
                items, rows, positions, slots, merges, put[0], plan.num_partials, batch.block_size, self.config
            )

    def forward(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        window: int | None,
        scales: KVScales | None = None,
    ) -> Tensor:
        return tree_attention(q, k_cache, v_cache, self._plans[window], scale, window, self._soft_cap, scales)

    def static(self, num_rows: int, max_blocks: int, block_size: int) -> StaticTritonAttention:
        """The same for decode steps of up to so many rows, in buffers that stay. max_blocks: of a sequence."""
        return StaticTritonAttention(self, num_rows, max_blocks, block_size)


def _arrays(plan: TreePlan) -> tuple[Int32s, ...]:
    return plan.items, plan.rows, plan.positions, plan.slots, plan.merges


class StaticTritonAttention:
    """A backend for decode steps whose buffers and launches do not depend on the plan: what a CUDA graph records."""

    def __init__(self, attention: TritonAttention, num_rows: int, max_blocks: int, block_size: int) -> None:
        self._attention = attention
        self._block_size = block_size
        self._staging = Staging(attention.device)
        self.limits = decode_limits(num_rows, attention.shape)
        limits, fields = self.limits, len(ITEM_FIELDS)
        self._shapes = (
            (limits.num_items, fields),
            (limits.num_rows,),
            (limits.num_tokens,),
            (limits.num_tokens,),
            (limits.num_merges, 3),
            (num_rows, max_blocks),
        )
        self._buffers: dict[int | None, Tensor] = {}

    def plan(self, batch: RaggedBatch, windows: frozenset[int | None]) -> None:
        """Write the plan into the buffers. Raises ValueError if it does not fit."""
        if batch.block_size != self._block_size:
            raise ValueError(f"block_size is {batch.block_size}, the buffers are for {self._block_size}")
        plans = [plan_tree(batch, self._attention.shape, window, self.limits) for window in windows]
        flat = [self._pack((*_arrays(plan), batch.block_tables)) for plan in plans]
        for window, new in zip(windows, self._staging.put(flat), strict=True):
            if window not in self._buffers:
                self._buffers[window] = torch.zeros_like(new)
            self._buffers[window].copy_(new)

    def _pack(self, arrays: tuple[Int32s, ...]) -> Int32s:
        """The arrays one after the other, each padded with zeros to its buffer's shape."""
        flat = np.zeros(self._offsets()[-1], np.int32)
        for array, shape, begin in zip(arrays, self._shapes, self._offsets(), strict=False):
            if any(size > most for size, most in zip(array.shape, shape, strict=True)):
                raise ValueError(f"an array of {array.shape} does not fit the buffer of {shape}")
            into = flat[begin : begin + math.prod(shape)].reshape(shape)
            into[tuple(slice(size) for size in array.shape)] = array
        return flat

    def _offsets(self) -> list[int]:
        """Where each array begins, and the end. Multiples of 16 bytes: kernels are compiled once for these."""
        sizes = [cdiv(math.prod(shape), 4) * 4 for shape in self._shapes]
        return [sum(sizes[:index]) for index in range(len(sizes) + 1)]

    def forward(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        window: int | None,
        scales: KVScales | None = None,
    ) -> Tensor:
        """As AttentionBackend.forward; rows of q behind the planned ones give anything."""
        items, rows, positions, slots, merges, tables = (
            self._buffers[window][begin : begin + math.prod(shape)].view(shape)
            for shape, begin in zip(self._shapes, self._offsets(), strict=False)
        )
        attention = self._attention
        plan = DevicePlan(
            items, rows, positions, slots, merges, tables, self.limits.num_partials, self._block_size, attention.config
        )
        return tree_attention(q, k_cache, v_cache, plan, scale, window, attention._soft_cap, scales)


def decode_limits(num_rows: int, shape: ItemShape) -> PlanLimits:
    """Room for most decode steps of so many rows; plans share and cut less where it is not enough."""
    cuts = 2 * shape.num_programs
    per_row = 16 if shape.is_invariant else 6
    return PlanLimits(
        num_items=(per_row if shape.is_invariant else 1) * num_rows + num_rows // 2 + cuts,
        num_rows=6 * num_rows,
        num_tokens=num_rows,
        num_merges=num_rows,
        num_partials=per_row * num_rows + cuts * max(1, shape.wide // shape.per_group),
    )


def aot_variants(chip: Chip) -> list[Variant]:
    gemma = ModelShape("gemma-2-9b", 3584, 14336, 16, 8, 256, 256000)
    qwen = ModelShape("qwen2.5-7b", 3584, 18944, 28, 4, 128, 152064)
    phi = ModelShape("phi-2", 2560, 10240, 32, 32, 80, 51200)
    found = [_variant(chip, "bf16", shape) for shape in (*SHAPES, qwen, phi)]
    found.append(_variant(chip, "bf16", gemma, ", window and cap", has_window=True, has_cap=True))
    found += [_variant(chip, "bf16", shape, ", fp8 KV", is_fp8=True) for shape in (*SHAPES, phi)]
    found.append(_variant(chip, "bf16", LLAMA_8B, ", blocks of 16, fp8 KV", block_size=16, is_fp8=True))
    found.append(_variant(chip, "bf16", gemma, ", window and cap, fp8 KV", has_window=True, has_cap=True, is_fp8=True))
    found.append(_variant(chip, "fp16", LLAMA_8B, ", fp8 KV", is_fp8=True))
    found.append(_variant(chip, "fp32", SMOLLM2_135M, ", fp8 KV", is_fp8=True))
    found += [_variant(chip, "bf16", LLAMA_8B, f", blocks of {size}", block_size=size) for size in (16, 256)]
    found += [_variant(chip, "fp16", LLAMA_8B), _variant(chip, "fp32", SMOLLM2_135M), _variant(chip, "fp32", gemma)]
    pointers = {"out": "*bf16", "partial_acc": "*fp32", "partial_sums": "*fp32", "merges": "*i32"}
    for shape in SHAPES:
        sizes = _Sizes(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.qkv, 64, False, False, AS_THEY_ARE)
        constexprs = sizes.merge_constexprs()
        found.append(Variant(f"{shape.name}, bf16", merge_partials, pointers, constexprs, options(chip, MERGE_WARPS)))
    return found


def _variant(
    chip: Chip,
    dtype: str,
    shape: ModelShape,
    what: str = "",
    *,
    block_size: int = 64,
    has_window: bool = False,
    has_cap: bool = False,
    is_fp8: bool = False,
) -> Variant:
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    config = attention_config(shape.head_dim, torch_dtype, chip)
    sizes = _Sizes(
        shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.qkv, block_size, has_window, has_cap,
        kv_format(torch_dtype, shape.head_dim, chip) if is_fp8 else AS_THEY_ARE,
    )  # fmt: skip
    signature = dict.fromkeys(("q", "out"), f"*{dtype}")
    signature |= dict.fromkeys(("k_cache", "v_cache"), "*u8" if is_fp8 else f"*{dtype}")
    signature |= dict.fromkeys(("partial_acc", "partial_sums", "k_scales", "v_scales"), "*fp32")
    signature |= dict.fromkeys(("items", "rows", "positions", "slots", "tables"), "*i32")
    signature |= {"table_stride": "i32", "window": "i32", "multiplier": "fp32", "cap_factor": "fp32"}
    label = f"{shape.name}{what}, {dtype}"
    return Variant(
        label, attend_items, signature, sizes.constexprs(config), options(chip, config.num_warps, config.narrow_stages)
    )
