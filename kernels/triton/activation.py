"""SiLU of the gate times up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer.kernels.triton.launch import Chip, cdiv, chip_of, options
from batchinfer.kernels.triton.variants import DTYPES, SHAPES, Variant

BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def silu_and_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(gate_up_ptr + row * row_stride + column, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + row * row_stride + WIDTH + column, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, (silu * up.to(tl.float32)).to(gate.dtype), mask=mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See reference.silu_and_mul: [rows, 2 I] -> [rows, I]; the last dimension contiguous."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        silu_and_mul_kernel[(num_rows, cdiv(width, BLOCK))](
            gate_up,
            out,
            gate_up.stride(0),
            WIDTH=width,
            BLOCK=BLOCK,
            **options(chip_of(gate_up.device), NUM_WARPS),
        )
    return out


def aot_variants(chip: Chip) -> list[Variant]:
    return [
        Variant(
            f"{shape.name}, {dtype}",
            silu_and_mul_kernel,
            {"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "row_stride": "i32:16"},
            {"WIDTH": shape.intermediate, "BLOCK": BLOCK},
            options(chip, NUM_WARPS),
        )
        for dtype in DTYPES
        for shape in SHAPES
    ]
