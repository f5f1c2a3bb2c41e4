"""fp8 numbers of the KV cache, made and read by their bits: see batchinfer/kernels/fp8_kv.py.

No chip's own conversions: sm_80 has none, gfx942's are of another format (e4m3fnuz).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchinfer.kernels.fp8_kv import LARGEST, LEAST_SCALE
from batchinfer.kernels.triton.launch import Chip, is_interpreted

#: How numbers of the cache are read.
AS_THEY_ARE = 0
FP8_BY_INTEGERS = 1
FP8_BY_PTX = 2
_BY_INTEGERS = tl.constexpr(FP8_BY_INTEGERS)
_BY_PTX = tl.constexpr(FP8_BY_PTX)
#: What `widened` numbers are to be multiplied by.
FP8_UNIT = tl.constexpr(256.0)

_LARGEST = tl.constexpr(LARGEST)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)

# Four numbers in a register become two registers of two 16-bit ones: each byte goes to the upper half of 16 bits, then
# exponent and mantissa to where they belong. In bfloat16 that is 2^120 too small and is multiplied by 2^112.
_SPREAD = "prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424; "
_MOVE = (
    "and.b32 sign, ${out}, 0x80008000; and.b32 rest, ${out}, 0x7F007F00; "
    "shr.b32 rest, rest, {shift}; or.b32 ${out}, sign, rest; "
)
_RAISE = "fma.rn.bf16x2 ${out}, ${out}, factor, zero; "
_MOVED_BF16 = "".join((_MOVE + _RAISE).format(out=out, shift=4) for out in (0, 1))
_MOVED_FP16 = "".join(_MOVE.format(out=out, shift=1) for out in (0, 1))
_FACTORS = "mov.b32 factor, 0x77807780; mov.b32 zero, 0x80008000; "
PTX_TO_BF16 = tl.constexpr(f"{{ .reg .b32 sign, rest, factor, zero; {_FACTORS}{_SPREAD}{_MOVED_BF16}}}")
PTX_TO_FP16 = tl.constexpr(f"{{ .reg .b32 sign, rest; {_SPREAD}{_MOVED_FP16}}}")


def kv_format(dtype: torch.dtype, head_dim: int, chip: Chip) -> int:
    """How fp8 numbers become those of q's dtype."""
    is_ptx = chip.backend == "cuda" and dtype.itemsize == 2 and not is_interpreted()
    if chip.name == "sm_80" and head_dim > 128:  # it would spill registers
        is_ptx = False
    return FP8_BY_PTX if is_ptx else FP8_BY_INTEGERS


@triton.jit
def widened(codes: tl.tensor, dtype: tl.constexpr, FORMAT: tl.constexpr) -> tl.tensor:
    """Numbers of the dtype, exact, 2^-8 of those that the codes stand for.

    The assembly is declared impure, though it is not: else the compiler reads codes in the order of a product's
    operand, those of values one byte at a time, instead of widening them first.
    """
    if FORMAT == _BY_INTEGERS:
        wide = codes.to(tl.uint16)
        codes = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(dtype)
    elif FORMAT == _BY_PTX:
        if dtype == tl.bfloat16:
            codes = tl.inline_asm_elementwise(
                PTX_TO_BF16, "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=False, pack=4
            )
        else:
            codes = tl.inline_asm_elementwise(
                PTX_TO_FP16, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=False, pack=4
            )
    return codes


@triton.jit
def largest_bits(values: tl.tensor) -> tl.tensor:
    """Bits of the largest magnitude of each row: as integers NaN is above infinity, and that above all numbers."""
    return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def scales_for(largest: tl.tensor) -> tl.tensor:
    """See fp8_kv.quantize."""
    scales = tl.maximum(tl.div_rn(largest.to(tl.float32, bitcast=True), _LARGEST), _LEAST_SCALE)
    scales = tl.where(largest >= 0x7F800000, float("nan"), scales)
    return tl.where(largest == 0, 1.0, scales)


@triton.jit
def to_e4m3(values: tl.tensor, scales: tl.tensor) -> tl.tensor:
    """Bits of values / scales in e4m3, rounded to nearest, ties to even; by integers, as not every chip has the format.

    Below the least normal number, 2^-6, adding 2^14 rounds to steps of 2^-9.
    """
    bits = tl.div_rn(values, scales[:, None]).to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    is_nan = bits > 0x7F800000
    bits = tl.minimum(bits, 0x43E00000)  # 448
    low = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    high = (bits - (120 << 23) + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    code = tl.where(bits < 0x3C800000, low, high)
    return (tl.where(is_nan, 0x7F, code) | sign).to(tl.uint8)
