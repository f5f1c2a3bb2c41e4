"""Keys and values in fp8: numbers of 8 bits, and a scale in fp32 for the key and the value of each token and KV head.

The format is e4m3 as OCP defines it (float8_e4m3fn: 4 bits of exponent, 3 of mantissa, up to 448, no infinity;
Micikevicius et al. 2022), on every chip: kernels make and read its bits themselves. The scale takes the largest number
of a vector to 448, so it needs no calibration, no vector overflows, and a token's KV depends on that token alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
#: The largest number of FP8.
LARGEST = 448.0
#: The least scale, the smallest normal number of fp32: of vectors so near to zero some numbers become zero.
LEAST_SCALE = 2.0**-126


class KVScales(NamedTuple):
    """What the numbers of an fp8 cache are multiplied by.

    By blocks, and within a block by heads: attention reads one head's scales of consecutive tokens at a time.
    """

    k: Tensor  # [num_blocks, kv_heads, block_size] fp32
    v: Tensor


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors x [..., dim] of any float type as (numbers [..., dim] FP8, scales [...] fp32).

    Scale times number is off by 2^-4 of the element at most, or by 2^-10 of the scale if that is more. A vector of
    zeros has the scale 1. One that holds NaN or infinity has the scale NaN, so that it shows wherever it is read.
    """
    wide = x.float()
    largest = wide.abs().amax(-1)
    # By a tensor: a number's reciprocal would be multiplied by on a GPU, which gives other bits.
    scales = (largest / torch.full_like(largest, LARGEST)).clamp_min(LEAST_SCALE)
    scales = torch.where(largest == 0, 1.0, torch.where(torch.isfinite(largest), scales, torch.nan))
    return (wide / scales[..., None]).clamp(-LARGEST, LARGEST).to(FP8), scales


def dequantize(numbers: Tensor, scales: Tensor) -> Tensor:
    """[..., dim] fp32."""
    return numbers.float() * scales[..., None]


def as_bytes(cache: Tensor) -> Tensor:
    """The same memory as uint8 if it is FP8, of which torch cannot index and copy everything; else as it is."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def store(x: Tensor, slots: Tensor, cache: Tensor, scales: Tensor) -> None:
    """Write vectors x [tokens, kv_heads, dim] into an fp8 cache and its scales; see reference.rope_and_store_kv."""
    numbers, of_tokens = quantize(x)
    as_bytes(cache).index_copy_(0, slots, as_bytes(numbers))
    block_size = scales.shape[2]
    scales[slots // block_size, :, slots % block_size] = of_tokens


def scales_of_groups(scales: Tensor, groups: Tensor, group_size: int) -> Tensor:
    """Of one head after the other: [..., kv_heads, group_size] for groups [...] of consecutive tokens of the cache."""
    num_blocks, num_kv_heads, block_size = scales.shape
    per_block = block_size // group_size
    return scales.view(num_blocks, num_kv_heads, per_block, group_size)[groups // per_block, :, groups % per_block]
