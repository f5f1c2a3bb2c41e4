"""Each op against a naive twin in float64, on odd shapes; and the invariance that the module promises."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from batchinfer.attention.backend import ReferenceAttention
from batchinfer.attention.tree import RaggedBatch
from batchinfer.kernels import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Relative to values of about 1: fp32 sums of a few hundred terms; half a unit in the last place of 16-bit results.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# Values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("shape", [(1, 8), (3, 5, 17), (7, 576)])
def test_rms_norm(shape: tuple[int, ...], with_residual: bool, dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), 1 + randn(shape[-1], seed=1, dtype=dtype) / 4
    residual = randn(*shape, seed=2, dtype=dtype) if with_residual else None
    normed, total = reference.rms_norm(x, weight, 1e-5, residual)
    expected_total = x if residual is None else x + residual
    assert torch.equal(total, expected_total)
    wide = expected_total.double()
    expected = weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_rms_norm_rounds_before_the_weight() -> None:
    """As transformers: weight * (x * scale).to(bfloat16). Another order gives other bits."""
    x, weight = randn(50, 64, dtype=torch.bfloat16), 1 + randn(64, seed=1, dtype=torch.bfloat16) / 4
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(reference.rms_norm(x, weight, 1e-6)[0], weight * scaled.to(torch.bfloat16))
    assert not torch.equal(reference.rms_norm(x, weight, 1e-6)[0], (weight * scaled).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 33, 1536])
def test_silu_and_mul(size: int, dtype: torch.dtype) -> None:
    x = randn(5, 2 * size, dtype=dtype) * 4
    x[0, 0], x[1, 0] = -60.0, 60.0
    gate, up = x[:, :size].double(), x[:, size:].double()
    found = reference.silu_and_mul(x)
    assert found.dtype == dtype
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "dim"), [(8, 8), (80, 80), (64, 16), (6, 2)])
def test_rope_turns_pairs_of_channels(head_dim: int, dim: int, dtype: torch.dtype) -> None:
    x = randn(5, 3, head_dim, dtype=dtype)
    angles = randn(5, dim // 2, seed=1) * 3
    found = reference.rope(x, angles.cos(), angles.sin())
    expected = x.double().clone()
    for token in range(5):
        for pair in range(dim // 2):
            angle = float(angles[token, pair])
            a, b = x[token, :, pair].double(), x[token, :, pair + dim // 2].double()
            expected[token, :, pair] = a * math.cos(angle) - b * math.sin(angle)
            expected[token, :, pair + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(found[..., dim:], x[..., dim:]), "channels from dim on pass unchanged"


def test_rope_and_store_kv_writes_its_slots_and_no_other() -> None:
    q, k, v = randn(4, 6, 8), randn(4, 2, 8, seed=1), randn(4, 2, 8, seed=2)
    angles = randn(4, 4, seed=3)
    k_cache, v_cache = randn(40, 2, 8, seed=4), randn(40, 2, 8, seed=5)
    old_k, old_v = k_cache.clone(), v_cache.clone()
    slots = torch.tensor([33, 2, 0, 39])
    out = reference.rope_and_store_kv(q, k, v, angles.cos(), angles.sin(), slots, k_cache, v_cache)
    assert torch.equal(out, reference.rope(q, angles.cos(), angles.sin()))
    old_k[slots], old_v[slots] = reference.rope(k, angles.cos(), angles.sin()), v
    assert torch.equal(k_cache, old_k)
    assert torch.equal(v_cache, old_v)


def test_copy_kv_reads_all_sources_first() -> None:
    k_cache, v_cache = randn(3, 5 * 16, 2, 4), randn(3, 5 * 16, 2, 4, seed=1)
    old = [cache.clone().view(3, 5, 16, 2, 4) for cache in (k_cache, v_cache)]
    reference.copy_kv(k_cache, v_cache, torch.tensor([0, 1, 4]), torch.tensor([1, 2, 0]), 16)
    for cache, before in zip((k_cache, v_cache), old, strict=True):
        assert torch.equal(cache.view(3, 5, 16, 2, 4), before[:, [4, 0, 1, 3, 4]])


# Attention


class Paged:
    """Sequences with KV of their own in a shuffled cache; `parents` says whose blocks a sequence goes on from."""

    def __init__(
        self,
        lengths: list[int],  # KV positions of each sequence, query tokens included
        query_lens: list[int],
        block_size: int,
        kv_heads: int = 2,
        per_group: int = 3,
        dim: int = 16,
        parents: dict[int, tuple[int, int]] | None = None,  # sequence -> (parent, shared whole blocks)
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        num_blocks = [-(-length // block_size) for length in lengths]
        pool = rng.permutation(sum(num_blocks) + 3).tolist()
        self.tables = np.zeros((len(lengths), max(num_blocks) + 1), np.int32)
        for i, count in enumerate(num_blocks):
            parent, shared = (parents or {}).get(i, (0, 0))
            own = [pool.pop() for _ in range(count - shared)]
            self.tables[i, :count] = [*self.tables[parent, :shared], *own]
        self.block_size, self.lengths, self.query_lens = block_size, lengths, query_lens
        shape = ((sum(num_blocks) + 3) * block_size, kv_heads, dim)
        self.k, self.v = randn(*shape, seed=seed, dtype=dtype), randn(*shape, seed=seed + 1, dtype=dtype)
        self.q = randn(sum(query_lens), kv_heads * per_group, dim, seed=seed + 2, dtype=dtype)
        self.scale = dim**-0.5

    def ragged(self, chosen: list[int]) -> RaggedBatch:
        starts = [self.lengths[i] - self.query_lens[i] for i in chosen]
        return RaggedBatch(
            self.tables[chosen],
            np.array(starts, np.int32),
            np.array([self.query_lens[i] for i in chosen], np.int32),
            self.block_size,
        )

    def queries(self, i: int) -> Tensor:
        begin = sum(self.query_lens[:i])
        return self.q[begin : begin + self.query_lens[i]]

    def attend(self, chosen: list[int] | None = None, window: int | None = None) -> list[Tensor]:
        """The op under test: the result of each chosen sequence."""
        chosen = list(range(len(self.lengths))) if chosen is None else chosen
        attention = ReferenceAttention(torch.device("cpu"))
        attention.plan(self.ragged(chosen), frozenset({window}))
        q = torch.cat([self.queries(i) for i in chosen])
        out = attention.forward(q, self.k, self.v, self.scale, window)
        return list(out.split([self.query_lens[i] for i in chosen]))

    def naive(self, i: int, window: int | None = None) -> Tensor:
        """float64, one query token and one head at a time."""
        positions = np.arange(self.lengths[i])
        slots = self.tables[i][positions // self.block_size] * self.block_size + positions % self.block_size
        k, v = self.k[slots].double(), self.v[slots].double()
        q = self.queries(i).double()
        out = torch.empty_like(q)
        start = self.lengths[i] - self.query_lens[i]
        per_group = q.shape[1] // k.shape[1]
        for token in range(len(q)):
            position = start + token
            low = 0 if window is None else max(0, position - window + 1)
            for head in range(q.shape[1]):
                kv_head = head // per_group
                scores = k[low : position + 1, kv_head] @ q[token, head] * self.scale
                out[token, head] = torch.softmax(scores, 0) @ v[low : position + 1, kv_head]
        return out.flatten(1)


@pytest.mark.parametrize("window", [None, 1, 8, 64, 100])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_attention_over_pages(block_size: int, window: int | None) -> None:
    """Prefill, chunks, decode; lengths around tile and block borders; items of every width."""
    lengths = [1, 63, 64, 65, 130, 200, 300, 17, 129, 128]
    query_lens = [1, 63, 1, 2, 130, 5, 1, 17, 66, 64]
    paged = Paged(lengths, query_lens, block_size)
    for i, found in enumerate(paged.attend(window=window)):
        torch.testing.assert_close(found.double(), paged.naive(i, window), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dim", [8, 24, 64, 128])
@pytest.mark.parametrize("per_group", [1, 2, 5, 7])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_attention_of_every_head_shape(dim: int, per_group: int, kv_heads: int) -> None:
    paged = Paged([70, 33, 150], [3, 33, 1], 16, kv_heads, per_group, dim)
    for i, found in enumerate(paged.attend()):
        torch.testing.assert_close(found.double(), paged.naive(i), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_16_bits_rounds_at_the_end_only(dtype: torch.dtype) -> None:
    paged = Paged([70, 33, 400], [3, 33, 1], 32, dtype=dtype)
    for i, found in enumerate(paged.attend()):
        assert found.dtype == dtype
        expected = paged.naive(i).to(dtype)
        # The sums are fp32: at most the last bit differs, where the exact value lies between two.
        assert float((found.double() - expected.double()).abs().max()) <= float(torch.finfo(dtype).eps)
        assert float((found == expected).double().mean()) > 0.99


FAMILY_PARENTS = {1: (0, 8), 2: (0, 8), 3: (2, 9), 4: (0, 3), 5: (0, 4), 6: (5, 5)}


def family(block_size: int = 16) -> Paged:
    """A tree of sequences: decodes and chunks over shared tiles, parting inside a tile and at its border."""
    return Paged([200, 150, 170, 161, 90, 65, 100], [1, 1, 20, 3, 40, 1, 1], block_size, parents=FAMILY_PARENTS, seed=5)


@pytest.mark.parametrize("window", [None, 20, 70])
def test_attention_over_a_tree(window: int | None) -> None:
    paged = family()
    together = paged.attend(window=window)
    for i, found in enumerate(together):
        torch.testing.assert_close(found.double(), paged.naive(i, window), rtol=2e-6, atol=2e-6)
        (alone,) = paged.attend([i], window)
        assert torch.equal(found, alone), "shared tiles change no bit"
    backwards = paged.attend(list(range(7))[::-1], window)
    assert all(torch.equal(a, b) for a, b in zip(backwards, together[::-1], strict=True))


def test_many_rows_over_one_tile() -> None:
    """More rows than the widest item holds; each equals its lone run."""
    num = 150
    paged = Paged([70 + i % 30 for i in range(num)], [1] * num, 64, parents=dict.fromkeys(range(1, num), (0, 1)))
    together = paged.attend()
    for i in (0, 1, 63, 64, 65, 127, 128, 149):
        torch.testing.assert_close(together[i].double(), paged.naive(i), rtol=2e-6, atol=2e-6)
        assert torch.equal(together[i], paged.attend([i])[0])


def test_attention_of_extreme_scores() -> None:
    """Scores of +-1000 and far below the start value's exponent range: softmax stays one-hot, no NaN."""
    paged = Paged([100, 64], [4, 1], 16)
    paged.q *= 1e3
    for i, found in enumerate(paged.attend()):
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found.double(), paged.naive(i), rtol=1e-3, atol=1e-3)


