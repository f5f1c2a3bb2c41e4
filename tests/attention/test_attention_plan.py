"""The attention plan: every query meets every key it sees exactly once, in order, and shared tiles are met together."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.attention.tree import GROUP, ITEM_ROWS, TILE, RaggedBatch, plan_waves


def keys_met(batch: RaggedBatch, window: int | None) -> list[list[int]]:
    """Cache slots of the keys that each query token sees, in the order in which it meets them."""
    met: list[list[int]] = [[] for _ in range(batch.num_tokens)]
    for wave in plan_waves(batch, window):
        num_items, width = wave.rows.shape
        assert width in ITEM_ROWS
        real = wave.rows[wave.rows < batch.num_tokens]
        assert len(set(real.tolist())) == len(real), "two items of a wave must not advance the same query"
        assert (wave.rows <= batch.num_tokens).all()
        assert wave.num_active[0] == num_items
        assert wave.num_active == sorted(wave.num_active, reverse=True), "longest lists first"
        for k, active in enumerate(wave.num_active):
            mask = wave.masks[k]
            for item in range(active):
                slots = (wave.groups[item, k][:, None] * GROUP + np.arange(GROUP)).reshape(-1)
                visible = np.ones((width, TILE), bool)
                if mask is not None and mask.begin <= item < mask.end:
                    visible = mask.visible[item - mask.begin]
                for row, sees in zip(wave.rows[item], visible, strict=True):
                    if row < batch.num_tokens:
                        met[row] += slots[sees].tolist()
    return met


def keys_seen(batch: RaggedBatch, window: int | None) -> list[list[int]]:
    """The same from the definition."""
    seen = []
    for table, start, count in zip(batch.block_tables, batch.query_starts, batch.query_lens, strict=True):
        for position in range(start, start + count):
            low = 0 if window is None else max(0, position - window + 1)
            seen.append(
                [
                    int(table[p // batch.block_size]) * batch.block_size + p % batch.block_size
                    for p in range(low, position + 1)
                ]
            )
    return seen


@st.composite
def batches(draw: st.DrawFn) -> RaggedBatch:
    """Sequences that go on from the whole blocks of others."""
    block_size = draw(st.sampled_from([16, 32, 64, 128, 256]))
    tables: list[list[int]] = []
    starts, lens = [], []
    num_blocks = 0
    for index in range(draw(st.integers(1, 8))):
        length = draw(st.integers(1, 300))
        count = -(-length // block_size)
        shared: list[int] = []
        if tables and draw(st.booleans()):
            other = tables[draw(st.integers(0, index - 1))]
            shared = other[: draw(st.integers(0, min(len(other), count)))]
        tables.append(shared + list(range(num_blocks, num_blocks + count - len(shared))))
        num_blocks += count
        num_new = 1 if draw(st.booleans()) else draw(st.integers(1, length))
        starts.append(length - num_new)
        lens.append(num_new)
    width = max(map(len, tables)) + draw(st.integers(0, 2))
    padded = np.array([table + [0] * (width - len(table)) for table in tables], np.int32)
    return RaggedBatch(padded, np.array(starts, np.int32), np.array(lens, np.int32), block_size)


@settings(max_examples=150, deadline=None)
@given(batch=batches(), window=st.sampled_from([None, None, 1, 5, 64, 65, 200]))
def test_every_query_meets_every_visible_key_once_and_in_order(batch: RaggedBatch, window: int | None) -> None:
    assert keys_met(batch, window) == keys_seen(batch, window)


def test_decodes_over_a_shared_prefix_read_it_once() -> None:
    """64 sequences over the same 10 tiles, and one tile each of their own."""
    num = 64
    shared = np.tile(np.arange(10, dtype=np.int32), (num, 1))
    tables = np.concatenate((shared, 10 + np.arange(num, dtype=np.int32)[:, None]), axis=1)
    batch = RaggedBatch(tables, np.full(num, 650, np.int32), np.ones(num, np.int32), TILE)
    common, own = plan_waves(batch)
    assert common.rows.shape == (1, 64)
    assert common.groups[0, :, 0].tolist() == [4 * tile for tile in range(10)]
    assert common.masks == [None] * 10
    assert own.rows.shape == (64, 1)
    assert own.num_active == [64]


def test_a_long_prompt_is_cut_at_tiles() -> None:
    """Positions 70 .. 169: all meet tiles 0 and 1, those from 128 on tile 2 as well."""
    batch = RaggedBatch(np.arange(4, dtype=np.int32)[None], np.array([70]), np.array([100]), TILE)
    rows = [[item[item < 100].tolist() for item in wave.rows] for wave in plan_waves(batch)]
    assert rows == [[list(range(64)), list(range(64, 100))], [list(range(58, 100))]]


def test_a_window_skips_the_tiles_before_it() -> None:
    batch = RaggedBatch(np.arange(5, dtype=np.int32)[None], np.array([300]), np.array([1]), TILE)
    (wave,) = plan_waves(batch, window=64)
    assert wave.groups[0, :, 0].tolist() == [4 * 3, 4 * 4], "keys 237 .. 300"
