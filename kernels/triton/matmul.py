"""What `linear` and the head have in common: a tile of x times weights transposed, and the sizes of tiles.

Invariance. An element of the product is the sum of NUM_CHUNKS parts of the inner dimension in their order, and
each part is one chain of matrix instructions along that dimension. Parts and instructions follow from the
weights' shape, type and chip, not from how many rows there are; the tile's sizes, which do, only say which
elements a program works out. Hence a row's bits are the same alone and among others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from batchinfer.kernels.triton.launch import Chip

#: Up to so many rows reading the weights takes longer than multiplying, and small tiles fill the chip.
FEW_ROWS = 256
#: Of the inner dimension at a time, for 16-bit operands.
DEPTH = 64


class Tile(NamedTuple):
    """Sizes of what a program works out, and how."""

    rows: int
    columns: int
    depth: int  # of the inner dimension at a time; the same for every tile of a type
    num_warps: int
    num_stages: int


@triton.jit
def product_tile(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    row: tl.tensor,  # [BLOCK_ROWS] int
    column: tl.tensor,  # [BLOCK_COLUMNS] int
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    x_stride: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """fp32 [BLOCK_ROWS, BLOCK_COLUMNS]: x [rows, K] times weight [columns, K] transposed, over begin .. end of K.

    `begin` is a multiple of BLOCK_K, and so is `end` unless it is K.
    """
    inner = tl.arange(0, BLOCK_K)
    x = x_ptr + row.to(tl.int64)[:, None] * x_stride + inner[None, :]
    weight = weight_ptr + column.to(tl.int64)[None, :] * K + inner[:, None]
    is_row, is_column = (row < num_rows)[:, None], (column < num_columns)[None, :]
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for k in range(begin, end, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(x + k, mask=is_row, other=0.0)
            b = tl.load(weight + k, mask=is_column, other=0.0)
        else:
            is_inner = k + inner < K
            a = tl.load(x + k, mask=is_row & is_inner[None, :], other=0.0)
            b = tl.load(weight + k, mask=is_column & is_inner[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


def precision(dtype: torch.dtype) -> str:
    """Of products of this type: fp32 is not cut to tf32; it says nothing of narrower types."""
    return "ieee" if dtype == torch.float32 else "tf32"


def wide_tile() -> Tile:
    """For fp32 operands, on whatever chip."""
    return Tile(64, 64, 32, 8, 2)


def small_tile(chip: Chip, is_wide: bool, columns: int = 64) -> Tile:
    """For few rows. is_wide: operands are fp32."""
    if is_wide:
        return wide_tile()
    stages = 2 if chip.backend == "hip" else 4
    return Tile(64, columns, DEPTH, 4, stages)


def large_tile(chip: Chip, is_wide: bool, columns: int = 128) -> Tile:
    """For many rows."""
    if is_wide:
        return wide_tile()
    if chip.backend == "hip":
        return Tile(128, columns, DEPTH, 8, 2)
    return Tile(128, columns, DEPTH, 8, 3 if chip.name == "sm_80" or columns > 128 else 4)
