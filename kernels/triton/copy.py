"""Copies whole blocks of KV in every layer."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from batchinfer.kernels.fp8_kv import KVScales, as_bytes
from batchinfer.kernels.triton.launch import Chip, cdiv, chip_of, options
from batchinfer.kernels.triton.variants import DTYPES, SHAPES, Variant

BLOCK = 2048
NUM_WARPS = 4


@triton.jit
def copy_blocks_kernel(
    k_from_ptr: tl.tensor,
    v_from_ptr: tl.tensor,
    k_to_ptr: tl.tensor,
    v_to_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    from_stride: tl.tensor,  # from layer to layer
    to_stride: tl.tensor,
    ELEMENTS: tl.constexpr,  # of a block in one layer
    HAS_SOURCES: tl.constexpr,  # without, the i-th pair reads (writes) block i
    HAS_TARGETS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    pair, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = element < ELEMENTS
    source, target = pair, pair
    if HAS_SOURCES:
        source = tl.load(sources_ptr + pair).to(tl.int64)
    if HAS_TARGETS:
        target = tl.load(targets_ptr + pair).to(tl.int64)
    read = layer * from_stride + source * ELEMENTS + element
    write = layer * to_stride + target * ELEMENTS + element
    tl.store(k_to_ptr + write, tl.load(k_from_ptr + read, mask=mask), mask=mask)
    tl.store(v_to_ptr + write, tl.load(v_from_ptr + read, mask=mask), mask=mask)


def copy_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    sources: Tensor,
    targets: Tensor,
    block_size: int,
    *,
    is_disjoint: bool = False,
    scales: KVScales | None = None,
) -> None:
    """See reference.copy_kv, and copy_scales for those of fp8: all sources are read before any target is written.

    Args:
        is_disjoint: no block is both a source and a target. Then blocks are copied directly, else by way of a
            second place for as many blocks.
    """
    if not len(sources):
        return
    num_layers, num_slots = k_cache.shape[:2]
    for pair in ((as_bytes(k_cache), as_bytes(v_cache)), scales):
        if pair is None:
            continue
        k, v = (each.view(num_layers, num_slots // block_size, -1) for each in pair)
        if is_disjoint:
            _copy((k, v), (k, v), sources, targets)
            continue
        shape = (num_layers, len(sources), k.shape[2])
        stage = (k.new_empty(shape), v.new_empty(shape))
        _copy((k, v), stage, sources, None)
        _copy(stage, (k, v), None, targets)


def _copy(
    origin: tuple[Tensor, Tensor], goal: tuple[Tensor, Tensor], sources: Tensor | None, targets: Tensor | None
) -> None:
    """Tensors are [layers, blocks, elements], contiguous; without sources (targets) pair i reads (writes) block i."""
    assert all(each.is_contiguous() for each in (*origin, *goal))
    num_layers, _, elements = origin[0].shape
    blocks = [each for each in (sources, targets) if each is not None]
    copy_blocks_kernel[(len(blocks[0]), num_layers, cdiv(elements, BLOCK))](
        *origin,
        *goal,
        blocks[0],
        blocks[-1],
        origin[0].stride(0),
        goal[0].stride(0),
        ELEMENTS=elements,
        HAS_SOURCES=sources is not None,
        HAS_TARGETS=targets is not None,
        BLOCK=BLOCK,
        **options(chip_of(origin[0].device), NUM_WARPS),
    )


def aot_variants(chip: Chip) -> list[Variant]:
    found = []
    labels = {"u8": "fp8 KV", "fp32": "scales of fp8 KV"}
    signature = {"sources_ptr": "*i64", "targets_ptr": "*i64", "from_stride": "i64:16", "to_stride": "i64:16"}
    for dtype in (*DTYPES, "u8", "fp32"):
        pointers = dict.fromkeys(("k_from_ptr", "v_from_ptr", "k_to_ptr", "v_to_ptr"), f"*{dtype}")
        for shape in SHAPES:
            for has_sources, has_targets in ((True, True), (True, False), (False, True)):
                constants = {
                    "ELEMENTS": 16 * shape.num_kv_heads * (1 if dtype == "fp32" else shape.head_dim),
                    "HAS_SOURCES": has_sources,
                    "HAS_TARGETS": has_targets,
                    "BLOCK": BLOCK,
                }
                what = "direct" if has_sources and has_targets else "read" if has_sources else "write"
                label = f"{shape.name} {what}, {labels.get(dtype, dtype)}"
                found.append(
                    Variant(label, copy_blocks_kernel, pointers | signature, constants, options(chip, NUM_WARPS))
                )
    return found
