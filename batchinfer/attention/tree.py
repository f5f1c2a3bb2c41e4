"""The plan of a step's attention: which query tokens meet which KV tiles, shared tiles once.

Made once per step on the host from block tables, used by every layer. Query tokens are cut into units
at absolute tile borders, so that all tokens of a unit see the same tiles (the last one causally).
The units' tile lists form a prefix tree, built by the same code that plans the dataset: below a node
of that tree, all units meet the node's tiles together. Nodes of one depth make a wave; a row's waves
come in order, so its tiles do too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchinfer.config import TILE
from batchinfer.planner.prefix_tree import PrefixTree, build_prefix_tree

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

GROUP = 16  # tokens per addressable group of the cache; block sizes are multiples of it
GROUPS_PER_TILE = TILE // GROUP

#: Query tokens per item. Items of one shape are computed together; odd rests are padded.
ITEM_ROWS = (1, 4, 16, 64)


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The sequences of a step. Query tokens lie one sequence after the other in the flat batch."""

    block_tables: Int32s  # [num_seqs, max_blocks]
    query_starts: Int32s  # [num_seqs] position of each sequence's first query token
    query_lens: Int32s  # [num_seqs] >= 1
    block_size: int

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())


@dataclass(frozen=True, slots=True)
class TileMask:
    """Which keys of a tile the queries of items [begin, end) see."""

    begin: int
    end: int
    visible: Bools  # [end - begin, M, 64]


@dataclass(frozen=True, slots=True)
class WavePlan:
    """Equally wide items whose tiles can be walked at the same time, longest lists first."""

    rows: Int64s  # [items, M] flat query tokens; num_tokens stands for padding
    groups: Int64s  # [items, longest, 4] 16-token groups of each tile in the cache; 0 behind an item's end
    num_active: list[int]  # [longest] items that have a k-th tile: the first so many
    masks: list[TileMask | None]  # [longest] None: every query sees every key


@dataclass(frozen=True, slots=True)
class _Units:
    """Query tokens of one sequence within one tile, in flat order."""

    first: Int64s  # [units] flat index of the first token
    count: Int64s  # [units] tokens, at most 64
    tile_lists: list[Int32s]  # [units][1 + tiles]: number of the first tile seen, then ids of physical tiles
    tile_groups: Int64s  # [physical tiles, 4]


def plan_waves(batch: RaggedBatch, window: int | None = None) -> list[WavePlan]:
    """The waves of a step, in the order in which they must run.

    Args:
        window: sliding window W: a query at position p sees keys p - W + 1 .. p. None: all up to p.
    """
    units = _cut_units(batch, window)
    tree = build_prefix_tree(units.tile_lists)
    positions = _positions(batch)
    waves = []
    for nodes in _by_depth(tree):
        items = _items(tree, nodes, units)
        for size in ITEM_ROWS:
            if chosen := [item for item in items if item.size == size]:
                waves.append(_wave(chosen, size, units, positions, window))
    return waves


def _positions(batch: RaggedBatch) -> Int64s:
    """[num_tokens + 1]: position of every query token, and of the padding behind them (which sees everything)."""
    lens = batch.query_lens
    within = np.arange(batch.num_tokens) - np.repeat(np.cumsum(lens) - lens, lens)
    return np.append(np.repeat(batch.query_starts, lens) + within, np.iinfo(np.int32).max).astype(np.int64)


def _cut_units(batch: RaggedBatch, window: int | None) -> _Units:
    ends = batch.query_starts + batch.query_lens
    first_tile, last_tile = batch.query_starts // TILE, (ends - 1) // TILE
    num_units = last_tile - first_tile + 1
    seq = np.repeat(np.arange(len(ends)), num_units)
    tile = np.arange(len(seq)) - np.repeat(np.cumsum(num_units) - num_units, num_units) + first_tile[seq]
    begin = np.maximum(tile * TILE, batch.query_starts[seq])
    count = np.minimum((tile + 1) * TILE, ends[seq]) - begin
    offsets = np.cumsum(batch.query_lens) - batch.query_lens
    lowest = np.zeros_like(tile) if window is None else np.maximum(begin - window + 1, 0) // TILE
    tables, groups = _tile_tables(batch)
    lists = [
        np.append(np.int32(low), tables[s, low : t + 1]).astype(np.int32)
        for s, low, t in zip(seq, lowest, tile, strict=True)
    ]
    return _Units(
        (offsets[seq] + begin - batch.query_starts[seq]).astype(np.int64), count.astype(np.int64), lists, groups
    )


