"""The block pool: ids, owners, and its own check."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.blocks import BlockPool


def test_low_ids_are_taken_first_and_freed_ones_last_in_first_out() -> None:
    pool = BlockPool(5)
    assert pool.take(3) == [0, 1, 2]
    assert (pool.num_free, pool.num_used) == (2, 3)
    pool.release([1])
    assert pool.take(2) == [1, 3]
    assert pool.take(0) == []


def test_a_block_is_free_when_its_last_owner_leaves() -> None:
    pool = BlockPool(2)
    blocks = pool.take(2)
    pool.share(blocks[:1])
    pool.release(blocks)
    assert (pool.num_free, pool.refs.tolist()) == (1, [1, 0])
    pool.release(blocks[:1])
    assert pool.num_free == 2


def test_misuse_is_an_assertion() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="count=3"):
        pool.take(3)
    pool.take(1)
    with pytest.raises(AssertionError, match="is free"):
        pool.share([1])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([0, 0])


def test_check_integrity_sees_leaks_lost_owners_and_double_frees() -> None:
    pool = BlockPool(3)
    blocks = pool.take(2)
    pool.check_integrity([blocks])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([blocks, [0]])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([[0]])
    pool._free.append(0)
    with pytest.raises(AssertionError, match="neither free nor held"):
        pool.check_integrity([blocks])
    pool._free[-1] = 2
    with pytest.raises(AssertionError, match="free twice"):
        pool.check_integrity([blocks])


@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 12))))
def test_any_history_keeps_counts_and_free_list_together(num_blocks: int, moves: list[tuple[str, int]]) -> None:
    pool, owners = BlockPool(num_blocks), []
    for move, number in moves:
        if move == "take" and number <= pool.num_free:
            owners.append(pool.take(number))
        elif move == "share" and owners:
            owners.append(list(owners[number % len(owners)]))
            pool.share(owners[-1])
        elif move == "release" and owners:
            pool.release(owners.pop(number % len(owners)))
        pool.check_integrity(owners)
    for blocks in owners:
        pool.release(blocks)
    assert pool.num_free == num_blocks
    assert sorted(pool.take(num_blocks)) == list(range(num_blocks))
