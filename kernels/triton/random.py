"""The counter-based random numbers of batchinfer/engine/random.py in kernels: the same words, the same noise."""

from __future__ import annotations

import triton
import triton.language as tl

LOW_KEY_STEP = tl.constexpr(0x9E3779B9)
HIGH_KEY_STEP = tl.constexpr(0xBB67AE85)
FIRST_FACTOR = tl.constexpr(0xD2511F53)
THIRD_FACTOR = tl.constexpr(0xCD9E8D57)


@triton.jit
def philox(block: tl.tensor, position: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Philox 4x32-10 at counter (block, position, 0, 0): four tensors like `block` of uint32 words.

    block: [n] int; position: scalar int64, its low 32 bits count; key: scalar int64.
    """
    c0 = block.to(tl.uint32)
    c1 = c0 * 0 + (position & 0xFFFFFFFF).to(tl.uint32)
    c2, c3 = c0 * 0, c0 * 0
    k0 = (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        first, third = c0, c2
        c0 = tl.umulhi(third, third * 0 + THIRD_FACTOR) ^ c1 ^ k0
        c1 = third * THIRD_FACTOR
        c2 = tl.umulhi(first, first * 0 + FIRST_FACTOR) ^ c3 ^ k1
        c3 = first * FIRST_FACTOR
        k0 += LOW_KEY_STEP
        k1 += HIGH_KEY_STEP
    return c0, c1, c2, c3


@triton.jit
def gumbel(word: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise of uint32 words, fp32: -log(-log1p(-v)) of v = (word + 1/2) / 2^32."""
    v = (word.to(tl.int64) * 2 + 1).to(tl.float32) * 1.1641532182693481e-10  # 2^-33
    # log1p as log(u) v / (1 - u) with u = 1 - v rounded: the rounding of u cancels (Kahan).
    u = 1.0 - v
    exponential = tl.where(u == 1.0, v, -tl.log(u) * (v / (1.0 - u)))
    return -tl.log(exponential)


@triton.jit
def gumbel_of_ids(begin: tl.tensor, position: tl.tensor, key: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Noise of ids begin .. begin + BLOCK, fp32; begin and BLOCK are multiples of 4."""
    w0, w1, w2, w3 = philox(begin // 4 + tl.arange(0, BLOCK // 4), position, key)
    return gumbel(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))
