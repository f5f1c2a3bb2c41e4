"""Attention of the Triton kernels against plain softmax attention in float64; and its invariance."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from batchinfer.attention.backend import ReferenceAttention
from batchinfer.attention.tree import RaggedBatch
from batchinfer.kernels.fp8_kv import FP8, KVScales, dequantize, quantize
from batchinfer.kernels.triton.attention import (
    AttentionConfig,
    TritonAttention,
    attention_config,
    decode_limits,
)
from batchinfer.kernels.triton.launch import CHIPS, chip_of, is_interpreted

DEVICE = torch.device("cpu" if is_interpreted() else "cuda")
#: Small tiles: many of them, and few interpreted programs.
SMALL = AttentionConfig(tile=16, narrow=16, wide=32, narrow_stages=1, wide_stages=1)


@dataclass
class Sequences:
    """Sequences with KV in a shuffled paged cache; `parents` says whose first tokens a sequence shares."""

    lengths: list[int]  # KV positions, query tokens included
    query_lens: list[int]
    block_size: int = 16
    kv_heads: int = 2
    per_group: int = 3
    dim: int = 16
    parents: dict[int, tuple[int, int]] = field(default_factory=dict)  # sequence -> (parent, shared whole blocks)
    shares_blocks: bool = True  # False: what is shared is copied
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(len(self.lengths))
        size = self.block_size
        num_blocks = [-(-length // size) for length in self.lengths]
        self.k, self.v = [], []  # of each sequence, [length, kv_heads, dim]
        for index, length in enumerate(self.lengths):
            k, v = torch.randn((2, length, self.kv_heads, self.dim), generator=generator).to(self.dtype)
            if index in self.parents:
                parent, shared = self.parents[index]
                k[: shared * size], v[: shared * size] = (x[parent][: shared * size] for x in (self.k, self.v))
            self.k.append(k)
            self.v.append(v)
        self.q = [
            torch.randn((n, self.kv_heads * self.per_group, self.dim), generator=generator).to(self.dtype)
            for n in self.query_lens
        ]
        ids = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
        self.tables = np.zeros((len(self.lengths), max(num_blocks) + 1), np.int32)
        # What was never written may hold anything.
        self.k_cache = torch.full((len(ids) * size, self.kv_heads, self.dim), math.nan).to(self.dtype)
        self.v_cache = self.k_cache.clone()
        for index, length in enumerate(self.lengths):
            shared = 0
            if index in self.parents and self.shares_blocks:
                parent, shared = self.parents[index]
                self.tables[index, :shared] = self.tables[parent, :shared]
            for block in range(shared, num_blocks[index]):
                at = ids.pop()
                self.tables[index, block] = at
                part = slice(block * size, min((block + 1) * size, length))
                into = slice(at * size, at * size + part.stop - part.start)
                self.k_cache[into], self.v_cache[into] = self.k[index][part], self.v[index][part]

        self.k_cache, self.v_cache = self.k_cache.to(DEVICE), self.v_cache.to(DEVICE)

    def batch(self, chosen: list[int]) -> RaggedBatch:
        lens = np.array([self.query_lens[i] for i in chosen], np.int32)
        starts = np.array([self.lengths[i] for i in chosen], np.int32) - lens
        return RaggedBatch(self.tables[chosen], starts, lens, self.block_size)

    def backend(self, config: AttentionConfig | None = SMALL, **options: object) -> TritonAttention:
        heads = self.kv_heads * self.per_group
        return TritonAttention(DEVICE, heads, self.kv_heads, self.dim, self.dtype, config=config, **options)  # type: ignore[arg-type]

    def attend(
        self,
        chosen: list[int] | None = None,
        window: int | None = None,
        backend: TritonAttention | None = None,
        scales: KVScales | None = None,
    ) -> list[Tensor]:
        """What the chosen sequences give when they are computed together."""
        chosen = list(range(len(self.lengths))) if chosen is None else chosen
        backend = backend or self.backend()
        backend.plan(self.batch(chosen), frozenset({window}))
        q = torch.cat([self.q[i] for i in chosen]).to(DEVICE)
        out = backend.forward(q, self.k_cache, self.v_cache, self.dim**-0.5, window, scales).cpu()
        return list(out.split([self.query_lens[i] for i in chosen]))

    def naive(self, index: int, window: int | None = None, soft_cap: float | None = None) -> Tensor:
        """The definition, in float64."""
        q, k, v = (x[index].double() for x in (self.q, self.k, self.v))
        heads = self.kv_heads * self.per_group
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(self.per_group, 1)) * self.dim**-0.5
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position = torch.arange(len(k) - len(q), len(k))[:, None]
        key = torch.arange(len(k))[None]
        sees = key <= position if window is None else (key <= position) & (key > position - window)
        weights = torch.softmax(scores.masked_fill(~sees, -math.inf), -1)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(self.per_group, 1)).reshape(
            len(q), heads * self.dim
        )


def gpu_config(dim: int, dtype: torch.dtype) -> AttentionConfig:
    """Interpreted: that of 16-bit types on sm_90, whose tiles are the largest."""
    return (
        attention_config(dim, torch.float16, CHIPS["sm_90"])
        if is_interpreted()
        else attention_config(dim, dtype, chip_of(DEVICE))
    )


TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3}


def check(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        tolerance = TOLERANCE[one.dtype]
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


FAMILY = {1: (0, 8), 2: (0, 8), 3: (2, 9), 4: (0, 3), 5: (0, 4), 6: (5, 4)}


def family(**options: object) -> Sequences:
    """A tree of sequences: decodes, chunks and drafts over shared tiles."""
    lengths, query_lens = [200, 150, 170, 161, 90, 65, 100], [1, 1, 20, 3, 40, 1, 5]
    return Sequences(lengths, query_lens, parents=FAMILY, **options)  # type: ignore[arg-type]


# Values


@pytest.mark.parametrize(("block_size", "window"), [(16, None), (16, 1), (16, 40), (32, 8), (64, None), (64, 40)])
def test_mixed_batch_over_pages(block_size: int, window: int | None) -> None:
    lengths = [1, 15, 16, 17, 70, 100, 64]
    cases = Sequences(lengths, [1, 15, 1, 2, 37, 1, 16], block_size, 1, 5)
    check(cases.attend(window=window), [cases.naive(i, window) for i in range(len(lengths))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("dim", "per_group", "kv_heads"), [(64, 1, 3), (80, 3, 1), (128, 4, 2), (256, 2, 1), (96, 7, 1), (64, 16, 1)]
)
def test_every_head_shape_in_the_tiles_of_a_gpu(dim: int, per_group: int, kv_heads: int, dtype: torch.dtype) -> None:
    cases = Sequences([140, 70, 150], [1, 19, 3], 16, kv_heads, per_group, dim, {2: (0, 8)}, dtype=dtype)
    backend = cases.backend(gpu_config(dim, dtype))
    check(cases.attend(backend=backend), [cases.naive(i) for i in range(3)])


@pytest.mark.parametrize("is_invariant", [False, True])
@pytest.mark.parametrize("window", [None, 20, 70])
def test_tree(window: int | None, is_invariant: bool) -> None:
    cases = family()
    found = cases.attend(window=window, backend=cases.backend(is_invariant=is_invariant))
    check(found, [cases.naive(i, window) for i in range(7)])


def test_tree_as_the_reference_does_it() -> None:
    cases = family(dtype=torch.float16)
    reference = ReferenceAttention(torch.device("cpu"))
    reference.plan(cases.batch(list(range(7))), frozenset({None}))
    caches = (cache.cpu().nan_to_num() for cache in (cases.k_cache, cases.v_cache))
    expected = reference.forward(torch.cat(cases.q), *caches, 0.25, None)
    check(cases.attend(), [x.double() for x in expected.split(cases.query_lens)])


def test_soft_cap() -> None:
    cases = family()
    cases.q = [q * 20 for q in cases.q]
    found = cases.attend(window=70, backend=cases.backend(soft_cap=5.0))
    for i, one in enumerate(found):
        torch.testing.assert_close(one.double(), cases.naive(i, 70, 5.0), rtol=2e-5, atol=2e-5)


def test_extreme_scores() -> None:
    """Softmax stays one-hot, no NaN."""
    cases = family()
    cases.q = [q * 1e3 for q in cases.q]
    for i, one in enumerate(cases.attend()):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one.double(), cases.naive(i), rtol=1e-3, atol=1e-3)


def test_queries_within_a_fused_projection() -> None:
    cases = Sequences([40, 20], [1, 3])
    backend = cases.backend()
    backend.plan(cases.batch([0, 1]), frozenset({None}))
    fused = torch.cat((torch.cat(cases.q), torch.full((4, 4, 16), math.nan)), dim=1)
    out = backend.forward(fused.to(DEVICE)[:, :6], cases.k_cache, cases.v_cache, 0.25, None).cpu()
    assert torch.equal(out, torch.cat(cases.attend()))


def to_fp8(cases: Sequences) -> KVScales:
    """Put the caches into fp8, and each sequence's own KV to what that comes to."""
    found = []
    size = cases.block_size
    for name, own in (("k_cache", cases.k), ("v_cache", cases.v)):
        numbers, scales = quantize(getattr(cases, name))
        wide = dequantize(numbers, scales)
        for index, length in enumerate(cases.lengths):
            slots = [int(cases.tables[index, p // size]) * size + p % size for p in range(length)]
            own[index] = wide[slots].cpu()
        setattr(cases, name, numbers)
        found.append(scales.view(-1, size, cases.kv_heads).transpose(1, 2).contiguous())
    return KVScales(*found)


@pytest.mark.parametrize("is_invariant", [False, True])
@pytest.mark.parametrize(
    ("block_size", "window", "soft_cap"), [(16, None, None), (16, 20, None), (32, None, 5.0), (64, 70, 3.0)]
)
def test_fp8_kv(block_size: int, window: int | None, soft_cap: float | None, is_invariant: bool) -> None:
    """Vectors of all magnitudes; partial results are merged; what was never written is NaN."""
    parents = {2: (0, 128 // block_size), 3: (2, 128 // block_size), 4: (0, 64 // block_size)}
    cases = Sequences([200, 150, 170, 161, 90], [1, 1, 20, 3, 40], block_size, parents=parents)
    for own in (cases.k, cases.v):
        for each in own:
            each *= torch.logspace(-1, 1, len(each))[:, None, None]
    scales = to_fp8(cases)
    assert scales.k.isnan().any()
    backend = cases.backend(is_invariant=is_invariant, soft_cap=soft_cap)
    found = cases.attend(window=window, backend=backend, scales=scales)
    for i, one in enumerate(found):
        torch.testing.assert_close(one.double(), cases.naive(i, window, soft_cap), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("dim", "per_group", "kv_heads"), [(64, 3, 3), (80, 1, 1), (128, 4, 2), (256, 2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fp8_kv_in_the_tiles_of_a_gpu(dim: int, per_group: int, kv_heads: int, dtype: torch.dtype) -> None:
    cases = Sequences([140, 70, 150], [1, 19, 3], 16, kv_heads, per_group, dim, {2: (0, 8)}, dtype=dtype)
    scales = to_fp8(cases)
    found = cases.attend(backend=cases.backend(gpu_config(dim, dtype)), scales=scales)
    check(found, [cases.naive(i) for i in range(3)])


def test_fp8_kv_as_the_reference_does_it() -> None:
    cases = family()
    scales = to_fp8(cases)
    reference = ReferenceAttention(torch.device("cpu"))
    reference.plan(cases.batch(list(range(7))), frozenset({None}))
    clean = KVScales(*(each.cpu().nan_to_num() for each in scales))
    caches = (
        dequantize(cache, torch.ones(cache.shape[:2])).nan_to_num().to(FP8)
        for cache in (cases.k_cache.cpu(), cases.v_cache.cpu())
    )
    expected = reference.forward(torch.cat(cases.q), *caches, 0.25, None, clean)
    check(cases.attend(scales=scales), [x.double() for x in expected.split(cases.query_lens)])


def test_a_key_that_is_not_finite_shows_in_those_that_see_it_alone() -> None:
    cases = Sequences([40, 40, 20], [1, 3, 1], parents={1: (0, 2)})
    scales = to_fp8(cases)
    slot = int(cases.tables[0, 1]) * 16 + 3  # of the first two
    for cache, of in zip((cases.k_cache, cases.v_cache), scales, strict=True):
        numbers, bad = quantize(torch.full((2, 16), math.inf))
        cache.view(torch.uint8)[slot] = numbers.view(torch.uint8).to(DEVICE)
        of[slot // 16, :, slot % 16] = bad.to(DEVICE)
    found = cases.attend(scales=scales)
    assert [bool(one.isnan().all()) for one in found] == [True, True, False]
    check(found[2:], [cases.naive(2)])


def test_fp8_is_read_exactly() -> None:
    """Every code as the only value: attention over one key gives it back."""
    values = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    codes = values.nan_to_num(0).view(1, 1, 256).repeat(16, 1, 1).to(FP8)
    scales = KVScales(*(torch.ones(1, 1, 16).to(DEVICE) for _ in range(2)))
    backend = TritonAttention(DEVICE, 1, 1, 256, torch.float32, config=SMALL)
    one = np.array([1], np.int32)
    backend.plan(RaggedBatch(np.zeros((1, 1), np.int32), one - 1, one, 16), frozenset({None}))
    codes = codes.to(DEVICE)
    out = backend.forward(torch.zeros(1, 1, 256).to(DEVICE), codes, codes, 1.0, None, scales)
    assert torch.equal(out[0].cpu(), values.nan_to_num(0))


# Invariance


@pytest.mark.parametrize(("window", "is_fp8"), [(None, False), (30, False), (None, True)])
def test_company_changes_no_bit(window: int | None, is_fp8: bool) -> None:
    """Alone, in another order, with what is shared copied."""
    cases = family(kv_heads=1)
    scales = to_fp8(cases) if is_fp8 else None
    together = cases.attend(None, window, cases.backend(is_invariant=True), scales)
    for i in (0, 2, 6):
        (alone,) = cases.attend([i], window, cases.backend(is_invariant=True), scales)
        assert torch.equal(alone, together[i])
    backwards = cases.attend(list(range(7))[::-1], window, cases.backend(is_invariant=True), scales)
    assert all(torch.equal(a, b) for a, b in zip(backwards[::-1], together, strict=True))
    copied = family(kv_heads=1, shares_blocks=False)
    scales = to_fp8(copied) if is_fp8 else None
    apart = copied.attend(None, window, copied.backend(is_invariant=True), scales)
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))


@pytest.mark.parametrize("size", [1, 7, 29])
def test_chunks_change_no_bit(size: int) -> None:
    """Every query position of a prompt: computed at once, one by one, or in odd chunks."""
    cases = Sequences([40], [40], kv_heads=1, per_group=2)
    whole = cases.attend(backend=cases.backend(is_invariant=True))[0]
    q = cases.q[0]
    for begin in range(0, 40, size):
        end = min(begin + size, 40)
        cases.lengths, cases.query_lens, cases.q = [end], [end - begin], [q[begin:end]]
        assert torch.equal(cases.attend(backend=cases.backend(is_invariant=True))[0], whole[begin:end])


def test_cutting_changes_no_bit() -> None:
    """However few programs a path is cut into."""
    cases = Sequences([300], [1], kv_heads=1, per_group=4)
    results = []
    for num_programs in (0, 1, 5, 100):
        backend = cases.backend(is_invariant=True)
        object.__setattr__(backend.shape, "num_programs", num_programs)
        results += cases.attend(backend=backend)
    assert all(torch.equal(result, results[0]) for result in results)
    check([results[0]], [cases.naive(0)])


# Buffers that stay


def test_static_buffers_give_the_same() -> None:
    """Steps of different size through the same buffers, padded queries behind them."""
    cases = Sequences([200, 150, 170, 33], [1] * 4, parents={1: (0, 8), 2: (0, 8)})
    backend = cases.backend()
    static = backend.static(6, 20, 16)
    for chosen in ([0, 1, 2, 3], [3], [2, 1]):
        static.plan(cases.batch(chosen), frozenset({None}))
        q = torch.cat([cases.q[i] for i in chosen])
        padded = torch.cat((q, torch.zeros((6 - len(chosen), *q.shape[1:]))))
        out = static.forward(padded.to(DEVICE), cases.k_cache, cases.v_cache, 0.25, None).cpu()
        assert torch.equal(out[: len(chosen)], torch.cat(cases.attend(chosen, backend=backend)))


def test_static_buffers_refuse_what_does_not_fit() -> None:
    cases = Sequences([40, 50, 60], [1] * 3)
    backend = cases.backend()
    with pytest.raises(ValueError, match="3 query tokens"):
        backend.static(2, 20, 16).plan(cases.batch([0, 1, 2]), frozenset({None}))
    with pytest.raises(ValueError, match="block_size"):
        backend.static(3, 20, 32).plan(cases.batch([0]), frozenset({None}))
    with pytest.raises(ValueError, match="does not fit"):
        backend.static(3, 2, 16).plan(cases.batch([0]), frozenset({None}))
    assert decode_limits(1, backend.shape).num_partials >= 1


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim"):
        attention_config(264, torch.bfloat16, CHIPS["sm_90"])
    with pytest.raises(ValueError, match="num_heads"):
        TritonAttention(DEVICE, 5, 2, 64, torch.float32)
