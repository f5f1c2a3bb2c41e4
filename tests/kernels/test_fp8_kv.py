"""Keys and values in fp8: what a round trip costs, what it does to odd numbers, and where they lie."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from batchinfer.attention.backend import ReferenceAttention
from batchinfer.attention.tree import RaggedBatch
from batchinfer.kernels import reference
from batchinfer.kernels.fp8_kv import FP8, LARGEST, LEAST_SCALE, KVScales, dequantize, quantize
from batchinfer.models.decoder import KVCache, kv_bytes_per_block
from batchinfer.models.spec import DecoderSpec, RopeSpec

CPU = torch.device("cpu")
SPEC = DecoderSpec(
    architecture="LlamaForCausalLM", vocab_size=64, hidden_size=48, intermediate_size=64, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=24, rms_norm_eps=1e-5, rope=RopeSpec("default", 1e4, 24), max_position=128,
    tie_word_embeddings=True, qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False, hidden_act="silu",
    sliding_windows=(None,) * 3, dtype=None,
)  # fmt: skip
#: Of moderate range within a vector; the exponent below takes them to either end of what fp32 holds.
VECTORS = hnp.arrays(np.int16, hnp.array_shapes(min_dims=2, max_dims=2, max_side=9))


def allowed_error(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Half a unit in the last of 4 significant bits, or of what is below the normal range; division rounds too."""
    return torch.maximum(x.double().abs() * 2.0**-4, scales.double()[..., None] * 2.0**-10) * (1 + 1e-6)


@given(VECTORS, st.integers(-149, 112))
def test_an_element_is_off_by_half_a_unit_at_most(values: np.ndarray, exponent: int) -> None:
    x = torch.from_numpy((values * 2.0**exponent).astype(np.float32))
    numbers, scales = quantize(x)
    assert (numbers.dtype, scales.dtype, scales.shape) == (FP8, torch.float32, x.shape[:-1])
    error = (dequantize(numbers, scales).double() - x.double()).abs()
    assert (error <= allowed_error(x, scales)).all()
    is_used = x.abs().amax(-1) > LEAST_SCALE * LARGEST
    assert (numbers.float().abs().amax(-1)[is_used] == LARGEST).all(), "the whole range is used"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_vector_alone_decides(dtype: torch.dtype) -> None:
    """Each of many gives the bits that it gives alone."""
    x = torch.randn((7, 3, 20), generator=torch.Generator().manual_seed(0)).to(dtype)
    numbers, scales = quantize(x)
    for token in range(7):
        for head in range(3):
            alone, scale = quantize(x[token, head])
            assert torch.equal(alone.view(torch.uint8), numbers[token, head].view(torch.uint8))
            assert scale == scales[token, head]


def test_zeros() -> None:
    numbers, scales = quantize(torch.zeros(2, 8))
    assert scales.tolist() == [1, 1]
    assert torch.equal(dequantize(numbers, scales), torch.zeros(2, 8))