def _tile_tables(batch: RaggedBatch) -> tuple[Int32s, Int64s]:
    """Ids of physical tiles [num_seqs, tiles], and where the 16-token groups of each lie [ids, 4].

    Groups beyond a sequence's last block repeat its last one: their keys are masked.
    """
    per_block = batch.block_size // GROUP
    last_block = (batch.query_starts + batch.query_lens - 1) // batch.block_size
    num_tiles = -(-int((batch.query_starts + batch.query_lens).max()) // TILE)
    group = np.arange(num_tiles * GROUPS_PER_TILE)
    block = np.minimum(group[None] // per_block, last_block[:, None])
    groups = np.take_along_axis(batch.block_tables, block, axis=1).astype(np.int64) * per_block + group % per_block
    groups = groups.reshape(-1, GROUPS_PER_TILE)
    if batch.block_size >= TILE:  # a tile lies within a block: its first group tells it
        ids = groups[:, 0] // GROUPS_PER_TILE
        tiles = np.arange(int(ids.max()) + 1)[:, None] * GROUPS_PER_TILE + np.arange(GROUPS_PER_TILE)
    else:
        tiles, ids = np.unique(groups, axis=0, return_inverse=True)
    return ids.reshape(len(batch.query_lens), num_tiles).astype(np.int32), tiles


def _by_depth(tree: PrefixTree) -> Iterator[list[int]]:
    """Nodes level by level; the root spans nothing and is left out."""
    depth = np.zeros(tree.num_nodes, dtype=np.int64)
    for node in range(1, tree.num_nodes):  # a parent has a lower number
        depth[node] = depth[tree.parent[node]] + 1
    for level in range(1, int(depth.max()) + 1):
        yield np.flatnonzero(depth == level).tolist()


@dataclass(frozen=True, slots=True)
class _Item:
    """Up to `size` query tokens that meet the same tiles."""

    size: int
    rows: Int64s
    tiles: Int32s  # ids of physical tiles
    first_tile: int  # absolute number of tiles[0]


def _items(tree: PrefixTree, nodes: list[int], units: _Units) -> list[_Item]:
    items = []
    for node in nodes:
        members = tree.order[tree.row_begin[node] : tree.row_end[node]]
        lead = units.tile_lists[members[0]]
        begin, end = max(int(tree.start[node]), 1), int(tree.end[node])  # entry 0 is the first tile's number
        if end <= begin:
            continue
        if len(members) == 1 or units.count[members].max() == 1:
            first, count = units.first[members], units.count[members]
            rows = first if count.max() == 1 else np.arange(first[0], first[0] + count[0])
        else:
            rows = np.concatenate([np.arange(units.first[u], units.first[u] + units.count[u]) for u in members])
        for at in range(0, len(rows), ITEM_ROWS[-1]):
            part = rows[at : at + ITEM_ROWS[-1]]
            size = next(size for size in ITEM_ROWS if size >= len(part))
            items.append(_Item(size, part, lead[begin:end], int(lead[0]) + begin - 1))
    return items


def _wave(items: list[_Item], size: int, units: _Units, positions: Int64s, window: int | None) -> WavePlan:
    items = sorted(items, key=lambda item: -len(item.tiles))
    lengths = np.array([len(item.tiles) for item in items])
    rows = np.full((len(items), size), len(positions) - 1)
    tiles = np.zeros((len(items), int(lengths[0])), dtype=np.int64)
    for i, item in enumerate(items):
        rows[i, : len(item.rows)] = item.rows
        tiles[i, : lengths[i]] = item.tiles
    num_active = [int((lengths > k).sum()) for k in range(int(lengths[0]))]
    query = positions[rows]  # [items, size]
    first_tile = np.array([item.first_tile for item in items])
    masks = [_mask(query[:active], (first_tile[:active] + k) * TILE, window) for k, active in enumerate(num_active)]
    return WavePlan(rows, units.tile_groups[tiles], num_active, masks)


def _mask(query: Int64s, begin: Int64s, window: int | None) -> TileMask | None:
    """The mask of the items that need one: some query does not see the whole tile [begin, begin + 64)."""
    is_padding = query == np.iinfo(np.int32).max
    sees_all = query >= begin[:, None] + TILE - 1
    if window is not None:
        sees_all &= (query < begin[:, None] + window) | is_padding
    needy = np.flatnonzero(~sees_all.all(axis=1))
    if not len(needy):
        return None
    low, high = int(needy[0]), int(needy[-1]) + 1
    keys = begin[low:high, None, None] + np.arange(TILE)
    at = query[low:high, :, None]
    visible = keys <= at
    if window is not None:
        visible &= (keys > at - window) | is_padding[low:high, :, None]
    return TileMask(low, high, visible)