def test_bits_of_attention_do_not_depend_on_chunks() -> None:
    """Every query position of a prompt: computed at once, one by one, or in odd chunks."""
    paged = Paged([150], [150], 16)
    (whole,) = paged.attend()
    for size in (1, 7, 64, 100):
        for begin in range(0, 150, size):
            end = min(begin + size, 150)
            part = Paged([150], [150], 16)
            part.lengths, part.query_lens, part.q = [end], [end - begin], paged.q[begin:end]
            assert torch.equal(part.attend()[0], whole[begin:end])


# The head


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_logits_are_not_rounded(dtype: torch.dtype) -> None:
    hidden, head = randn(16, 48, dtype=dtype), randn(reference.HEAD_TILE + 5, 48, seed=1, dtype=dtype)
    found = reference.head_logits(hidden, head)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), hidden.double() @ head.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("max_logits", [1, 100 * 40, 1 << 24])
@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 50])
def test_linear_logprobs(num_rows: int, max_logits: int) -> None:
    hidden, head = randn(num_rows, 24), randn(100, 24, seed=1)
    targets = torch.arange(num_rows) * 7 % 100
    found = reference.linear_logprobs(hidden, head, targets, max_logits)
    logprobs = torch.log_softmax(hidden.double() @ head.double().T, -1)
    torch.testing.assert_close(found.logprob.double(), logprobs.gather(1, targets[:, None])[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropy.double(), -(logprobs.exp() * logprobs).sum(-1), rtol=0, atol=1e-5)
    assert torch.equal(found.argmax, logprobs.argmax(-1))


def test_entropy_of_a_certain_row_is_zero() -> None:
    hidden, head = torch.ones(1, 1), torch.tensor([[1e4], [-1e4], [0.0]])
    found = reference.linear_logprobs(hidden, head, torch.tensor([0]))
    assert (float(found.logprob), float(found.entropy), int(found.argmax)) == (0.0, 0.0, 0)


# Invariance: what the module's docstring states of torch on this CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size_in", "size_out"), [(576, 960), (576, 576), (1536, 576), (48, 272), (576, 3072)])
def test_rows_of_a_product_are_the_same_bits_in_any_company(
    size_in: int, size_out: int, dtype: torch.dtype, threads: int
) -> None:
    x, weight = randn(256, size_in, dtype=dtype), randn(size_out, size_in, seed=1, dtype=dtype)
    torch.set_num_threads(1)
    whole = reference.linear(x, weight)
    torch.set_num_threads(threads)
    assert torch.equal(reference.linear(x, weight), whole)
    for num_rows in (16, 32, 48, 112, 240):
        assert torch.equal(reference.linear(x[:num_rows], weight), whole[:num_rows]), f"{num_rows} rows"
        assert torch.equal(reference.linear(x[-num_rows:], weight), whole[-num_rows:]), f"last {num_rows} rows"


@pytest.mark.parametrize("vocab_size", [1000, 49152])
def test_rows_of_the_head_and_of_log_softmax_are_the_same_bits_in_any_company(vocab_size: int, threads: int) -> None:
    hidden, head = randn(48, 64), randn(vocab_size, 64, seed=1)
    torch.set_num_threads(1)
    whole = reference.head_logits(hidden, head)
    logprobs = torch.log_softmax(whole, -1)
    scored = reference.linear_logprobs(hidden, head, torch.arange(48))
    torch.set_num_threads(threads)
    for begin in range(0, 48, 16):
        assert torch.equal(reference.head_logits(hidden[begin : begin + 16], head), whole[begin : begin + 16])
    for row in (0, 17, 47):
        assert torch.equal(torch.log_softmax(whole[row : row + 1], -1)[0], logprobs[row])
        alone = reference.linear_logprobs(hidden[row : row + 1], head, torch.tensor([row]))
        assert [float(x) for x in alone] == [float(x[row]) for x in scored]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elementwise_ops_and_norms_are_the_same_bits_in_any_company(dtype: torch.dtype, threads: int) -> None:
    """Odd sizes: an element lies in the vector body in one call and in the scalar tail in another."""
    for size in (5, 33, 577):
        x, weight = randn(37, 2 * size, dtype=dtype), randn(2 * size, seed=1, dtype=dtype)
        angles = randn(37, size, seed=2)
        cos, sin = angles.cos(), angles.sin()
        ops = (
            reference.silu_and_mul,
            lambda x, weight=weight: reference.rms_norm(x, weight, 1e-5)[0],
            lambda x, cos=cos, sin=sin: reference.rope(x[:, None], cos[: len(x)], sin[: len(x)])[:, 0],
        )
        for op in ops:
            whole = op(x)
            for num_rows in (1, 2, 3, 16, 36):
                assert torch.equal(op(x[:num_rows]), whole[:num_rows])
        for row in range(37):
            assert torch.equal(reference.silu_and_mul(x[row : row + 1])[0], reference.silu_and_mul(x)[row])
            assert torch.equal(
                reference.rms_norm(x[row : row + 1], weight, 1e-5)[0][0], reference.rms_norm(x, weight, 1e-5)[0][row]
            )


def test_batched_products_are_the_same_bits_from_four_rows_on(threads: int) -> None:
    """What attention relies on: any batch, any multiple of four rows, any place."""
    for dim in (8, 16, 64, 128):
        q, tile = randn(40, 64, dim), randn(40, dim, 64, seed=1)
        torch.set_num_threads(1)
        whole = torch.bmm(q, tile)
        torch.set_num_threads(threads)
        for num_rows in (4, 8, 12, 28, 60):
            for begin in (0, 4):
                part = torch.bmm(q[:, begin : begin + num_rows].contiguous(), tile)
                assert torch.equal(part, whole[:, begin : begin + num_rows])
        for item in (0, 7, 39):
            assert torch.equal(torch.bmm(q[item : item + 1], tile[item : item + 1])[0], whole[item])


def test_attention_is_the_same_bits_with_any_number_of_threads(threads: int) -> None:
    paged = family()
    found = paged.attend()
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(found, paged.attend(), strict=True))
