"""The plan of a step's attention: which query tokens meet which KV tile, shared tiles once.

Made once per step on the host from block tables, used by every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchinfer.config import TILE

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

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
class TilePiece:
    """Items of one shape at one tile position."""

    rows: Int64s  # [items, M] flat query tokens; num_tokens stands for padding
    groups: Int64s  # [items, 4] groups of 16 tokens in the cache
    mask: npt.NDArray[np.bool_] | None  # [items, M, 64] True: the query sees the key; None: all do


def plan_tiles(batch: RaggedBatch, window: int | None = None) -> list[list[TilePiece]]:
    """For each tile position from the first that any query sees, the items to compute, in order.

    Args:
        window: sliding window W: a query at position p sees keys p - W + 1 .. p. None: all up to p.
    """
    ends = batch.query_starts + batch.query_lens  # also the number of KV positions
    offsets = np.concatenate(([0], np.cumsum(batch.query_lens)))[:-1]
    positions = _positions(batch)
    steps = []
    for tile in range(-(-int(ends.max()) // TILE)):
        begin = tile * TILE
        low = np.maximum(batch.query_starts, begin)  # queries before the tile do not see it
        high = ends if window is None else np.minimum(ends, begin + TILE - 1 + window)
        seqs = np.flatnonzero(low < high)
        if len(seqs):
            first = offsets[seqs] + low[seqs] - batch.query_starts[seqs]
            pieces = _pieces(_tile_groups(batch, seqs, tile), first, (high - low)[seqs], batch.num_tokens)
            steps.append([_masked(piece, positions, begin, window) for piece in pieces])
    return steps


def _positions(batch: RaggedBatch) -> Int64s:
    """Position of every query token, and of the padding token behind them (which sees everything)."""
    within = np.arange(batch.num_tokens) - np.repeat(np.cumsum(batch.query_lens) - batch.query_lens, batch.query_lens)
    return np.append(np.repeat(batch.query_starts, batch.query_lens) + within, np.iinfo(np.int32).max).astype(np.int64)


def _tile_groups(batch: RaggedBatch, seqs: Int64s, tile: int) -> Int64s:
    """[len(seqs), 4]: where the tile's 16-token groups lie in the cache, for each sequence.

    Groups beyond a sequence's last block repeat its last one: their keys are masked.
    """
    per_block = batch.block_size // GROUP
    group = tile * GROUPS_PER_TILE + np.arange(GROUPS_PER_TILE)
    last = (batch.query_starts[seqs] + batch.query_lens[seqs] - 1) // batch.block_size
    index = np.minimum(group[None] // per_block, last[:, None])
    return batch.block_tables[seqs[:, None], index].astype(np.int64) * per_block + group[None] % per_block


def _pieces(groups: Int64s, first: Int64s, lens: Int64s, padding: int) -> Iterator[TilePiece]:
    """Gather sequences with the same tile, cut their query tokens into items, one piece per item size."""
    tiles, inverse = np.unique(groups, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    # Query tokens tile by tile: those of a shared tile lie next to each other.
    by_tile = np.argsort(inverse, kind="stable")
    flat = np.concatenate([np.arange(f, f + n) for f, n in zip(first[by_tile], lens[by_tile], strict=True)])
    num_rows = np.bincount(inverse, weights=lens, minlength=len(tiles)).astype(np.int64)
    ends = np.cumsum(num_rows)
    items: dict[int, tuple[list[Int64s], list[int]]] = {}
    single = num_rows == 1
    for tile in np.flatnonzero(~single):
        rows = flat[ends[tile] - num_rows[tile] : ends[tile]]
        for begin in range(0, len(rows), ITEM_ROWS[-1]):
            part = rows[begin : begin + ITEM_ROWS[-1]]
            size = next(size for size in ITEM_ROWS if size >= len(part))
            lists = items.setdefault(size, ([], []))
            lists[0].append(np.concatenate((part, np.full(size - len(part), padding))))
            lists[1].append(int(tile))
    for size, (parts, of_tile) in sorted(items.items()):
        if size > 1:
            yield TilePiece(np.stack(parts), tiles[of_tile], None)
    lone = np.concatenate((np.flatnonzero(single), np.array(items.get(1, ([], []))[1], dtype=np.int64)))
    if len(lone):
        rest = items.get(1, ([], []))[0]
        rows = np.concatenate((flat[ends[single] - 1], *rest)) if rest else flat[ends[single] - 1]
        yield TilePiece(rows[:, None], tiles[lone], None)


def _masked(piece: TilePiece, positions: Int64s, begin: int, window: int | None) -> TilePiece:
    """Add the causal and window mask where some query of the piece does not see the whole tile."""
    query = positions[piece.rows]
    last_key = begin + TILE - 1
    whole = query >= last_key
    if window is not None:
        whole &= (query < begin + window) | (query == positions[-1])
    if whole.all():
        return piece
    keys = np.arange(begin, begin + TILE)
    mask = keys[None, None] <= query[..., None]
    if window is not None:
        mask &= (keys[None, None] > query[..., None] - window) | (query == positions[-1])[..., None]
    return TilePiece(piece.rows, piece.groups, mask)
