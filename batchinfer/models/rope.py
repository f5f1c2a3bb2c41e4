"""Rotary position embedding tables (Su et al. 2021, RoFormer), in the rotate-half convention of transformers.

Channel `i` of a head is rotated together with channel `i + dim / 2`. The order of the floating point operations
follows transformers, so that the frequencies are the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from batchinfer.errors import InputError
from batchinfer.models.spec import RopeSpec

if TYPE_CHECKING:
    from torch import Tensor


def rope_tables(rope: RopeSpec, num_positions: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [num_positions, dim / 2] float32, CPU, yarn's attention scaling multiplied in."""
    import torch

    freqs, scaling = inverse_frequencies(rope)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * freqs  # [num_positions, dim / 2]
    return angles.cos() * scaling, angles.sin() * scaling


def inverse_frequencies(rope: RopeSpec) -> tuple[Tensor, float]:
    """([dim / 2] float32 radians per position, factor on cos and sin). Raises InputError for an unknown kind."""
    import torch

    if rope.kind not in ROPE_KINDS:
        raise InputError(f"unknown rope type {rope.kind!r}; supported: {', '.join(ROPE_KINDS)}")
    freqs, scaling = ROPE_KINDS[rope.kind](rope)
    if rope.freq_factors is not None:
        freqs = freqs / torch.tensor(rope.freq_factors, dtype=torch.float32)
    return freqs, scaling


def _wavelengths(rope: RopeSpec) -> Tensor:
    """theta ** (2 i / dim): [dim / 2] float32."""
    import torch

    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).to(torch.float32) / rope.dim
    return torch.pow(rope.theta, exponents)


def _default(rope: RopeSpec) -> tuple[Tensor, float]:
    return 1.0 / _wavelengths(rope), 1.0


def _linear(rope: RopeSpec) -> tuple[Tensor, float]:
    return 1.0 / _wavelengths(rope) / rope.factor, 1.0


def _llama3(rope: RopeSpec) -> tuple[Tensor, float]:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between interpolated."""
    import torch

    assert rope.original_max_position
    assert rope.low_freq_factor
    assert rope.high_freq_factor
    freqs = 1.0 / _wavelengths(rope)
    low_wavelen = rope.original_max_position / rope.low_freq_factor
    high_wavelen = rope.original_max_position / rope.high_freq_factor
    wavelen = 2 * math.pi / freqs
    scaled = torch.where(wavelen > low_wavelen, freqs / rope.factor, freqs)
    smooth = (rope.original_max_position / wavelen - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    is_medium = ~(wavelen < high_wavelen) & ~(wavelen > low_wavelen)
    return torch.where(is_medium, smoothed, scaled), 1.0


def _yarn(rope: RopeSpec) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, sections 3.2 to 3.4)."""
    import torch

    assert rope.original_max_position

    def dim_of(num_rotations: float) -> float:
        """The channel pair that turns `num_rotations` times within the original context."""
        turns = math.log(rope.original_max_position / (num_rotations * 2 * math.pi))  # type: ignore[operator]
        return (rope.dim * turns) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = torch.clamp((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp  # share of the original frequency
    wavelengths = _wavelengths(rope)
    freqs = 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    return freqs, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def temperature(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


ROPE_KINDS: dict[str, Callable[[RopeSpec], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
