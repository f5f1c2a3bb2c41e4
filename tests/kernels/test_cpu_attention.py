"""C++ tree attention for each instruction set, against softmax in float64, and the same bits in any company.

Tolerance: the softmax's weights are rounded to bf16 before they multiply V and before they are summed. With weights
p_i (1 + e_i), |e_i| <= 2^-8, the weighted mean moves by at most 2^-8 times the mean distance of the values from it.
The result is rounded once more. Everything else is fp32.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_calls import HALF_ULP, Kernels, num_threads, pack_kv, randn
from tiny_models import INSTRUCTION_SETS
from torch import Tensor

from batchinfer.attention.tree import RaggedBatch

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ kernels were built")


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(request.param)


class Paged:
    """Sequences in a shuffled cache. `parents` says whose first blocks a sequence shares: child -> (parent, blocks)."""

    def __init__(
        self,
        lengths: list[int],  # KV positions of each sequence, query tokens included
        query_lens: list[int],
        block_size: int = 16,
        *,
        kv_heads: int = 2,
        per_group: int = 3,
        dim: int = 64,
        parents: dict[int, tuple[int, int]] | None = None,
        seed: int = 0,
        spread: float = 1.5,  # of the scores, in powers of two
    ) -> None:
        rng = np.random.default_rng(seed)
        num_blocks = [-(-length // block_size) for length in lengths]
        pool = rng.permutation(sum(num_blocks) + 3).tolist()
        self.tables = np.zeros((len(lengths), max(num_blocks) + 1), np.int32)
        for i, count in enumerate(num_blocks):
            parent, shared = (parents or {}).get(i, (0, 0))
            own = [pool.pop() for _ in range(count - shared)]
            self.tables[i, :count] = [*self.tables[parent, :shared], *own]
        self.block_size, self.lengths, self.query_lens, self.kv_heads = block_size, lengths, query_lens, kv_heads
        shape = ((sum(num_blocks) + 3) * block_size, kv_heads, dim)
        self.k, self.v = randn(*shape, seed=seed), randn(*shape, seed=seed + 1)
        self.q = randn(sum(query_lens), kv_heads * per_group, dim, seed=seed + 2, scale=spread * dim**-0.5)
        self.cache = pack_kv(self.k, self.v, block_size)

    def queries(self, i: int, begin: int = 0, end: int | None = None) -> Tensor:
        first = sum(self.query_lens[:i])
        return self.q[first : first + self.query_lens[i]][begin:end]

    def attend(
        self, kernels: Kernels, chosen: list[tuple[int, int, int]] | list[int] | None = None, window: int | None = None
    ) -> list[Tensor]:
        """Results of sequences, or of (sequence, begin, end): some of its query tokens."""
        parts = [
            part if isinstance(part, tuple) else (part, 0, self.query_lens[part])
            for part in (range(len(self.lengths)) if chosen is None else chosen)
        ]
        rows = [i for i, _, _ in parts]
        starts = [self.lengths[i] - self.query_lens[i] + begin for i, begin, _ in parts]
        lens = [end - begin for _, begin, end in parts]
        ragged = RaggedBatch(self.tables[rows], np.array(starts, np.int32), np.array(lens, np.int32), self.block_size)
        q = torch.cat([self.queries(*part) for part in parts])
        return list(kernels.tree_attention(ragged, q, self.cache, self.kv_heads, window).split(lens))

    def check(self, i: int, found: Tensor, window: int | None = None) -> None:
        """Within the module's tolerance of the float64 twin."""
        positions = np.arange(self.lengths[i])
        slots = self.tables[i][positions // self.block_size] * self.block_size + positions % self.block_size
        k, v = (x[slots].double().permute(1, 2, 0) for x in (self.k, self.v))  # [kv heads, dim, length]
        q = self.queries(i).double()
        num_tokens, num_heads, dim = q.shape
        per_group = num_heads // self.kv_heads
        query = q.view(num_tokens, self.kv_heads, per_group, dim).transpose(0, 1).reshape(self.kv_heads, -1, dim)
        at = torch.arange(self.lengths[i] - num_tokens, self.lengths[i])[:, None]
        keys = torch.arange(self.lengths[i])
        hidden = (keys > at) | ((keys <= at - window) if window else False)
        scores = (query @ k).view(self.kv_heads, num_tokens, per_group, -1)
        scores = scores.masked_fill(hidden[None, :, None], float("-inf"))
        weights = torch.softmax(scores * np.log(2), -1)  # the kernel's exponentials are powers of two
        expected = torch.einsum("ktgl,kdl->ktgd", weights, v)
        distance = torch.empty_like(expected)
        for head in range(self.kv_heads):
            away = (v[head] - expected[head][..., None]).abs()  # [tokens, per group, dim, length]
            distance[head] = torch.einsum("tgl,tgdl->tgd", weights[head], away)
        # Scores, sums and rescaling in fp32: some 1e-6 of the largest value.
        tolerance = 1.02 * HALF_ULP * (distance + expected.abs()) + 1e-5
        expected, tolerance = (x.transpose(0, 1).reshape(num_tokens, -1) for x in (expected, tolerance))
        excess = (found.double() - expected).abs() - tolerance
        assert bool((excess <= 0).all()), f"sequence {i}: worst exceeds its tolerance by {float(excess.max())}"


WINDOWS = [None, 1, 8, 64, 100]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_pages_of_every_size(kernels: Kernels, block_size: int, window: int | None) -> None:
    """Prefill, chunks and decodes together; lengths around tile and block borders."""
    lengths = [1, 63, 64, 65, 130, 200, 300, 17, 129, 128]
    paged = Paged(lengths, [1, 63, 1, 2, 130, 5, 1, 17, 66, 64], block_size)
    for i, found in enumerate(paged.attend(kernels, window=window)):
        paged.check(i, found, window)


@pytest.mark.parametrize("per_group", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("dim", [16, 48, 64, 128, 256])
def test_heads_of_every_shape(kernels: Kernels, dim: int, per_group: int) -> None:
    paged = Paged([70, 33, 150, 150], [3, 33, 1, 9], kv_heads=1 + dim % 3, per_group=per_group, dim=dim)
    together = paged.attend(kernels)
    for i, found in enumerate(together):
        paged.check(i, found)
        assert torch.equal(found, paged.attend(kernels, [i])[0])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("per_group", [1, 3, 8])
def test_units_of_every_length(kernels: Kernels, per_group: int, window: int | None) -> None:
    """A query of 1 to 65 tokens takes the path for single tokens, for carried lanes or for lanes of its own."""
    lens = list(range(1, 66))
    paged = Paged([100 + n for n in lens], lens, 64, per_group=per_group, dim=16)
    together = paged.attend(kernels, window=window)
    for i, found in enumerate(together):
        paged.check(i, found, window)
        assert torch.equal(paged.attend(kernels, [i], window)[0], found), f"{lens[i]} tokens alone"
        for n in {0, lens[i] // 2, lens[i] - 1}:
            assert torch.equal(paged.attend(kernels, [(i, n, n + 1)], window)[0][0], found[n]), f"one of {lens[i]}"


FAMILY = {1: (0, 8), 2: (0, 8), 3: (2, 9), 4: (0, 3), 5: (0, 4), 6: (5, 5), 7: (0, 4), 8: (0, 4), 9: (0, 8)}


def family(per_group: int = 3, dim: int = 64, block_size: int = 16) -> Paged:
    """A tree: decodes and chunks over shared tiles, parting inside a tile and at its border."""
    lengths = [200, 150, 170, 161, 90, 65, 100, 64, 128, 129]
    lens = [1, 1, 20, 3, 40, 1, 1, 1, 2, 1]
    return Paged(lengths, lens, block_size, per_group=per_group, dim=dim, parents=FAMILY, seed=5)


@pytest.mark.parametrize("window", [None, 20, 70])
@pytest.mark.parametrize(("per_group", "dim"), [(1, 64), (3, 64), (4, 128), (7, 48), (8, 16)])
def test_tree_equals_each_sequence_alone(kernels: Kernels, per_group: int, dim: int, window: int | None) -> None:
    paged = family(per_group, dim)
    together = paged.attend(kernels, window=window)
    for i, found in enumerate(together):
        paged.check(i, found, window)
        assert torch.equal(found, paged.attend(kernels, [i], window)[0]), "shared tiles change no bit"
    backwards = paged.attend(kernels, list(range(10))[::-1], window)
    assert all(torch.equal(a, b) for a, b in zip(backwards[::-1], together, strict=True))


@pytest.mark.parametrize("num", [2, 3, 5, 8, 9, 11, 12, 16, 17, 150])
def test_many_rows_over_shared_tiles(kernels: Kernels, num: int) -> None:
    """From tokens by themselves to several pieces of 32 lanes; two levels of sharing."""
    parents = {i: (0, 4) if i % 3 else (0, 8) for i in range(1, num)}
    paged = Paged([140 + i % 30 for i in range(num)], [1] * num, parents=parents, dim=64)
    together = paged.attend(kernels)
    for i in {0, 1, num // 2, num - 1}:
        paged.check(i, together[i])
        assert torch.equal(together[i], paged.attend(kernels, [i])[0])
    some = list(range(num))[::2]
    for i, found in zip(some, paged.attend(kernels, some), strict=True):
        assert torch.equal(found, together[i]), "with half of the company"


@pytest.mark.parametrize("window", [None, 30, 128])
@pytest.mark.parametrize("dim", [64, 80])
def test_chunks_of_a_prompt(kernels: Kernels, dim: int, window: int | None) -> None:
    """Every query position of a prompt: at once, one by one, in odd chunks, and all of these in one batch."""
    paged = Paged([200], [200], 32, dim=dim)
    (whole,) = paged.attend(kernels, window=window)
    paged.check(0, whole, window)
    for size in (1, 2, 5, 8, 9, 64, 100):
        parts = [(0, begin, min(begin + size, 200)) for begin in range(0, 200, size)]
        assert torch.equal(torch.cat(paged.attend(kernels, parts, window)), whole), f"chunks of {size}, in company"
        for part in parts[:: max(1, len(parts) // 4)]:
            assert torch.equal(paged.attend(kernels, [part], window)[0], whole[part[1] : part[2]])


def test_any_number_of_threads(kernels: Kernels) -> None:
    paged = family()
    with num_threads(1):
        expected = paged.attend(kernels)
    for threads in (2, 3, 8):
        with num_threads(threads):
            found = paged.attend(kernels)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("spread", [0.0, 50.0, 5e3])
def test_extreme_scores(kernels: Kernels, spread: float) -> None:
    """All equal; and thousands of powers of two apart: softmax becomes one-hot, no NaN."""
    paged = Paged([100, 64, 200], [4, 1, 90], parents={1: (0, 2)}, spread=spread)
    for i, found in enumerate(paged.attend(kernels)):
        assert found.isfinite().all()
        if spread < 1e3:  # beyond, the twin's own scores differ in the last bits of large numbers
            paged.check(i, found)


def test_masked_keys_may_be_anything(kernels: Kernels) -> None:
    """What lies behind a sequence's end in its last block is stale: keys even NaN, values finite."""
    paged = family()
    expected = paged.attend(kernels)
    for i, length in enumerate(paged.lengths):
        if length % 16 and i not in (0, 2, 5):  # nobody else's
            slots = paged.tables[i, length // 16] * 16 + np.arange(length % 16, 16)
            paged.k[slots] = float("nan")
            paged.v[slots] = 3e38
    paged.cache = pack_kv(paged.k, paged.v, paged.block_size)
    found = paged.attend(kernels)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_query_leaves_its_company_alone(kernels: Kernels, value: float) -> None:
    num = 30
    paged = Paged([100 + i for i in range(num)], [1] * num, parents=dict.fromkeys(range(1, num), (0, 4)))
    good = paged.attend(kernels)
    paged.q[7] = value
    found = paged.attend(kernels)
    assert not found[7].isfinite().any()
    assert all(torch.equal(found[i], good[i]) for i in range(num) if i != 7)
