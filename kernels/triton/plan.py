"""The plan of a step's attention on a GPU: work items over the prefix tree, in flat int32 arrays.

KV is met in tiles at fixed absolute positions. A query token's result is the fold of its tiles' partial results
(maximum, sum, accumulator), each found by itself, in order of position.

* A group is query tokens that meet the same stretch of tiles: those below a node of the prefix tree, or the
  tokens of one sequence within one tile.
* An item is a stretch of a group's tiles for up to `wide` lanes, which are its tokens x the query heads of a KV
  head. It folds its tiles into one partial result. Groups are cut along KV when there are too few items to fill the
  chip.
* An item that folds all that its tokens see writes results. The other partial results are merged in order of position
  afterwards.

Invariance. A left fold may stop after any tile, be written to memory and go on elsewhere with the same bits, but two
folds cannot be merged into one without another order of sums. So an invariant plan folds from the first tile of a
path only; behind it an item is one tile. Then which tiles a token shares, and where its path is cut, changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchinfer.attention.tree import RaggedBatch
from batchinfer.planner.prefix_tree import PrefixTree, build_prefix_tree

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: Columns of `TreePlan.items`.
ITEM_FIELDS = (
    "rows_begin",  # into TreePlan.rows: the group's query tokens
    "lane_begin",  # the item's first lane; lane i is query head i % per_group of token i // per_group of the group
    "num_lanes",  # of the group
    "sequence",  # whose block table is read
    "first_tile",
    "num_tiles",  # 0: nothing to do
    "flags",
    "min_position",  # of the group's tokens
    "max_position",
    "partial",  # number of the item on its tokens' paths, for those that have several
)
IS_DIRECT = 1  # flag: writes results, not partial ones
IS_WIDE = 2  # flag: computed as `wide` lanes, not as `narrow` ones

#: Fewest tiles that a group folds before it is cut.
MIN_TILES_NARROW, MIN_TILES_WIDE = 4, 8


@dataclass(frozen=True, slots=True)
class ItemShape:
    """How work is cut; chosen from the model's shapes and the chip alone."""

    tile: int  # KV positions
    narrow: int  # lanes
    wide: int
    per_group: int  # query heads of a KV head
    num_programs: int  # for one KV head, that the chip runs at once; 0: nothing is cut along KV
    is_invariant: bool = False  # see above; there are no narrow items then: every product has the same shape


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What a plan may need at most: the sizes of its buffers."""

    num_items: int
    num_rows: int
    num_tokens: int
    num_merges: int
    num_partials: int


@dataclass(frozen=True, slots=True)
class TreePlan:
    """Work items of a step for one sliding window; long ones first."""

    items: Int32s  # [items, len(ITEM_FIELDS)]
    rows: Int32s  # flat query tokens, group by group
    positions: Int32s  # [num_tokens]
    slots: Int32s  # [num_tokens] where its partial results begin
    merges: Int32s  # [merges, 3]: query token, its first partial result, how many
    num_partials: int

    def fits(self, limits: PlanLimits) -> bool:
        return (
            len(self.items) <= limits.num_items
            and len(self.rows) <= limits.num_rows
            and len(self.positions) <= limits.num_tokens
            and len(self.merges) <= limits.num_merges
            and self.num_partials <= limits.num_partials
        )


class _Units(NamedTuple):
    """Query tokens of one sequence within one tile, in flat order."""

    sequence: Int64s
    first: Int64s  # flat query token
    num_tokens: Int64s
    low: Int64s  # first tile seen by any of them
    end: Int64s  # one behind the last tile


class _Groups(NamedTuple):
    rows: Int64s  # flat query tokens, group by group
    num_rows: Int64s
    sequence: Int64s
    first_tile: Int64s
    end_tile: Int64s
    is_first: Bools  # on its tokens' paths


def plan_tree(
    batch: RaggedBatch, shape: ItemShape, window: int | None = None, limits: PlanLimits | None = None
) -> TreePlan:
    """The work items of a step.

    Args:
        window: sliding window W: a query at position p sees keys p - W + 1 .. p. None: all up to p.
        limits: the plan shares and cuts less if it would not fit.

    Raises:
        ValueError: the step does not fit in any way.
    """
    positions = _positions(batch)
    units = _cut_units(batch, shape.tile, window)
    for shares, cuts in ((True, True), (True, False), (False, True), (False, False)):
        groups = _share(batch, units, shape) if shares else _alone(units, np.arange(len(units.first)))
        plan = _plan_items(groups, positions, shape, cuts)
        if limits is None or plan.fits(limits):
            return plan
    raise ValueError(
        f"a step of {batch.num_tokens} query tokens needs {len(plan.items)} items and {len(plan.rows)} rows, "
        f"more than {limits}"
    )


def _positions(batch: RaggedBatch) -> Int64s:
    lens = batch.query_lens.astype(np.int64)
    return _ranges(batch.query_starts.astype(np.int64), lens)


def _ranges(begin: Int64s, count: Int64s) -> Int64s:
    """begin[0] .. begin[0] + count[0] - 1, begin[1] .., one after the other."""
    ends = np.cumsum(count)
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(begin - (ends - count), count)


def _cut_units(batch: RaggedBatch, tile: int, window: int | None) -> _Units:
    starts = batch.query_starts.astype(np.int64)
    ends = starts + batch.query_lens
    first_tile = starts // tile
    num_units = (ends - 1) // tile - first_tile + 1
    sequence = np.repeat(np.arange(len(ends)), num_units)
    at = _ranges(first_tile, num_units)
    begin = np.maximum(at * tile, starts[sequence])
    count = np.minimum((at + 1) * tile, ends[sequence]) - begin
    offsets = np.cumsum(batch.query_lens) - batch.query_lens
    low = np.zeros_like(at) if window is None else np.maximum(begin - window + 1, 0) // tile
    return _Units(sequence, offsets[sequence] + begin - starts[sequence], count, low, at + 1)


def _alone(units: _Units, chosen: Int64s) -> _Groups:
    """Each of the units by itself."""
    count = units.num_tokens[chosen]
    return _Groups(
        rows=_ranges(units.first[chosen], count),
        num_rows=count,
        sequence=units.sequence[chosen],
        first_tile=units.low[chosen],
        end_tile=units.end[chosen],
        is_first=np.ones(len(chosen), np.bool_),
    )


def _share(batch: RaggedBatch, units: _Units, shape: ItemShape) -> _Groups:
    """Units of few lanes meet the tiles that they share together; the others fill items by themselves."""
    is_small = units.num_tokens * shape.per_group < shape.wide
    small = np.flatnonzero(is_small)
    per_tile = max(1, shape.tile // batch.block_size)
    ids = _tile_ids(batch, shape.tile, int(units.end.max()))
    first_met = ids[units.sequence[small], 1 + units.low[small] * per_tile]
    if len(np.unique(first_met)) == len(small):  # no two begin with the same tile
        return _alone(units, np.arange(len(units.first)))
    bounds = (units.sequence[small], units.low[small] * per_tile, 1 + units.end[small] * per_tile)
    lists = [
        ids[sequence, :end] if low == 0 else np.append(np.int32(low), ids[sequence, 1 + low : end])
        for sequence, low, end in zip(*(bound.tolist() for bound in bounds), strict=True)
    ]
    tree = build_prefix_tree(lists)
    shared = _tree_groups(tree, _Units(*(field[small] for field in units)), per_tile, shape)
    alone = _alone(units, np.flatnonzero(~is_small))
    return _Groups(*(np.concatenate(pair) for pair in zip(shared, alone, strict=True)))


def _tile_ids(batch: RaggedBatch, tile: int, num_tiles: int) -> Int32s:
    """[num_seqs, 1 + tiles x blocks of a tile] 0, then numbers that are equal where the KV is.

    Tiles of a large block are told apart by their place in it. Behind a sequence's last block may lie anything:
    a group reads the table of one of its sequences, and what compares equal is read equal.
    """
    per_block, per_tile = max(1, batch.block_size // tile), max(1, tile // batch.block_size)
    blocks = batch.block_tables[:, : -(-num_tiles * per_tile // per_block)]
    ids = np.zeros((len(blocks), 1 + num_tiles * per_tile), np.int32)
    if per_block == 1:
        ids[:, 1 : 1 + blocks.shape[1]] = blocks
    else:
        tiles = blocks[:, :, None] * per_block + np.arange(per_block, dtype=np.int32)
        ids[:, 1:] = tiles.reshape(len(blocks), -1)[:, :num_tiles]
    return ids


def _tree_groups(tree: PrefixTree, units: _Units, per_tile: int, shape: ItemShape) -> _Groups:
    """A group for each node of the tree in which tiles are met."""
    chosen = list(_chosen_nodes(tree, units, per_tile, shape))
    node, begin = np.array(chosen, np.int64).reshape(-1, 2).T
    members = tree.row_end[node] - tree.row_begin[node]
    of_group = tree.order[_ranges(tree.row_begin[node].astype(np.int64), members.astype(np.int64))]
    lead = tree.order[tree.row_begin[node]]
    counts = units.num_tokens[of_group]
    num_rows = np.add.reduceat(counts, np.cumsum(members) - members)
    return _Groups(
        rows=_ranges(units.first[of_group], counts),
        num_rows=num_rows,
        sequence=units.sequence[lead],
        first_tile=units.low[lead] + begin,
        end_tile=units.low[lead] + (tree.end[node] - 1) // per_tile,
        is_first=begin == 0,
    )


def _chosen_nodes(tree: PrefixTree, units: _Units, per_tile: int, shape: ItemShape) -> Iterator[tuple[int, int]]:
    """Nodes whose rows meet tiles together, and the first of these tiles, counted from the path's first one.

    A row that shares its first tiles pays for it with partial results: for each tile that follows, if the plan is
    invariant. Where that costs more memory traffic than sharing saves, the tiles are left to the node's children.
    """
    depth = np.maximum(tree.end - 1, 0) // per_tile  # tiles from the path's first; entry 0 is that one's number
    is_inner = np.zeros(tree.num_nodes, np.bool_)
    is_inner[tree.parent[1:]] = True
    is_end = np.zeros(tree.num_nodes, np.bool_)
    is_end[tree.node_of_row] = True
    seen = np.append(0, np.cumsum((units.end - units.low)[tree.order]))
    lanes = (tree.row_end - tree.row_begin) * shape.per_group
    saved_loads = tree.row_end - tree.row_begin + lanes // -shape.wide
    left = seen[tree.row_end] - seen[tree.row_begin] - depth * (tree.row_end - tree.row_begin)
    partials = left if shape.is_invariant else 2 * (tree.row_end - tree.row_begin)
    pays = depth * saved_loads > partials * (2 * shape.per_group / shape.tile)

    met = np.zeros(tree.num_nodes, np.int64)  # tiles that groups up to the node meet
    parents, depths = tree.parent.tolist(), depth.tolist()
    has_group = (pays | is_end).tolist()
    inner = np.flatnonzero(is_inner)
    for node in inner[inner > 0].tolist():
        before = int(met[parents[node]])
        met[node] = before
        if depths[node] > before and (before > 0 or has_group[node]):
            met[node] = depths[node]
            yield node, before
    leaves = np.flatnonzero(~is_inner)
    leaves = leaves[leaves > 0]
    begin = met[tree.parent[leaves]]
    yield from zip(leaves.tolist(), begin.tolist(), strict=True)


def _plan_items(groups: _Groups, positions: Int64s, shape: ItemShape, cuts: bool) -> TreePlan:
    tiles = groups.end_tile - groups.first_tile
    lanes = groups.num_rows * shape.per_group
    is_wide = (lanes > shape.narrow) | shape.is_invariant
    width = np.where(is_wide, shape.wide, shape.narrow)
    num_pieces = -(-lanes // width)
    folded, length = _cut(groups.is_first, tiles, num_pieces, lanes, shape, cuts)
    num_cuts = 1 - (folded - tiles) // length
    before, num_partials = _paths(groups, num_cuts, len(positions))
    rows_begin = np.cumsum(groups.num_rows) - groups.num_rows
    is_direct = np.maximum.reduceat(num_partials[groups.rows], rows_begin) == 1
    is_merged = np.empty(len(positions), np.bool_)
    is_merged[groups.rows] = np.repeat(~is_direct, groups.num_rows)

    group = np.repeat(np.arange(len(tiles)), num_cuts * num_pieces)
    within = _ranges(np.zeros_like(tiles), num_cuts * num_pieces)
    cut, piece = within // num_pieces[group], within % num_pieces[group]  # neighbours read the same tiles
    begin = np.where(cut == 0, 0, folded[group] + (cut - 1) * length[group])
    end = np.minimum(folded[group] + cut * length[group], tiles[group])
    columns = (
        rows_begin[group],
        piece * width[group],
        lanes[group],
        groups.sequence[group],
        groups.first_tile[group] + begin,
        end - begin,
        IS_DIRECT * is_direct[group] + IS_WIDE * is_wide[group],
        np.minimum.reduceat(positions[groups.rows], rows_begin)[group],
        np.maximum.reduceat(positions[groups.rows], rows_begin)[group],
        before[group] + cut,
    )
    longest_first = np.argsort(begin - end, kind="stable")
    count = np.where(is_merged, num_partials, 0)
    slots = np.cumsum(count) - count
    token = np.flatnonzero(is_merged)
    return TreePlan(
        items=np.stack(columns, axis=1)[longest_first].astype(np.int32),
        rows=groups.rows.astype(np.int32),
        positions=positions.astype(np.int32),
        slots=slots.astype(np.int32),
        merges=np.stack((token, slots[token], count[token]), axis=1).astype(np.int32),
        num_partials=int(count.sum()),
    )


def _cut(
    is_first: Bools, tiles: Int64s, num_pieces: Int64s, lanes: Int64s, shape: ItemShape, cuts: bool
) -> tuple[Int64s, Int64s]:
    """Tiles of each group's first item, and of the items behind it.

    A partial result is as large as a tile of KV for 64 lanes, and next to nothing for the few lanes of a narrow item.
    So groups of few lanes are cut early, the others only where they would keep all waiting.
    """
    share = (
        int((tiles * num_pieces).sum()) // max(shape.num_programs, 1) + 1 if cuts and shape.num_programs else 1 << 30
    )
    is_narrow = lanes <= shape.narrow
    most = np.where(is_narrow, max(share // 2, MIN_TILES_NARROW), max(share, MIN_TILES_WIDE))
    if not shape.is_invariant:
        length = -(-tiles // np.where(is_narrow, -(-tiles // most), np.maximum((tiles + most // 2) // most, 1)))
        return length, length
    return np.where(is_first, np.minimum(tiles, np.where(is_narrow, most, 2 * most)), 1), np.ones_like(tiles)


def _paths(groups: _Groups, num_cuts: Int64s, num_tokens: int) -> tuple[Int64s, Int64s]:
    """How many items lie before each group on its tokens' paths, and how many on each token's path."""
    group = np.repeat(np.arange(len(num_cuts)), groups.num_rows)
    order = np.lexsort((groups.first_tile[group], groups.rows))
    cuts = num_cuts[group[order]]
    of_token = np.bincount(groups.rows, weights=num_cuts[group], minlength=num_tokens).astype(np.int64)
    before_token = np.cumsum(of_token) - of_token
    before = np.empty_like(num_cuts)
    before[group[order]] = np.cumsum(cuts) - cuts - before_token[groups.rows[order]]
    return before, of_token
