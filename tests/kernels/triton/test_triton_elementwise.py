"""Norm, SiLU, rotary embedding with KV store, and block copies, against reference.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import SMALL_SPEC
from torch import Tensor

from batchinfer.kernels import reference
from batchinfer.kernels.fp8_kv import FP8
from batchinfer.kernels.triton.activation import silu_and_mul
from batchinfer.kernels.triton.copy import copy_kv
from batchinfer.kernels.triton.norm import rms_norm
from batchinfer.kernels.triton.rope import rope_and_store_kv
from batchinfer.models.decoder import KVCache

SPEC = replace(SMALL_SPEC, num_layers=1, num_kv_heads=3, head_dim=24)

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


@pytest.mark.parametrize("half", [12, 10, 4])
def test_rope_and_store_kv_in_fp8(device: torch.device, dtype: torch.dtype, tolerance: float, half: int) -> None:
    """The reference's numbers and scales, where no rounding of k itself comes between."""
    qkv = made(device, dtype, 7, 5 + 2 * 3, 24)
    qkv[1] *= 30
    qkv[2, 5:] = 0
    qkv[3, 6, 5] = float("nan")
    qkv[4, 9, 7] = float("inf")
    qkv[5, 5:] *= torch.logspace(-6, 2, 24).to(device, dtype)
    q, k, v = qkv.split((5, 3, 3), dim=1)
    angles = made(device, torch.float32, 7, half, seed=1) * 3
    slots = torch.tensor([17, 3, 0, 31, 16, 9, 40], device=device)
    pools = [KVCache.make(SPEC, 3, 16, FP8, device) for _ in range(2)]
    ops = rope_and_store_kv, reference.rope_and_store_kv
    outs = [
        op(q, k, v, angles.cos(), angles.sin(), slots, pool.k[0], pool.v[0], pool.scales(0))
        for op, pool in zip(ops, pools, strict=True)
    ]
    torch.testing.assert_close(*outs, rtol=tolerance, atol=tolerance, equal_nan=True)
    for found, expected in zip(pools[0].tensors, pools[1].tensors, strict=True):  # k's numbers may be one code apart
        torch.testing.assert_close(found.float(), expected.float(), rtol=0.13, atol=2.0**-9, equal_nan=True)
    (_, v_codes, _, v_scales), (_, right_codes, _, right_scales) = (pool.tensors for pool in pools)
    same = (v_codes.float() == right_codes.float()) | v_codes.float().isnan() & right_codes.float().isnan()
    assert same.all()
    assert torch.equal(v_scales.nan_to_num(-1), right_scales.nan_to_num(-1))
    assert pools[0].scales(0).k[0, :, 0].tolist() == [1, 1, 1]


def test_every_number_is_rounded_to_fp8_as_torch_does(device: torch.device) -> None:
    """Around every code and every tie between two, both signs, below the normal range too; the scale is 1."""
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    ties = (codes[1:] + codes[:-1]) / 2
    values = torch.cat((codes, ties, ties * (1 + 2.0**-20), ties * (1 - 2.0**-20), torch.tensor([2.0**-140, 1e-30])))
    values = torch.cat((values, -values, torch.zeros(-2 * len(values) % 63)))
    values = torch.cat((values.view(-1, 63), torch.full((len(values) // 63, 1), 448.0)), dim=1)
    v = values[:, None, :].to(device)
    pool = KVCache.make(replace(SPEC, num_kv_heads=1, head_dim=64), len(v) // 16 + 1, 16, FP8, device)
    angles = torch.zeros(len(v), 32, device=device)
    slots = torch.arange(len(v), device=device)
    rope_and_store_kv(v, v, v, angles + 1, angles, slots, pool.k[0], pool.v[0], pool.scales(0))
    for cache in (pool.k, pool.v):
        assert torch.equal(cache[0, : len(v)].float(), v.to(FP8).float())


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


@pytest.mark.parametrize(("sources", "targets", "is_disjoint"), [([1, 2, 5], [2, 3, 1], False), ([1, 5], [3, 0], True)])
def test_scales_are_copied_with_their_blocks(
    device: torch.device, sources: list[int], targets: list[int], is_disjoint: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    pools = [KVCache.make(replace(SPEC, num_layers=2), 6, 16, FP8, device) for _ in range(2)]
    for mine, other in zip(pools[0].tensors, pools[1].tensors, strict=True):
        filled = torch.randint(0, 100, mine.shape, generator=generator, dtype=torch.uint8).to(device)
        for tensor in (mine, other):
            tensor.copy_(filled.view(FP8) if tensor.dtype == FP8 else filled)
    pairs = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
    copy_kv(pools[0].k, pools[0].v, *pairs, 16, is_disjoint=is_disjoint, scales=pools[0].all_scales)
    pools[1].copy_blocks(list(zip(sources, targets, strict=True)))
    for mine, other in zip(pools[0].tensors, pools[1].tensors, strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


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
