"""A batch-invariant matrix product: a row's bits do not depend on how many rows there are. See matmul.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer.kernels.triton.launch import Chip, cdiv, chip_of, options
from batchinfer.kernels.triton.matmul import FEW_ROWS, Tile, large_tile, precision, product_tile, small_tile
from batchinfer.kernels.triton.variants import DTYPES, SHAPES, ModelShape, Variant

#: Programs that about fill a chip. The number of chunks follows from it, so it is the same for all chips.
PROGRAMS = 128
#: The inner dimension is cut into at most so many chunks, and not below so many elements each.
MAX_CHUNKS = 4
LEAST_CHUNK = 1024
#: Row tiles that follow each other on the same columns' neighbours, so that weights are read from cache.
GROUP = 8
SUM_BLOCK = 1024


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [rows, columns], or fp32 [NUM_CHUNKS, rows, columns] if IS_SPLIT
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    x_stride: tl.tensor,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,  # a multiple of BLOCK_K
    IS_SPLIT: tl.constexpr,  # each chunk has a program of its own
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    num_row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    num_column_tiles = tl.cdiv(num_columns, BLOCK_COLUMNS)
    # GROUP row tiles go through the columns together.
    program = tl.program_id(0)
    group = program // (GROUP * num_column_tiles)
    within = program % (GROUP * num_column_tiles)
    height = min(num_row_tiles - group * GROUP, GROUP)
    row = (group * GROUP + within % height) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (within // height) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    chunk = tl.program_id(1)
    begin = chunk * CHUNK
    total = product_tile(
        x_ptr,
        weight_ptr,
        row,
        column,
        num_rows,
        num_columns,
        x_stride,
        begin,
        min(begin + CHUNK, K),
        K,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
        BLOCK_K,
        PRECISION,
    )
    if not IS_SPLIT:
        for index in tl.static_range(1, NUM_CHUNKS):
            total += product_tile(
                x_ptr,
                weight_ptr,
                row,
                column,
                num_rows,
                num_columns,
                x_stride,
                index * CHUNK,
                min((index + 1) * CHUNK, K),
                K,
                BLOCK_ROWS,
                BLOCK_COLUMNS,
                BLOCK_K,
                PRECISION,
            )
        if HAS_BIAS:
            total += tl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)[None, :]
    mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    place = (chunk.to(tl.int64) * num_rows + row)[:, None] * num_columns + column[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_elements"])
def sum_chunks_kernel(
    parts_ptr: tl.tensor,  # fp32 [NUM_CHUNKS, rows, columns]
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_elements: tl.tensor,
    num_columns: tl.tensor,
    HAS_BIAS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = element < num_elements
    total = tl.load(parts_ptr + element, mask=mask, other=0.0)
    for index in tl.static_range(1, NUM_CHUNKS):
        total += tl.load(parts_ptr + index * num_elements + element, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + element % num_columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + element, total.to(out_ptr.dtype.element_ty), mask=mask)


def num_chunks(num_columns: int, inner: int) -> int:
    """Parts of the inner dimension, from the weight's shape alone: enough that few rows fill the chip."""
    return max(1, min(cdiv(PROGRAMS, cdiv(num_columns, 64)), inner // LEAST_CHUNK, MAX_CHUNKS))


def choose_tile(chip: Chip, num_rows: int, num_columns: int, chunks: int, is_wide: bool) -> Tile:
    """is_wide: operands are fp32."""
    if num_rows <= FEW_ROWS:
        return small_tile(chip, is_wide)
    # Twice the columns read a third less, but leave no registers for a second sum.
    is_broad = chip.name == "sm_90" and chunks == 1 and num_columns % 256 == 0
    return large_tile(chip, is_wide, 256 if is_broad else 128)


def _constants(
    inner: int, chunks: int, tile: Tile, *, has_bias: bool, is_split: bool, precision: str
) -> dict[str, Any]:
    return {
        "K": inner,
        "HAS_BIAS": has_bias,
        "NUM_CHUNKS": chunks,
        "CHUNK": cdiv(cdiv(inner, chunks), tile.depth) * tile.depth,
        "IS_SPLIT": is_split,
        "PRECISION": precision,
        "GROUP": GROUP,
        "BLOCK_ROWS": tile.rows,
        "BLOCK_COLUMNS": tile.columns,
        "BLOCK_K": tile.depth,
    }


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] times weight [out, in] transposed, plus bias [out]; any number of rows.

    Sums are fp32, rounded once. Rows of x may lie apart, elements may not; the weight is contiguous.
    """
    num_rows, inner = x.shape
    num_columns = weight.shape[0]
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    chip, is_wide = chip_of(x.device), x.dtype == torch.float32
    chunks = num_chunks(num_columns, inner)
    is_split = chunks > 1 and num_rows <= FEW_ROWS
    tile = choose_tile(chip, num_rows, num_columns, chunks, is_wide)
    target = out.new_empty((chunks, num_rows, num_columns), dtype=torch.float32) if is_split else out
    num_programs = cdiv(num_rows, tile.rows) * cdiv(num_columns, tile.columns)
    linear_kernel[(num_programs, chunks if is_split else 1)](
        x,
        weight,
        weight if bias is None else bias,
        target,
        num_rows,
        num_columns,
        x.stride(0),
        **_constants(inner, chunks, tile, has_bias=bias is not None, is_split=is_split, precision=precision(x.dtype)),
        **options(chip, tile.num_warps, tile.num_stages),
    )
    if is_split:
        sum_chunks_kernel[(cdiv(out.numel(), SUM_BLOCK),)](
            target,
            weight if bias is None else bias,
            out,
            out.numel(),
            num_columns,
            HAS_BIAS=bias is not None,
            NUM_CHUNKS=chunks,
            BLOCK=SUM_BLOCK,
            **options(chip, 4),
        )
    return out


def projections(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Name -> (columns, inner dimension) of the products of a layer."""
    return {
        "qkv": (shape.qkv, shape.hidden),
        "o": (shape.hidden, shape.num_heads * shape.head_dim),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }


def aot_variants(chip: Chip) -> list[Variant]:
    found = []
    for dtype in (*DTYPES, "fp32"):
        for shape in SHAPES:
            for name, (columns, inner) in projections(shape).items():
                for num_rows in (1, FEW_ROWS + 1):
                    found += _variants(chip, dtype, f"{shape.name} {name}", columns, inner, num_rows)
    return found


def _variants(chip: Chip, dtype: str, what: str, columns: int, inner: int, num_rows: int) -> list[Variant]:
    is_wide, chunks = dtype == "fp32", num_chunks(columns, inner)
    is_split = chunks > 1 and num_rows <= FEW_ROWS
    tile = choose_tile(chip, num_rows, columns, chunks, is_wide)
    label = f"{what}, {'few' if num_rows <= FEW_ROWS else 'many'} rows, {dtype}"
    pointers = {"x_ptr": f"*{dtype}", "weight_ptr": f"*{dtype}", "bias_ptr": f"*{dtype}"}
    signature = {
        **pointers,
        "out_ptr": "*fp32" if is_split else f"*{dtype}",
        "num_rows": "i32",
        "num_columns": "i32:16",
        "x_stride": "i32:16",
    }
    constants = _constants(
        inner, chunks, tile, has_bias=False, is_split=is_split, precision="ieee" if is_wide else "tf32"
    )
    launch = options(chip, tile.num_warps, tile.num_stages)
    found = [Variant(label, linear_kernel, signature, constants, launch, product=f"linear, {dtype}")]
    if is_split:
        signature = {"parts_ptr": "*fp32", "bias_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"}
        signature |= {"num_elements": "i32", "num_columns": "i32:16"}
        constants = {"HAS_BIAS": False, "NUM_CHUNKS": chunks, "BLOCK": SUM_BLOCK}
        found.append(Variant(label, sum_chunks_kernel, signature, constants, options(chip, 4)))
    return found
