"""Work items over the prefix tree: each key of each query token once, shared tiles together, in room that is given."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.attention.tree import RaggedBatch
from batchinfer.kernels.triton.plan import IS_DIRECT, IS_WIDE, ITEM_FIELDS, ItemShape, PlanLimits, TreePlan, plan_tree

SHAPE = ItemShape(tile=16, narrow=8, wide=16, per_group=3, num_programs=4)


def make_batch(
    lengths: list[int], query_lens: list[int], parents: list[tuple[int, int] | None], block_size: int
) -> RaggedBatch:
    """Sequences whose first whole blocks may be those of an earlier one. Rest of the table: anything."""
    starts = np.array(lengths, np.int32) - np.array(query_lens, np.int32)
    width = -(-max(lengths) // block_size)
    tables = np.full((len(lengths), width + 2), 7, np.int32)
    fresh = 10
    for index, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
        num_blocks, shared = -(-length // block_size), 0
        if parent is not None:
            # Blocks with query tokens are a sequence's own.
            most = min(starts[index], starts[parent[0]]) // block_size
            shared = min(parent[1], int(most))
            tables[index, :shared] = tables[parent[0], :shared]
        tables[index, shared:num_blocks] = np.arange(fresh, fresh + num_blocks - shared)
        fresh += num_blocks - shared
    return RaggedBatch(tables, starts, np.array(query_lens, np.int32), block_size)


@st.composite
def batches(draw: st.DrawFn) -> RaggedBatch:
    block_size = draw(st.sampled_from([16, 32, 8]))
    num_seqs = draw(st.integers(1, 7))
    lengths = draw(st.lists(st.integers(1, 150), min_size=num_seqs, max_size=num_seqs))
    query_lens = [draw(st.sampled_from([1, 1, min(3, length), length])) for length in lengths]
    parents = [
        draw(st.none() | st.tuples(st.integers(0, index - 1), st.integers(1, 10))) if index else None
        for index in range(num_seqs)
    ]
    return make_batch(lengths, query_lens, parents, block_size)


def check(plan: TreePlan, batch: RaggedBatch, shape: ItemShape, window: int | None) -> None:
    """Plays the plan."""
    sequence = np.repeat(np.arange(len(batch.query_lens)), batch.query_lens)
    within = np.concatenate([np.arange(n) for n in batch.query_lens])
    positions = batch.query_starts[sequence] + within
    assert np.array_equal(plan.positions, positions)

    def slot_of(seq: int, key: int) -> tuple[int, int]:
        return int(batch.block_tables[seq, key // batch.block_size]), key % batch.block_size

    partials: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # (token, head) -> (where, tile)
    for row in plan.items.tolist():
        item = dict(zip(ITEM_FIELDS, row, strict=True))
        width = shape.wide if item["flags"] & IS_WIDE else shape.narrow
        assert item["num_tiles"] > 0
        lanes = range(item["lane_begin"], min(item["lane_begin"] + width, item["num_lanes"]))
        assert lanes
        tiles = range(item["first_tile"], item["first_tile"] + item["num_tiles"])
        for lane in lanes:
            token = int(plan.rows[item["rows_begin"] + lane // shape.per_group])
            assert item["min_position"] <= positions[token] <= item["max_position"]
            for key in range(tiles.start * shape.tile, min(tiles.stop * shape.tile, int(positions[token]) + 1)):
                assert slot_of(item["sequence"], key) == slot_of(int(sequence[token]), key)
            where = -1 if item["flags"] & IS_DIRECT else int(plan.slots[token]) + item["partial"]
            partials[token, lane % shape.per_group] += [(where, tile) for tile in tiles]

    assert len(partials) == batch.num_tokens * shape.per_group
    merges = {token: (base, count) for token, base, count in plan.merges.tolist()}
    assert len(merges) == len(plan.merges)
    used: list[int] = []
    for (token, lane), met in partials.items():
        low = 0 if window is None else max(0, int(positions[token]) - window + 1) // shape.tile
        tiles_met = [tile for _, tile in sorted(met)]
        assert tiles_met == sorted(set(tiles_met)), "each tile once, partial results in order of position"
        assert tiles_met == list(range(tiles_met[0], int(positions[token]) // shape.tile + 1)), "no tile left out"
        assert tiles_met[0] <= low
        where = sorted({place for place, _ in met})
        if token in merges:
            base, count = merges[token]
            assert where == list(range(base, base + count))
        else:
            assert where == [-1]
        if lane == 0 and token in merges:
            used += where
        if shape.is_invariant:
            of_first = [tile for place, tile in met if place == where[0]]
            assert len(met) - len(of_first) == len(where) - 1, "behind the first partial result, each is one tile"
    assert sorted(used) == list(range(plan.num_partials))


@settings(max_examples=150, deadline=None)
@given(
    batches(),
    st.sampled_from([None, 1, 20, 64]),
    st.booleans(),
    st.sampled_from([0, 1, 4, 1000]),
    st.sampled_from([16, 32]),
)
def test_each_key_of_each_token_once(
    batch: RaggedBatch, window: int | None, is_invariant: bool, num_programs: int, tile: int
) -> None:
    shape = replace(SHAPE, is_invariant=is_invariant, num_programs=num_programs, tile=tile)
    check(plan_tree(batch, shape, window), batch, shape, window)


@settings(max_examples=60, deadline=None)
@given(batches(), st.booleans())
def test_a_plan_keeps_to_its_room(batch: RaggedBatch, is_invariant: bool) -> None:
    """Without partial results and with one row for each token there is nothing to share or cut, and it still fits."""
    shape = replace(SHAPE, is_invariant=is_invariant)
    tokens = batch.num_tokens
    limits = PlanLimits(1000, tokens, tokens, 0, 0)
    plan = plan_tree(batch, shape, limits=limits)
    assert plan.fits(limits)
    check(plan, batch, shape, None)
    with pytest.raises(ValueError, match="needs"):
        plan_tree(batch, shape, limits=replace(limits, num_rows=tokens - 1))


@pytest.mark.parametrize("is_invariant", [False, True])
def test_shared_tiles_are_read_once_for_all_below(is_invariant: bool) -> None:
    """40 rows below 20 shared tiles, 10 of them below 10 more: as many reads as full items need."""
    num, size = 40, 16
    parents = [None] + [(0, 30 if index < 10 else 20) for index in range(1, num)]
    batch = make_batch([30 * size + 20 + index for index in range(num)], [1] * num, parents, size)
    shape = replace(SHAPE, num_programs=0, is_invariant=is_invariant)
    plan = plan_tree(batch, shape)
    check(plan, batch, shape, None)
    reads: dict[int, int] = defaultdict(int)
    for row in plan.items.tolist():
        item = dict(zip(ITEM_FIELDS, row, strict=True))
        for tile in range(item["first_tile"], item["first_tile"] + item["num_tiles"]):
            reads[int(batch.block_tables[item["sequence"], tile])] += 1
    shared, deeper = batch.block_tables[0, :20].tolist(), batch.block_tables[0, 20:30].tolist()
    assert {reads[block] for block in shared} == {-(-40 * shape.per_group // shape.wide)}
    assert {reads[block] for block in deeper} == {-(-10 * shape.per_group // shape.wide)}
    assert {count for block, count in reads.items() if block not in shared + deeper} == {1}


def test_a_little_sharing_is_not_worth_partial_results() -> None:
    """Two rows with one tile in common and long tails: merging 200 partial results would cost more than a tile."""
    batch = make_batch([3200, 3200], [1, 1], [None, (0, 1)], 16)
    plan = plan_tree(batch, replace(SHAPE, num_programs=0, is_invariant=True))
    assert plan.num_partials == 0
    assert plan.items[:, ITEM_FIELDS.index("num_tiles")].tolist() == [200, 200]


def test_few_rows_are_cut_for_many_programs() -> None:
    batch = make_batch([8192], [1], [None], 64)
    shape = ItemShape(tile=64, narrow=16, wide=64, per_group=4, num_programs=33)
    plan = plan_tree(batch, shape)
    assert len(plan.items) == 32
    assert len(set(plan.items[:, ITEM_FIELDS.index("num_tiles")].tolist())) == 1
    assert plan_tree(batch, replace(shape, num_programs=1)).items.shape[0] == 2
    many = make_batch([8192] * 64, [1] * 64, [None] * 64, 64)
    assert plan_tree(many, shape).num_partials <= 64 * 3
