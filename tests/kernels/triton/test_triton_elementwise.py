"""Norm, SiLU, rotary embedding with KV store, and block copies, against reference.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchinfer.kernels import reference
from batchinfer.kernels.triton.activation import silu_and_mul
from batchinfer.kernels.triton.copy import copy_kv
from batchinfer.kernels.triton.norm import rms_norm
from batchinfer.kernels.triton.rope import rope_and_store_kv

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter


def made(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dim", [48, 576, 1030])
def test_rms_norm_adds_the_residual(device: torch.device, dtype: torch.dtype, tolerance: float, dim: int) -> None:
    x, residual, weight = (made(device, dtype, *shape, seed=i) for i, shape in enumerate(((5, dim), (5, dim), (dim,))))
    normed, total = rms_norm(x, weight, 1e-5, residual)
    expected, expected_total = reference.rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(total, expected_total)
    assert_near(normed, expected, tolerance)


def test_rms_norm_of_heads_within_a_fused_projection(
    device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    heads = made(device, dtype, 5, 7, 20)[:, 2:5]
    weight = made(device, dtype, 20, seed=1)
    normed, total = rms_norm(heads, weight, 1e-6)
    assert normed.is_contiguous()
    assert_near(normed, reference.rms_norm(heads, weight, 1e-6)[0], tolerance)
    assert torch.equal(total, heads)


def test_rms_norm_gives_a_row_its_own_bits(device: torch.device, dtype: torch.dtype) -> None:
    x, residual, weight = (made(device, dtype, *shape, seed=i) for i, shape in enumerate(((9, 100), (9, 100), (100,))))
    batch = rms_norm(x, weight, 1e-5, residual)
    for row in (0, 4, 8):
        alone = rms_norm(x[row : row + 1], weight, 1e-5, residual[row : row + 1])
        for of_batch, of_one in zip(batch, alone, strict=True):
            assert torch.equal(of_batch[row : row + 1], of_one)


def test_silu_and_mul(device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    gate_up = made(device, dtype, 3, 2 * 1100) * 8
    gate_up[0, :2] = torch.tensor([-100.0, 100.0])  # exp of the first is infinite in fp32
    found = silu_and_mul(gate_up)
    assert_near(found, reference.silu_and_mul(gate_up), tolerance)
    assert torch.equal(silu_and_mul(gate_up[1:2]), found[1:2])


@pytest.mark.parametrize("half", [12, 10, 4])  # of 24 channels all, some and few are rotated
def test_rope_and_store_kv(device: torch.device, dtype: torch.dtype, tolerance: float, half: int) -> None:
    qkv = made(device, dtype, 6, 5 + 2 * 3, 24)
    q, k, v = qkv.split((5, 3, 3), dim=1)
    angles = made(device, torch.float32, 6, half, seed=1) * 3
    slots = torch.tensor([17, 3, 0, 31, 16, 9], device=device)
    caches = [torch.zeros(32, 3, 24, dtype=dtype, device=device) for _ in range(4)]
    rotated = rope_and_store_kv(q, k, v, angles.cos(), angles.sin(), slots, *caches[:2])
    expected = reference.rope_and_store_kv(q, k, v, angles.cos(), angles.sin(), slots, *caches[2:])
    assert_near(rotated, expected, tolerance)
    assert_near(caches[0], caches[2], tolerance)
    assert torch.equal(caches[1], caches[3])


def test_a_token_with_a_negative_slot_stores_nothing(device: torch.device) -> None:
    q, k, v = made(device, torch.float32, 2, 3, 8).split(1, dim=1)
    angles = made(device, torch.float32, 2, 4)
    caches = [torch.zeros(4, 1, 8, device=device) for _ in range(2)]
    slots = torch.tensor([2, -1], device=device)
    rotated = rope_and_store_kv(q, k, v, angles.cos(), angles.sin(), slots, *caches)
    assert (rotated != 0).all()
    assert [bool((cache != 0).any()) for cache in caches] == [True, True]
    assert [int((cache != 0).any(-1).any(-1).sum()) for cache in caches] == [1, 1]


@pytest.mark.parametrize(
    ("sources", "targets", "is_disjoint"),
    [
        ([1, 2, 5], [2, 3, 1], False),  # 2 and 1 are read before they are written
        ([1, 1, 5], [2, 3, 0], True),
        ([4], [4], False),
    ],
)
def test_copy_kv_reads_all_sources_first(
    device: torch.device, sources: list[int], targets: list[int], is_disjoint: bool
) -> None:
    caches = [made(device, torch.float16, 2, 6 * 16, 3, 24, seed=seed) for seed in range(2)]
    expected = [cache.clone() for cache in caches]
    pairs = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
    reference.copy_kv(expected[0], expected[1], *pairs, 16)
    copy_kv(caches[0], caches[1], *pairs, 16, is_disjoint=is_disjoint)
    assert all(map(torch.equal, caches, expected))


def test_ops_take_no_rows(device: torch.device) -> None:
    empty = torch.empty(0, 8, device=device)
    assert rms_norm(empty, torch.ones(8, device=device), 1e-5)[0].shape == (0, 8)
    assert silu_and_mul(empty).shape == (0, 4)
    no_heads = torch.empty(0, 2, 8, device=device)
    cache = torch.empty(4, 2, 8, device=device)
    slots = torch.empty(0, dtype=torch.int64, device=device)
    angles = torch.empty(0, 4, device=device)
    assert rope_and_store_kv(no_heads, no_heads, no_heads, angles, angles, slots, cache, cache).shape == (0, 2, 8)
    copy_kv(cache[None], cache[None], slots, slots, 4)
