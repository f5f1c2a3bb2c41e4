"""The prefix tree of a window of prompts: one sort, longest common prefixes, one pass with a stack.

Rows are sorted by blocks of columns. A block of the rows that are still tied is copied into one
matrix of big-endian ids and sorted as raw bytes; rows that stay tied go on to the next block. So
the cost is O(tokens that rows have in common with a neighbour), the extra memory is bounded by
`_BLOCK_TOKENS` whatever the prompts' lengths, and no Python object is made per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchinfer.types import TokenIds

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

#: Tokens of one block of columns: 32 MiB, of which three copies live at a time.
_BLOCK_TOKENS = 1 << 23


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """A radix tree over token sequences, in flat arrays.

    Nodes are numbered depth-first (a parent before its children, children by their first token);
    node 0 is the root and spans nothing. A node exists wherever rows part or a row ends. With N
    nodes and R rows:
    """

    parent: Int32s  # [N]; -1 for the root
    start: Int64s  # [N]; the node's span is positions [start, end) of any row below it
    end: Int64s  # [N]; also the number of tokens from the root
    row_begin: Int32s  # [N]; the rows below (and at) the node are order[row_begin:row_end]
    row_end: Int32s  # [N]
    order: Int32s  # [R]; row indices in depth-first order, equal rows by index
    node_of_row: Int32s  # [R]; the node at whose end row r ends; equal rows share it, empty rows: the root
    num_tokens: int  # of all rows
    num_unique_tokens: int  # of all spans: what must be computed when every shared prefix is computed once

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @property
    def num_rows(self) -> int:
        return len(self.order)

    @property
    def num_shareable_tokens(self) -> int:
        """Prompt tokens that need not be computed: those of rows that share a span, less one copy."""
        return self.num_tokens - self.num_unique_tokens

    def path(self, node: int) -> list[int]:
        """The nodes from the root (left out) down to `node`; [] for the root."""
        nodes = []
        while node > 0:
            nodes.append(int(node))
            node = int(self.parent[node])
        return nodes[::-1]


def build_prefix_tree(rows: Sequence[TokenIds]) -> PrefixTree:
    """The prefix tree of `rows`, each a 1-d array of token ids from 0. Raises ValueError for a negative id."""
    lengths = np.fromiter((len(row) for row in rows), np.int64, count=len(rows))
    order, common = _sort_rows(rows, lengths)
    nodes = _build_nodes(lengths[order], common)

    # Nodes that begin at the same row lie on one path; the shorter is the ancestor.
    by_preorder = np.lexsort((nodes.end, nodes.row_begin))
    number = np.empty(len(by_preorder), np.int32)
    number[by_preorder] = np.arange(len(by_preorder), dtype=np.int32)
    parent = nodes.parent[by_preorder]
    parent[1:] = number[parent[1:]]
    end = nodes.end[by_preorder]
    start = np.zeros_like(end)
    start[1:] = end[parent[1:]]
    node_of_row = np.empty(len(rows), np.int32)
    node_of_row[order] = number[nodes.of_sorted_row]
    return PrefixTree(
        parent=parent,
        start=start,
        end=end,
        row_begin=nodes.row_begin[by_preorder],
        row_end=nodes.row_end[by_preorder],
        order=order.astype(np.int32),
        node_of_row=node_of_row,
        num_tokens=int(lengths.sum()),
        num_unique_tokens=int((end - start).sum()),
    )


def _sort_rows(rows: Sequence[TokenIds], lengths: Int64s) -> tuple[Int64s, Int64s]:
    """Row indices in lexicographic order [R], and the common prefix of each with the one before it [R]."""
    order = np.arange(len(rows), dtype=np.int64)
    common = np.zeros(len(rows), np.int64)
    tied = np.arange(len(rows) if len(rows) > 1 else 0)  # places in `order` whose rows are not yet told apart
    group = np.zeros(len(tied), np.int64)  # rows of one group agree in all columns before `depth`
    depth = 0
    while len(tied):
        width = max(1, _BLOCK_TOKENS // len(tied))
        block = _columns(rows, lengths, order[tied], depth, width, group)
        # A stable sort of raw bytes compares group, then ids; rows that stay equal keep their index order.
        sorted_by = np.argsort(block.view(np.dtype((np.void, block.shape[1] * 4))).ravel(), kind="stable")
        order[tied] = order[tied][sorted_by]
        block = block[sorted_by]

        same_group = group[1:] == group[:-1]  # sorting moved rows inside their groups only
        differs = block[1:, 1:] != block[:-1, 1:]
        first = differs.argmax(axis=1)
        is_equal = ~differs[np.arange(len(first)), first]
        del differs
        has_ended = block[1:, -1] == 0
        told_apart = same_group & ~is_equal
        common[tied[1:][told_apart]] = depth + first[told_apart]
        duplicate = same_group & is_equal & has_ended
        common[tied[1:][duplicate]] = lengths[order[tied[1:][duplicate]]]

        goes_on = same_group & is_equal & ~has_ended  # with the row before
        keep = np.zeros(len(tied), bool)
        keep[1:] |= goes_on
        keep[:-1] |= goes_on
        group = np.cumsum(np.concatenate(([True], ~goes_on)))[keep]
        tied = tied[keep]
        depth += block.shape[1] - 1
    return order, common


def _columns(
    rows: Sequence[TokenIds], lengths: Int64s, picked: Int64s, depth: int, width: int, group: Int64s
) -> npt.NDArray[np.uint32]:
    """[len(picked), 1 + width] big-endian: the group, then id + 1 of each token, 0 past a row's end."""
    width = min(width, max(1, int(lengths[picked].max()) - depth))
    block = np.full((len(picked), 1 + width), -1, np.int32)
    for to, row in zip(block, picked.tolist(), strict=True):
        tokens = rows[row][depth : depth + width]
        to[1 : 1 + len(tokens)] = tokens
    num_negative = np.count_nonzero(block[:, 1:] < 0, axis=1)
    is_bad = num_negative != np.clip(depth + width - lengths[picked], 0, width)
    if is_bad.any():
        row = int(picked[is_bad.argmax()])
        raise ValueError(f"token ids must not be negative, row {row} has {int(np.min(rows[row]))}")
    block[:, 0] = group - 1
    unsigned = block.view(np.uint32)
    unsigned += 1
    return unsigned.byteswap(inplace=True) if np.little_endian else unsigned


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Nodes in the order in which the stack opens them; the root first."""

    parent: Int32s
    end: Int64s
    row_begin: Int32s
    row_end: Int32s
    of_sorted_row: Int32s  # [R]


def _build_nodes(lengths: Int64s, common: Int64s) -> _Nodes:
    """Nodes over sorted rows of `lengths` [R] that have `common` [R] tokens in common with the row before."""
    num_rows = len(lengths)
    parent, end, row_begin, row_end = [-1], [0], [0], [num_rows]
    of_sorted_row = np.zeros(num_rows, np.int32)
    stack = [0]  # the path to the row before; ends increase

    def open_node(node_end: int, begin: int) -> int:
        parent.append(-1)
        end.append(node_end)
        row_begin.append(begin)
        row_end.append(num_rows)
        return len(end) - 1

    def close_nodes_beyond(depth: int, row: int) -> None:
        """Leaves a path that ends at `depth` tokens or before; splits the span that goes over it."""
        closed = -1
        while end[stack[-1]] > depth:
            closed = stack.pop()
            row_end[closed] = row
            parent[closed] = stack[-1]
        if closed >= 0 and end[stack[-1]] < depth:
            split = open_node(depth, row_begin[closed])
            parent[closed] = split
            stack.append(split)

    for row, (length, depth) in enumerate(zip(lengths.tolist(), common.tolist(), strict=True)):
        close_nodes_beyond(depth, row)
        if length > end[stack[-1]]:
            stack.append(open_node(length, row))
        of_sorted_row[row] = stack[-1]
    close_nodes_beyond(0, num_rows)
    return _Nodes(
        parent=np.array(parent, np.int32),
        end=np.array(end, np.int64),
        row_begin=np.array(row_begin, np.int32),
        row_end=np.array(row_end, np.int32),
        of_sorted_row=of_sorted_row,
    )
