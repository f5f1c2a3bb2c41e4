"""Root-mean-square norm with the residual added on the way."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer.kernels.triton.launch import Chip, cdiv, chip_of, next_power_of_2, options
from batchinfer.kernels.triton.variants import DTYPES, SHAPES, Variant

#: Elements that a program takes at least: short rows (heads of q and k) are taken several at a time.
TILE = 4096


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    total_ptr: tl.tensor,
    num_rows: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    eps: tl.tensor,
    INNER: tl.constexpr,  # row r of x lies at (r // INNER) * outer_stride + (r % INNER) * inner_stride
    DIM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_column = column < DIM
    mask = (row < num_rows)[:, None] & is_column[None, :]
    place = (row // INNER).to(tl.int64) * outer_stride + (row % INNER) * inner_stride
    x = tl.load(x_ptr + place[:, None] + column[None, :], mask=mask, other=0.0)
    dense = row.to(tl.int64)[:, None] * DIM + column[None, :]
    wide = x.to(tl.float32)
    if HAS_RESIDUAL:
        total = (wide + tl.load(residual_ptr + dense, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + dense, total, mask=mask)
        wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)
    weight = tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    normed = (wide * scale[:, None]).to(x.dtype).to(tl.float32) * weight[None, :]
    tl.store(out_ptr + dense, normed.to(out_ptr.dtype.element_ty), mask=mask)


def _config(dim: int, chip: Chip) -> tuple[dict[str, int], dict[str, Any]]:
    """Of rows of `dim` elements, however many there are: a row's sum is taken in one order."""
    block = next_power_of_2(dim)
    rows = max(1, TILE // block) if block <= 512 else 1
    num_warps = min(16, max(1, rows * block // 1024))
    return {"ROWS": rows, "BLOCK": block}, options(chip, num_warps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See reference.rms_norm. x: [..., dim] of up to three dimensions, the last contiguous; residual contiguous.

    Returns:
        The normed sum and the sum, contiguous; the sum is x itself if there is no residual.
    """
    dim = x.shape[-1]
    assert x.stride(-1) == 1
    assert x.dim() <= 3
    assert residual is None or residual.is_contiguous()
    inner = x.shape[-2] if x.dim() == 3 else 1
    outer_stride = x.stride(-3) if x.dim() == 3 else (x.stride(0) if x.dim() == 2 else 0)
    out = torch.empty(x.shape, dtype=torch.result_type(x, weight), device=x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = x.numel() // dim
    if not num_rows:
        return out, total
    sizes, launch = _config(dim, chip_of(x.device))
    rms_norm_kernel[(cdiv(num_rows, sizes["ROWS"]),)](
        x,
        x if residual is None else residual,
        weight,
        out,
        total,
        num_rows,
        outer_stride,
        x.stride(-2) if x.dim() == 3 else 0,
        eps,
        INNER=inner,
        DIM=dim,
        HAS_RESIDUAL=residual is not None,
        **sizes,
        **launch,
    )
    return out, total


def aot_variants(chip: Chip) -> list[Variant]:
    """Norms over the hidden size with residual, and over heads without (Qwen3's)."""
    found = []
    for dtype in DTYPES:
        pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "total_ptr"), f"*{dtype}")
        scalars = {"num_rows": "i32", "outer_stride": "i32:16", "inner_stride": "i32:16", "eps": "fp32"}
        for shape in SHAPES:
            for what, dim, inner in (("hidden", shape.hidden, 1), ("heads", shape.head_dim, shape.num_heads)):
                sizes, launch = _config(dim, chip)
                constexprs = {"INNER": inner, "DIM": dim, "HAS_RESIDUAL": what == "hidden", **sizes}
                label = f"{shape.name} {what}, {dtype}"
                found.append(Variant(label, rms_norm_kernel, pointers | scalars, constexprs, launch))
    return found
