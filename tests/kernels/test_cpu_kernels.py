"""The C++ products, norms and ropes for each instruction set: float64 twins, and the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from kernel_calls import BF16, HALF_ULP, Kernels, fp32_sum_error, num_threads, pack_kv, randn
from tiny_models import INSTRUCTION_SETS
from torch import Tensor

from batchinfer.kernels import reference
from batchinfer.kernels.cpu.decoder import interleaved

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ kernels were built")
ROWS = [*range(1, 41), 300]


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(request.param)


def close(found: Tensor, expected: Tensor, tolerance: Tensor | float) -> None:
    """Every value within its own tolerance; NaN never is."""
    excess = (found.double() - expected.double()).abs() - tolerance
    assert bool((excess <= 0).all()), f"worst exceeds its tolerance by {float(excess.max())}"


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_library_is_what_its_name_says(instruction_set: str) -> None:
    assert Kernels(instruction_set).c.bi_isa().decode() == instruction_set


# Products


def test_pack_lays_sixteen_outputs_side_by_side(kernels: Kernels) -> None:
    weight = torch.arange(20 * 6).view(20, 6).to(BF16)
    packed = kernels.pack(weight).view(2, 3, 16, 2)  # [outputs / 16][inputs / 2][16][2]
    for n in range(32):
        for k in range(6):
            expected = float(weight[n, k]) if n < 20 else 0.0
            assert float(packed[n // 16, k // 2, n % 16, k % 2]) == expected


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(1, 16), (17, 48), (48, 576), (100, 80), (272, 32), (576, 1536)]
)
def test_linear(kernels: Kernels, num_outputs: int, num_inputs: int, with_bias: bool) -> None:
    """Rounded once, at the end; sums in fp32."""
    x, weight = randn(300, num_inputs), randn(num_outputs, num_inputs, seed=1, scale=num_inputs**-0.5)
    bias = randn(num_outputs, seed=2) if with_bias else None
    packed = kernels.pack(weight)
    whole = kernels.linear(x, packed, num_outputs, bias)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    close(whole, expected, HALF_ULP * expected.abs() * 1.001 + fp32_sum_error(x, weight) + 2.0**-24)
    with num_threads(3):
        for rows in ROWS:
            assert torch.equal(kernels.linear(x[:rows], packed, num_outputs, bias), whole[:rows]), f"{rows} rows"
    for begin, end in ((5, 6), (7, 20), (255, 300), (299, 300)):
        assert torch.equal(kernels.linear(x[begin:end], packed, num_outputs, bias), whole[begin:end])


def test_linear_of_a_bad_row_leaves_the_others_alone(kernels: Kernels) -> None:
    x, weight = randn(20, 64), randn(40, 64, seed=1)
    packed = kernels.pack(weight)
    good = kernels.linear(x, packed, 40)
    x[3, 5], x[11, 0] = float("nan"), float("inf")
    found = kernels.linear(x, packed, 40)
    assert found[3].isnan().all()
    assert not found[11].isfinite().any()
    others = [row for row in range(20) if row not in (3, 11)]
    assert torch.equal(found[others], good[others])


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(16, 16), (48, 576), (80, 48), (576, 1536)])
def test_linear_add_is_linear_then_addition(
    kernels: Kernels, num_outputs: int, num_inputs: int, with_bias: bool
) -> None:
    x, weight = randn(300, num_inputs), randn(num_outputs, num_inputs, seed=1, scale=num_inputs**-0.5)
    bias, residual = randn(num_outputs, seed=2) if with_bias else None, randn(300, num_outputs, seed=3)
    packed = kernels.pack(weight)
    expected = residual + kernels.linear(x, packed, num_outputs, bias)
    with num_threads(3):
        for rows in (*ROWS, 300):
            assert torch.equal(kernels.linear_add(x[:rows], packed, residual[:rows], bias), expected[:rows])


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("size", "num_inputs"), [(16, 16), (48, 64), (80, 48), (1536, 576)])
def test_gate_up_silu_is_linear_then_silu(kernels: Kernels, size: int, num_inputs: int, with_bias: bool) -> None:
    x, weight = randn(300, num_inputs), randn(2 * size, num_inputs, seed=1, scale=4 * num_inputs**-0.5)
    bias = randn(2 * size, seed=2) if with_bias else None
    expected = kernels.silu_and_mul(kernels.linear(x, kernels.pack(weight), 2 * size, bias))
    packed = kernels.pack(interleaved(weight))
    bias = None if bias is None else interleaved(bias)
    with num_threads(3):
        for rows in (*ROWS, 300):
            assert torch.equal(kernels.gate_up_silu(x[:rows], packed, 2 * size, bias), expected[:rows])


# Between the products


@pytest.mark.parametrize("with_update", [True, False])
@pytest.mark.parametrize("size", [16, 48, 576, 4096])
def test_rms_norm(kernels: Kernels, size: int, with_update: bool) -> None:
    """Rounded before and after the weight, so within two half units of the last place."""
    residual, weight = randn(300, size, seed=1, scale=2), 1 + randn(size, seed=2) / 4
    x = randn(300, size) if with_update else None
    normed, total = kernels.rms_norm(x, residual, weight, 1e-5)
    twin, twin_total = reference.rms_norm(residual, weight, 1e-5, x)
    assert torch.equal(total, twin_total)
    wide = total.double()
    expected = weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    close(normed, expected, 2 * HALF_ULP * expected.abs() * 1.01)
    # The scale's last bits decide only where a value lies between two bf16 numbers.
    assert float((normed == twin).double().mean()) > 0.999
    with num_threads(3):
        for rows in ROWS:
            part, _ = kernels.rms_norm(None if x is None else x[:rows], residual[:rows], weight, 1e-5)
            assert torch.equal(part, normed[:rows])
    alone, _ = kernels.rms_norm(None if x is None else x[77:78], residual[77:78], weight, 1e-5)
    assert torch.equal(alone[0], normed[77])


def test_rms_norm_of_zeros_and_of_large_values(kernels: Kernels) -> None:
    rows = torch.stack([torch.zeros(32), torch.full((32,), 1e15), torch.full((32,), 1e-18)]).to(BF16)
    normed, _ = kernels.rms_norm(None, rows, torch.ones(32, dtype=BF16), 1e-5)
    assert torch.equal(normed[0], torch.zeros(32, dtype=BF16))
    close(normed[1], torch.ones(32), 2 * HALF_ULP)
    assert float(normed[2].abs().max()) < 1e-15


@pytest.mark.parametrize("size", [16, 80, 1536])
def test_silu_and_mul(kernels: Kernels, size: int) -> None:
    """Rounded twice, as transformers does; exp2 is good to 3e-7."""
    gate_up = randn(300, 2 * size, scale=4)
    gate_up[0, :8] = torch.tensor([0.0, -0.0, 60.0, -60.0, 88.0, -88.0, 120.0, -120.0])
    gate_up[1, :4] = torch.tensor([1e4, -1e4, 1e30, -1e30])
    found = kernels.silu_and_mul(gate_up)
    gate, up = gate_up[:, :size].double(), gate_up[:, size:].double()
    expected = gate / (1 + torch.exp(-gate)) * up
    # Below 1e-30 the quotient may be flushed to zero or keep a rest of the kept-finite exponential.
    close(found, expected, (2 * HALF_ULP * 1.01 + 1e-6) * expected.abs() + 1e-30 + 2e-8 * (gate < -1e20) * up.abs())
    assert float((found == reference.silu_and_mul(gate_up)).double().mean()) > 0.999
    with num_threads(3):
        for rows in ROWS:
            assert torch.equal(kernels.silu_and_mul(gate_up[:rows]), found[:rows])


def test_silu_of_a_bad_gate_is_never_a_plain_number(kernels: Kernels) -> None:
    """What went wrong must still be seen in the logits."""
    gate_up = torch.ones(1, 64, dtype=BF16)
    gate_up[0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    assert not kernels.silu_and_mul(gate_up)[0, :3].isfinite().any()


HEADS = [
    (2, 1, 16, 16),
    (6, 2, 48, 48),
    (9, 3, 64, 64),
    (8, 1, 80, 32),
    (3, 3, 128, 128),
    (4, 2, 256, 64),
    (5, 5, 16, 2),
]


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim", "rope_dim"), HEADS)
def test_rope_and_store_kv(
    kernels: Kernels, num_heads: int, num_kv_heads: int, dim: int, rope_dim: int, block_size: int, with_norm: bool
) -> None:
    tokens, num_slots = 37, 2 * 256
    qkv = randn(tokens, num_heads + 2 * num_kv_heads, dim)
    angles = torch.randn((400, rope_dim // 2), generator=torch.Generator().manual_seed(1)) * 3
    cos, sin = angles.cos(), angles.sin()
    positions = (torch.arange(tokens) * 11 % 400).to(torch.int32)
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(2))[:tokens]
    k_cache, v_cache = randn(num_slots, num_kv_heads, dim, seed=3), randn(num_slots, num_kv_heads, dim, seed=4)
    norms = [1 + randn(dim, seed=seed) / 4 for seed in (5, 6)] if with_norm else [None, None]
    cache = pack_kv(k_cache, v_cache, block_size)
    scale = dim**-0.5
    found = kernels.rope_and_store_kv(
        qkv, cos, sin, positions, slots, cache, num_kv_heads, block_size, scale, *norms, eps=1e-5
    )
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    before = k_cache.clone()
    if with_norm:  # which a test above compares with its twin
        q, k = (
            kernels.rms_norm(None, x.reshape(-1, dim), norm, 1e-5)[0].view(x.shape)
            for x, norm in zip((q, k), norms, strict=True)
        )
    at = positions.long()
    reference.rope_and_store_kv(q, k, v, cos[at], sin[at], slots, k_cache, v_cache)
    assert torch.equal(cache, pack_kv(k_cache, v_cache, block_size)), "its slots, and no other"
    assert not torch.equal(before, k_cache)
    rotated = reference.rope(q.double(), cos[at], sin[at])
    # The scale is applied before the only rounding; cancellation leaves fp32 errors of the larger term.
    expected = rotated * (scale * 1.4426950408889634)
    close(found, expected, HALF_ULP * 1.01 * expected.abs() + 2.0**-22 * q.double().abs().amax(-1, keepdim=True))
    with num_threads(3):
        for begin, end in ((0, 1), (5, 6), (3, 20)):
            part = kernels.rope_and_store_kv(
                qkv[begin:end].contiguous(),
                cos,
                sin,
                positions[begin:end],
                slots[begin:end],
                cache,
                num_kv_heads,
                block_size,
                scale,
                *norms,
                eps=1e-5,
            )
            assert torch.equal(part, found[begin:end])
    assert torch.equal(cache, pack_kv(k_cache, v_cache, block_size)), "writing again changes nothing"


@pytest.mark.parametrize("place", [2, 3])  # of K, of V; 0 and 1 are the query heads'
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_tokens_whose_kv_is_not_finite_are_marked(kernels: Kernels, bad: float, place: int) -> None:
    tokens, dim = 9, 32
    qkv = randn(tokens, 4, dim)
    qkv[4, place, 7] = bad
    angles = torch.rand(64, dim // 2)
    cache = pack_kv(torch.zeros(64, 1, dim, dtype=BF16), torch.zeros(64, 1, dim, dtype=BF16), 64)
    at = torch.arange(tokens)
    kernels.rope_and_store_kv(qkv, angles.cos(), angles.sin(), at.int(), at, cache, 1, 64, 1.0)
    assert kernels.is_finite.tolist() == [token != 4 for token in range(tokens)]
