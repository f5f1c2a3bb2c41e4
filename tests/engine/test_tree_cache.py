"""The tree cache on hand-made trees: what is matched, published, dropped and evicted."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import FakeTokenizer

from batchinfer.engine.blocks import BlockPool
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.tree_cache import SharedNode, TreeCache
from batchinfer.engine.window import WindowPlanner
from batchinfer.types import Prompt, SamplingParams, TokenScores

BLOCK = 4
STEM = [1, 2, 3, 4, 5, 6]


class Cache:
    """A cache over prompts, and the moves of the scheduler, sequence by sequence."""

    def __init__(self, prompts: list[list[int]], num_blocks: int = 20, prompt_logprobs: bool = False) -> None:
        params = SamplingParams(temperature=1.0, prompt_logprobs=prompt_logprobs)
        rows = [Prompt(i, np.array(ids, np.int32), params, key=i) for i, ids in enumerate(prompts)]
        plan = WindowPlanner(FakeTokenizer(), 1000, "fcfs", prefix_sharing=True).plan(rows)
        self.seqs = plan.sequences
        self.pool = BlockPool(num_blocks)
        self.cache = TreeCache(self.pool, BLOCK, plan.nodes)

    def node(self, *ids: int) -> SharedNode:
        """The node whose path spells `ids`."""
        for seq in self.seqs:
            for index in seq.path:
                node = self.cache.nodes[index]
                if seq.prompt.token_ids[: node.end].tolist() == list(ids):
                    return node
        raise AssertionError(f"no node at {ids}")

    def admit(self, row: int) -> int | None:
        """Admit and give blocks for the whole prompt; the block to copy from."""
        seq = self.seqs[row]
        match = self.cache.match(seq)
        assert match.blocked_on is None
        shared, remainder = self.cache.admit(seq, match)
        seq.blocks = shared + self.pool.take(-(-seq.num_prompt // BLOCK) - len(shared))
        seq.num_computed = match.num_cached
        return remainder

    def compute(self, row: int, end: int | None = None) -> list[Sequence]:
        seq = self.seqs[row]
        seq.num_computed = seq.num_prompt if end is None else end
        return self.cache.on_computed(seq)

    def stop(self, row: int, *, will_return: bool = False) -> list[Sequence]:
        seq = self.seqs[row]
        self.pool.release(seq.blocks)
        seq.blocks, seq.num_computed = [], 0
        return self.cache.on_stopped(seq, will_return=will_return)

    def run(self, row: int) -> None:
        self.admit(row)
        self.compute(row)
        self.stop(row)


def test_only_nodes_of_two_sequences_are_shared() -> None:
    cache = Cache([[*STEM, 7], [*STEM, 8, 8, 1], [*STEM, 8, 8, 2], [9]])
    spans = [[(cache.cache.nodes[i].start, cache.cache.nodes[i].end) for i in seq.path] for seq in cache.seqs]
    assert spans == [[(0, 6)], [(0, 6), (6, 8)], [(0, 6), (6, 8)], []]
    stem = cache.node(*STEM)
    assert (stem.parent, stem.num_pending, stem.uses.tolist(), stem.depth) == (0, 3, [0, 1, 2], 1)
    assert cache.node(*STEM, 8, 8).parent == stem.index


def test_a_sequence_waits_only_for_a_node_that_is_being_computed() -> None:
    cache = Cache([[*STEM, 7], [*STEM, 8]])
    assert cache.cache.match(cache.seqs[1])[:2] == (0, [])
    cache.admit(0)
    stem = cache.node(*STEM)
    assert stem.computing is cache.seqs[0]
    assert cache.cache.match(cache.seqs[1]).blocked_on is stem
    assert cache.compute(0, end=5) == []
    assert stem.blocks is None
    stem.waiters.append(cache.seqs[1])
    assert cache.compute(0, end=6) == [cache.seqs[1]]
    assert stem.blocks == [0, 1]
    assert cache.cache.match(cache.seqs[1]).num_cached == 6


def test_the_last_row_takes_the_node_along() -> None:
    cache = Cache([[*STEM, 7], [*STEM, 8]])
    cache.run(0)
    assert cache.pool.refs[:3].tolist() == [1, 1, 0]
    assert cache.admit(1) == 1, "the half-filled block, free by now, is copied from before it is used again"
    assert cache.node(*STEM).blocks is None
    assert cache.pool.refs[0] == 1
    assert cache.seqs[1].blocks[0] == 0


def test_nothing_is_published_for_nobody() -> None:
    cache = Cache([[*STEM, 7], [*STEM, 8]])
    cache.admit(0)
    cache.stop(0)
    cache.admit(1)
    assert cache.node(*STEM).computing is None, "no third row would use it"
    cache.compute(1)
    assert cache.cache.held() == []


def test_a_preempted_sequence_counts_as_waiting_again() -> None:
    cache = Cache([[*STEM, 7], [*STEM, 8]])
    cache.admit(0)
    cache.node(*STEM).waiters.append(cache.seqs[1])
    assert cache.stop(0, will_return=True) == [cache.seqs[1]]
    stem = cache.node(*STEM)
    assert (stem.num_pending, stem.computing, stem.waiters) == (2, None, [])
    cache.run(1)
    assert stem.blocks is not None, "the first row still wants it"


def test_tables_lie_child_over_parent() -> None:
    cache = Cache([[*STEM, 7], [*STEM, 8, 8, 8, 1], [*STEM, 8, 8, 8, 2], [*STEM, 9]])
    cache.run(0)
    cache.admit(1)
    cache.compute(1)
    child = cache.node(*STEM, 8, 8, 8)
    assert child.blocks == cache.seqs[1].blocks[1:3]
    remainder = cache.admit(2)
    assert cache.seqs[2].blocks[:2] == [0, cache.seqs[1].blocks[1]]
    assert remainder == cache.seqs[1].blocks[2]


def test_eviction_goes_by_the_furthest_next_use_and_takes_descendants_along() -> None:
    deep = [5] * 4
    prompts = [[*deep, 6, 1], [*deep, 6, 2], [7] * 5, [8] * 5, [8] * 4 + [1], [7] * 4 + [1], [*deep, 6, 3], [*deep, 9]]
    cache = Cache(prompts)
    for row in (0, 1, 2, 3):
        cache.run(row)
    held = [cache.node(*deep), cache.node(*deep, 6), cache.node(*[7] * 4), cache.node(*[8] * 4)]
    assert [node.blocks is not None for node in held] == [True] * 4
    # Next uses from place 4 on: 8s at 4, 7s at 5, both of the deep ones at 6.
    cache.cache.evict(1, now=4)
    assert [node.blocks is not None for node in held] == [True, False, True, True], "of equal next use, the deeper"
    cache.cache.evict(1, now=4)
    assert [node.blocks is not None for node in held] == [False, False, True, True]
    cache.cache.evict(1, now=4, keep=[held[2].index])
    assert [node.blocks is not None for node in held] == [False, False, True, False]
    cache.cache.evict(1, now=4)
    assert cache.pool.num_used == 0


def test_eviction_of_a_parent_takes_its_children() -> None:
    deep = [5] * 4
    cache = Cache([[*deep, 6, 6, 6, 6, 1], [*deep, 6, 6, 6, 6, 2], [*deep, 9]])
    cache.run(0)
    parent, child = cache.node(*deep), cache.node(*deep, 6, 6, 6, 6)
    # At place 2 only the parent is needed; the child is furthest. Kept out, the parent goes and takes it along.
    cache.cache.evict(1, now=0, keep=[child.index])
    assert (parent.blocks, child.blocks) == (None, None)
    assert cache.pool.num_used == 0


def test_eviction_spares_what_frees_nothing() -> None:
    cache = Cache([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]])
    cache.admit(0)
    cache.compute(0)
    cache.cache.evict(5, now=0)
    assert cache.node(1, 2, 3, 4).blocks == [0], "the running row holds the block anyway"
    cache.stop(0)
    cache.cache.evict(5, now=0)
    assert cache.pool.num_used == 0


def test_parent_and_child_in_one_block_can_be_evicted() -> None:
    cache = Cache([[1, 2, 5], [1, 2, 6], [1, 3]])
    cache.run(0)
    assert len(cache.cache.held()) == 2
    assert cache.pool.num_used == 1
    cache.cache.evict(1, now=0)
    assert cache.pool.num_used == 0


def test_a_child_computed_under_an_evicted_parent_is_not_published() -> None:
    cache = Cache([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 6, 6, 6, 1], [1, 2, 3, 4, 6, 6, 6, 6, 2], [1, 2, 3, 4, 7]])
    cache.run(0)
    cache.admit(1)
    cache.cache._drop(cache.node(1, 2, 3, 4))
    cache.compute(1)
    assert cache.cache.held() == []
    cache.stop(1)
    cache.admit(2)
    assert cache.node(1, 2, 3, 4).computing is cache.seqs[2], "the next one computes both"


def test_a_node_keeps_prompt_logprobs_while_somebody_wants_them() -> None:
    cache = Cache([[*STEM, 7], [*STEM, 8]], prompt_logprobs=True)
    cache.admit(0)
    scores = cache.seqs[0].scores = TokenScores.empty(8)
    scores.logprobs[:] = np.arange(8)
    cache.compute(0)
    (span,) = cache.cache.match(cache.seqs[1]).spans
    assert span.scores is not None
    assert span.scores.logprobs.tolist() == [0, 1, 2, 3, 4, 5]
    cache.stop(0)
    cache.admit(1)
    assert cache.node(*STEM).scores is None
    assert span.scores is not None, "the row still has what it matched"


def test_check_integrity_sees_a_node_kept_for_nobody() -> None:
    cache = Cache([[*STEM, 7], [*STEM, 8]])
    cache.run(0)
    stem = cache.node(*STEM)
    cache.cache.check_integrity({stem.index: 1})
    with pytest.raises(AssertionError, match="num_pending"):
        cache.cache.check_integrity({})
    stem.num_pending = 0
    with pytest.raises(AssertionError, match="kept for nobody"):
        cache.cache.check_integrity({})


def test_what_a_row_with_nan_computed_is_not_shared() -> None:
    cache = Cache([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]])
    cache.admit(0)
    cache.seqs[0].is_finite = False
    cache.compute(0)
    assert cache.cache.held() == []


def test_nan_behind_the_end_of_a_node_is_not_copied() -> None:
    """Two nodes are shared already when the row that computed them meets NaN in the tail block of the second."""
    cache = Cache([[1, 2, 3, 4, 5, 5, 7, 7, 7], [1, 2, 3, 4, 5, 5, 8], [1, 2, 3, 4, 9]])
    cache.admit(0)
    cache.compute(0, end=6)
    whole, tail = cache.node(1, 2, 3, 4), cache.node(1, 2, 3, 4, 5, 5)
    assert (whole.blocks, tail.blocks) == ([0], [1])
    cache.seqs[0].is_finite = False
    cache.compute(0)
    assert (whole.blocks, tail.blocks) == ([0], None)
