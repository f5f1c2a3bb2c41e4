"""Philox and the Gumbel noise made of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.random import gumbel_noise, gumbel_noise_all, philox, stream_key

#: Random123 1.14, tests/kat_vectors: philox4x32 with 10 rounds; counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_of(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox 4x32-10 in Python integers, from the paper's definition."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 % 2**32, (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = philox(
        tuple(torch.tensor([c]) for c in counter),  # type: ignore[arg-type]
        tuple(torch.tensor([k]) for k in key),  # type: ignore[arg-type]
    )
    assert tuple(int(word) for word in words) == expected
    assert philox_of(counter, key) == expected


WORD = st.integers(0, 2**32 - 1)


@given(st.lists(st.tuples(*[WORD] * 6), min_size=1, max_size=5))
def test_equals_the_definition(rows: list[tuple[int, ...]]) -> None:
    columns = [torch.tensor(column) for column in zip(*rows, strict=True)]
    words = torch.stack(philox(tuple(columns[:4]), tuple(columns[4:])), 1)  # type: ignore[arg-type]
    assert words.tolist() == [list(philox_of(row[:4], row[4:])) for row in rows]


@settings(deadline=None)
@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20),
    vocab_size=st.integers(1, 70),
    position=st.integers(0, 2**31),
)
def test_noise_of_some_ids_is_the_noise_of_all_at_those_ids(keys: list[int], vocab_size: int, position: int) -> None:
    rng = np.random.default_rng(vocab_size)
    key, at = torch.tensor(keys), position + torch.arange(len(keys))
    ids = torch.from_numpy(rng.integers(0, vocab_size, (len(keys), 9)))
    noise = gumbel_noise_all(key, at, vocab_size)
    assert noise.dtype == torch.float32
    assert torch.equal(gumbel_noise(key, at, ids), noise.gather(1, ids))
    for row in range(len(keys)):  # nor does it matter what other rows there are
        assert torch.equal(gumbel_noise_all(key[row : row + 1], at[row : row + 1], vocab_size)[0], noise[row])


def test_noise_follows_the_definition() -> None:
    key, position, token_id = 0x0123456789ABCDEF, 17, 1234567
    word = philox_of((token_id // 4, position, 0, 0), (key % 2**32, key >> 32))[token_id % 4]
    expected = -math.log(-math.log1p(-(word + 0.5) / 2**32))
    found = gumbel_noise(torch.tensor([key]), torch.tensor([position]), torch.tensor([[token_id]]))
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_moments_and_independence() -> None:
    """Mean Euler's gamma, variance pi^2 / 6; keys, positions and ids uncorrelated. Seeded: 400,000 numbers."""
    keys = torch.arange(20) * 1_000_003
    noise = torch.stack([gumbel_noise_all(keys, torch.full((20,), at), 1000) for at in range(20)]).double()
    error = math.sqrt(math.pi**2 / 6 / noise.numel())
    assert abs(float(noise.mean()) - 0.5772156649) < 4 * error
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.01)
    uniform = torch.exp(-torch.exp(-noise)).flatten()
    counts = torch.histc(uniform, 100, 0, 1).double()
    expected = noise.numel() / 100
    assert float(((counts - expected) ** 2 / expected).sum()) < 150  # 99 degrees of freedom: p = 0.0007
    for shifted in (noise.roll(1, 0), noise.roll(1, 1), noise.roll(1, 2), noise.roll(4, 2)):
        correlation = torch.corrcoef(torch.stack((noise.flatten(), shifted.flatten())))[0, 1]
        assert abs(float(correlation)) < 4 / math.sqrt(noise.numel())
    assert len(noise.float().unique()) > 0.99 * noise.numel()


def test_noise_is_never_nan_nor_plus_infinity() -> None:
    from batchinfer.engine.random import _gumbel

    noise = _gumbel(torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1]))
    assert not noise.isnan().any()
    assert (noise < 23).all()
    assert (noise[:-1] >= noise[1:]).all()


def test_stream_keys_tell_seed_row_and_sample_apart() -> None:
    keys = {stream_key(seed, row, sample) for seed in range(-5, 5) for row in range(10) for sample in range(10)}
    assert len(keys) == 1000
    assert all(0 <= key < 2**64 for key in keys)
    assert stream_key(1, 2, 3) == stream_key(1, 2, 3)
    assert stream_key(-1, 0, 0) == stream_key(2**64 - 1, 0, 0)
    assert stream_key(1, 2, 3) == 0xB4FB5A8DE61ABA77
