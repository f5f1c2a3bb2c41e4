"""Counter-based random numbers: the same draw for the same (seed, row, sample, position, token id).

Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), so that any
number can be had without the ones before it, on any device, in any order.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def stream_key(seed: int, row_key: int, sample_index: int) -> int:
    """The 64-bit Philox key of one sample of one row."""
    data = b"".join((value % 2**64).to_bytes(8, "little") for value in (seed, row_key, sample_index))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def philox(counters: tuple[Tensor, Tensor, Tensor, Tensor], keys: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox 4x32-10 on int64 tensors that hold unsigned 32-bit values; broadcasts; four words out."""
    c0, c1, c2, c3 = counters
    k0, k1 = keys
    for _ in range(10):
        # A product of two 32-bit values wraps in int64, but its 64 bits are right.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def gumbel_noise(keys: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise for the Gumbel-max draw, a function of its arguments alone.

    Args:
        keys: [rows] int64, see stream_key (as two's complement); positions: [rows] int64, the place
            of the drawn token in the output; token_ids: [rows, n] int64.

    Returns:
        [rows, n] fp32. Word `id % 4` of the block at counter (id // 4, position) belongs to an id.
    """
    words = philox(
        (token_ids >> 2, positions[:, None], torch.zeros_like(token_ids), torch.zeros_like(token_ids)),
        ((keys & _LOW)[:, None], ((keys >> 32) & _LOW)[:, None]),
    )
    word = torch.stack(words, dim=-1).gather(-1, (token_ids & 3)[..., None])[..., 0]
    return _gumbel(word)


def gumbel_noise_all(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """`gumbel_noise` for the ids 0 .. vocab_size - 1, four of them from each block: [rows, vocab_size]."""
    blocks = torch.arange(-(-vocab_size // 4), device=keys.device)[None]
    zero = torch.zeros_like(blocks)
    words = philox((blocks, positions[:, None], zero, zero), ((keys & _LOW)[:, None], ((keys >> 32) & _LOW)[:, None]))
    return _gumbel(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size])


def _gumbel(word: Tensor) -> Tensor:
    # v in (0, 1]. -log1p(-v) is exponential; the winners lie near v = 0, where fp32 resolves v finely.
    v = ((word.double() + 0.5) * 2.0**-32).float()
    return -torch.log(-torch.log1p(-v))