def test_an_outlier_costs_the_others_their_last_bits_alone() -> None:
    """As in some models' keys: one channel a hundred times as large."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(1))
    x[3] = 300.0
    numbers, scales = quantize(x)
    error = (dequantize(numbers, scales) - x).abs()
    assert error[3] == 0
    assert (error <= allowed_error(x, scales)).all()
    assert error.max() < 0.2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_its_vector_and_in_no_other(bad: float) -> None:
    x = torch.ones(3, 8)
    x[1, 5] = bad
    found = dequantize(*quantize(x))
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], x[[0, 2]])


def test_numbers_too_small_for_a_scale_become_zero() -> None:
    x = torch.tensor([[1e-45, -1e-40], [2.0**-117, 0]])
    numbers, scales = quantize(x)
    assert (scales >= LEAST_SCALE).all()
    found = dequantize(numbers, scales)
    assert torch.isfinite(found).all()
    assert found[1, 0] == x[1, 0]


# The pool


def filled(num_blocks: int = 5, block_size: int = 32) -> KVCache:
    kv = KVCache.make(SPEC, num_blocks, block_size, FP8, CPU)
    generator = torch.Generator().manual_seed(2)
    for layer in range(SPEC.num_layers):
        k, v = torch.randn((2, num_blocks * block_size, 2, 24), generator=generator)
        zeros = torch.zeros(len(k), 12)
        slots = torch.randperm(len(k), generator=generator)
        scales = kv.scales(layer)
        reference.rope_and_store_kv(k, k, v, zeros + 1, zeros, slots, kv.k[layer], kv.v[layer], scales)
    return kv


def blocks_of(kv: KVCache) -> list[list[bytes]]:
    """[tensor][block]: everything in it, in all layers."""
    shape = (SPEC.num_layers, kv.num_blocks, -1)
    views = [tensor.view(torch.uint8).reshape(shape) for tensor in kv.tensors]
    return [[view[:, block].numpy().tobytes() for block in range(kv.num_blocks)] for view in views]


def test_a_pool_takes_what_is_said() -> None:
    for block_size in (16, 64):
        kv = KVCache.make(SPEC, 3, block_size, FP8, CPU)
        assert kv.nbytes == 3 * kv_bytes_per_block(SPEC, FP8, block_size)
    assert kv_bytes_per_block(SPEC, FP8, 1) == 2 * 3 * 2 * (24 + 4), "a number is a byte, a vector has a scale"
    assert KVCache.make(SPEC, 3, 16, torch.bfloat16, CPU).nbytes == 3 * kv_bytes_per_block(SPEC, torch.bfloat16, 16)


def test_scales_go_with_their_blocks() -> None:
    kv = filled()
    before = blocks_of(kv)
    assert len(before) == 4
    kv.copy_blocks([(0, 1), (1, 2), (4, 0)])
    for old, new in zip(before, blocks_of(kv), strict=True):
        assert new == [old[source] for source in (4, 0, 1, 3, 4)]
    kv.clear_blocks([3, 1])
    for old, new in zip(before, blocks_of(kv), strict=True):
        assert [set(block) == {0} for block in new] == [False, True, False, True, False]
        assert new[2] == old[1]


def test_each_token_is_stored_with_its_scales() -> None:
    tokens, block_size = 5, 16
    k, v = (
        torch.randn((2, tokens, 2, 24), generator=torch.Generator().manual_seed(3))
        * torch.logspace(-2, 2, tokens)[None, :, None, None]
    )
    kv = KVCache.make(SPEC, 4, block_size, FP8, CPU)
    slots = torch.tensor([63, 0, 17, 16, 40])
    angles = torch.arange(tokens * 12.0).view(tokens, 12)
    scales = kv.scales(1)
    q = torch.cat((k, v), dim=1)
    out = reference.rope_and_store_kv(q, k, v, angles.cos(), angles.sin(), slots, kv.k[1], kv.v[1], scales)
    assert torch.equal(out, reference.rope(q, angles.cos(), angles.sin()))
    assert scales is not None
    for cache, of, expected in (
        (kv.k[1], scales.k, reference.rope(k, angles.cos(), angles.sin())),
        (kv.v[1], scales.v, v),
    ):
        numbers, wanted = quantize(expected)
        assert torch.equal(cache.view(torch.uint8)[slots], numbers.view(torch.uint8))
        assert torch.equal(of[slots // block_size, :, slots % block_size], wanted)
        assert int((of != 0).sum()) == tokens * 2
    assert not kv.k[[0, 2]].view(torch.uint8).any()


# Attention


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_attention_is_that_over_the_numbers_times_their_scales(block_size: int, window: int | None) -> None:
    num_blocks = 256 // block_size + 1
    kv = filled(num_blocks, block_size)
    scales = kv.scales(1)
    assert scales is not None
    wide = [
        cache.float() * of.transpose(1, 2).reshape(-1, 2, 1)
        for cache, of in zip((kv.k[1], kv.v[1]), scales, strict=True)
    ]
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(4)).numpy().astype(np.int32)
    per_seq = 128 // block_size
    tables = np.stack([order[:per_seq], order[per_seq : 2 * per_seq]])
    tables[1, 0] = tables[0, 0]  # shared
    ragged = RaggedBatch(tables, np.array([100, 90], np.int32), np.array([1, 5], np.int32), block_size)
    backend = ReferenceAttention(CPU)
    backend.plan(ragged, frozenset({window}))
    q = torch.randn((6, 4, 24), generator=torch.Generator().manual_seed(5))
    found = backend.forward(q, kv.k[1], kv.v[1], 0.2, window, scales)
    expected = backend.forward(q, *wide, 0.2, window)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_scales_are_by_blocks_then_heads() -> None:
    """What docs say of the layout, and the Triton kernels read."""
    kv = KVCache.make(SPEC, 4, 16, FP8, CPU)
    scales = kv.scales(0)
    assert isinstance(scales, KVScales)
    assert scales.k.shape == scales.v.shape == (4, 2, 16)
    assert KVCache.make(SPEC, 4, 16, torch.float16, CPU).scales(0) is None
