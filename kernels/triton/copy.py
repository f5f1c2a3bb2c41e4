"""Copies whole blocks of KV in every layer."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

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
) -> None:
    """See reference.copy_kv: all sources are read before any target is written.

    Args:
        is_disjoint: no block is both a source and a target. Then blocks are copied directly, else by way of a
            second place for as many blocks.
    """
    num_pairs, num_layers = len(sources), k_cache.shape[0]
    if not num_pairs:
        return
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    if is_disjoint:
        _copy((k_cache, v_cache), (k_cache, v_cache), sources, targets, num_pairs, block_size)
        return
    shape = (num_layers, num_pairs * block_size, *k_cache.shape[2:])
    stage = (k_cache.new_empty(shape), v_cache.new_empty(shape))
    _copy((k_cache, v_cache), stage, sources, None, num_pairs, block_size)
    _copy(stage, (k_cache, v_cache), None, targets, num_pairs, block_size)


def _copy(
    origin: tuple[Tensor, Tensor],
    goal: tuple[Tensor, Tensor],
    sources: Tensor | None,
    targets: Tensor | None,
    num_pairs: int,
    block_size: int,
) -> None:
    num_layers, _, num_kv_heads, head_dim = origin[0].shape
    elements = block_size * num_kv_heads * head_dim
    copy_blocks_kernel[(num_pairs, num_layers, cdiv(elements, BLOCK))](
        *origin,
        *goal,
        targets if sources is None else sources,
        sources if targets is None else targets,
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
    signature = {"sources_ptr": "*i64", "targets_ptr": "*i64", "from_stride": "i64:16", "to_stride": "i64:16"}
    for dtype in DTYPES:
        pointers = dict.fromkeys(("k_from_ptr", "v_from_ptr", "k_to_ptr", "v_to_ptr"), f"*{dtype}")
        for shape in SHAPES:
            for has_sources, has_targets in ((True, True), (True, False), (False, True)):
                constants = {
                    "ELEMENTS": 16 * shape.num_kv_heads * shape.head_dim,
                    "HAS_SOURCES": has_sources,
                    "HAS_TARGETS": has_targets,
                    "BLOCK": BLOCK,
                }
                what = "direct" if has_sources and has_targets else "read" if has_sources else "write"
                label = f"{shape.name} {what}, {dtype}"
                found.append(
                    Variant(label, copy_blocks_kernel, pointers | signature, constants, options(chip, NUM_WARPS))
                )
    return found
