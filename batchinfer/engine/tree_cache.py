"""KV of shared prefixes, kept on the nodes of the planned tree for exactly as long as a row needs it.

Sharing is exact to the token. A node keeps the blocks that hold its span, the first and the last of
them possibly only in part:

    block size 4, parent span [0, 6), child span [6, 9)
    parent blocks   |0 1 2 3|4 5 . .|             the tail block has two tokens
    child blocks            |4 5 6 7|8 . . .|     the row that computed it copied 4 5 from the parent's tail

A row under the child refers to |0 1 2 3| and |4 5 6 7| and copies |8| into a block of its own, where
it goes on. Whoever computes a node goes on writing behind the node's end in the same tail block,
which harms nobody: positions from the end on are never read through the node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from batchinfer.engine.blocks import BlockPool
from batchinfer.engine.sequence import Sequence
from batchinfer.types import TokenScores


@dataclass(slots=True)
class SharedNode:
    """The state of one tree node that at least two sequences need."""

    index: int
    parent: int  # index of the shared node above; 0: none
    start: int  # span [start, end)
    end: int
    depth: int
    uses: npt.NDArray[np.int64]  # places in the order of execution of the sequences below, ascending
    scored: npt.NDArray[np.bool_] | None  # [end - start] tokens that a sequence below wants scored; None: none
    keeps_hidden: bool  # a sequence below wants the token at `end` scored, whichever it has there
    num_pending: int  # sequences below that wait for admission
    computing: Sequence | None = None
    blocks: list[int] | None = None  # of positions [start, end), see above; None: not computed
    waiters: list[Sequence] = field(default_factory=list)
    scores: TokenScores | None = None  # [end - start], filled where `scored`
    last_hidden: Tensor | None = None  # [hidden_size], of position end - 1

    def next_use(self, now: int) -> int:
        """Place in the order of the first sequence below that is not before `now`."""
        at = int(np.searchsorted(self.uses, now))
        return int(self.uses[at]) if at < len(self.uses) else int(self.uses[-1]) + (1 << 30)


@dataclass(frozen=True, slots=True)
class Span:
    """What a computed node gives to a sequence. Taken before admission, which may free the node."""

    index: int
    start: int
    end: int
    blocks: list[int]
    scores: TokenScores | None
    last_hidden: Tensor | None


class Match(NamedTuple):
    """What of a sequence's KV is there already."""

    num_cached: int  # tokens
    spans: list[Span]  # computed nodes, from the root down
    blocked_on: SharedNode | None  # another sequence is computing this one: wait


class TreeCache:
    """Which nodes are computed, being computed, or still needed."""

    def __init__(self, pool: BlockPool, block_size: int, nodes: Iterable[SharedNode]) -> None:
        self.pool = pool
        self.block_size = block_size
        self.nodes: dict[int, SharedNode] = {}
        self.computed: set[int] = set()
        self._children: dict[int, list[int]] = {}
        self.add(nodes)

    def add(self, nodes: Iterable[SharedNode]) -> None:
        """The nodes of one more window."""
        for node in nodes:
            self.nodes[node.index] = node
            if node.parent:
                self._children.setdefault(node.parent, []).append(node.index)

    def forget(self, nodes: Iterable[int]) -> None:
        """All sequences below these nodes have ended."""
        for index in nodes:
            node = self.nodes.pop(index)
            assert node.blocks is None and node.computing is None and not node.num_pending  # noqa: PT018
            self._children.pop(index, None)

    def match(self, seq: Sequence) -> Match:
        """The longest computed part of the sequence's path. Changes nothing."""
        found: list[Span] = []
        for index in seq.path:
            node = self.nodes[index]
            if node.blocks is None:
                if node.computing is not None:
                    return Match(0, [], node)
                break
            found.append(Span(index, node.start, node.end, node.blocks, node.scores, node.last_hidden))
        # The last token is always computed: its hidden state is what the next token is drawn from.
        end = found[-1].end if found else 0
        return Match(min(end, seq.num_tokens - 1), found, None)

    def admit(self, seq: Sequence, match: Match) -> tuple[list[int], int | None]:
        """Give the sequence its part of the match, and note what it will compute for others.

        Returns:
            The shared whole blocks, now also the sequence's, and the block to copy the remainder of
            the shared span from (None: the span ends at a block border). The copy must be made
            before the next forward pass.
        """
        blocks = self._table(match)
        num_whole = match.num_cached // self.block_size
        shared, remainder = blocks[:num_whole], None
        if match.num_cached % self.block_size:
            remainder = blocks[num_whole]
        self.pool.share(shared)
        for index in seq.path:
            node = self.nodes[index]
            node.num_pending -= 1
            if node.blocks is None and node.computing is None and node.num_pending:
                node.computing = seq
            elif node.blocks is not None and not node.num_pending:
                self._drop(node)
        return shared, remainder

    def _table(self, match: Match) -> list[int]:
        """Blocks of positions [0, end of the deepest matched node)."""
        table: list[int] = []
        for span in match.spans:
            del table[span.start // self.block_size :]  # the parent's part of a block that goes on below
            table += span.blocks
        return table

    def on_computed(self, seq: Sequence) -> list[Sequence]:
        """Nodes that the sequence has now computed become shared; returns the sequences that waited."""
        released: list[Sequence] = []
        if not seq.is_finite:
            self._drop_written(seq)
        for index in seq.path:
            node = self.nodes[index]
            if node.computing is not seq or node.end > seq.num_computed:
                continue
            node.computing = None
            # An evicted parent leaves a gap above; the next sequence computes both.
            if seq.is_finite and node.num_pending and (not node.parent or node.parent in self.computed):
                node.blocks = seq.blocks[node.start // self.block_size : -(-node.end // self.block_size)]
                self.pool.share(node.blocks)
                self.computed.add(index)
                if node.scored is not None:
                    assert seq.scores is not None
                    node.scores = seq.scores[node.start : node.end].copy()
            else:
                node.last_hidden = None
            released += self._release_waiters(node)
        return released

    def _drop_written(self, seq: Sequence) -> None:
        """Drop nodes whose tail block the sequence goes on writing: others would copy its NaN with it."""
        for index in seq.path:
            node = self.nodes[index]
            if node.blocks is not None and node.end % self.block_size and node.blocks[-1] in seq.blocks:
                for one in self._computed_subtree(node):
                    self._drop(one)

    def on_stopped(self, seq: Sequence, *, will_return: bool) -> list[Sequence]:
        """The running sequence ended or was preempted; returns sequences that waited for it."""
        released: list[Sequence] = []
        for index in seq.path:
            node = self.nodes[index]
            node.num_pending += will_return
            if node.computing is seq:
                node.computing = None
                released += self._release_waiters(node)
        return released

    def _release_waiters(self, node: SharedNode) -> list[Sequence]:
        waiters, node.waiters = node.waiters, []
        return waiters

    def evict(self, num_blocks: int, now: int, keep: Iterable[int] = ()) -> None:
        """Free at least `num_blocks` more if nodes outside `keep` allow it, furthest next use first."""
        kept = set(keep)
        order = sorted(
            (self.nodes[index] for index in self.computed if index not in kept),
            key=lambda node: (node.next_use(now), node.depth),
            reverse=True,
        )
        target = self.pool.num_free + num_blocks
        for node in order:
            if self.pool.num_free >= target:
                return
            # Descendants are of no use without the blocks above them.
            below = self._computed_subtree(node) if node.blocks is not None else []
            if self._frees_any(below):
                for one in below:
                    self._drop(one)

    def _computed_subtree(self, node: SharedNode) -> list[SharedNode]:
        found = [node]
        for one in found:
            found += [self.nodes[index] for index in self._children.get(one.index, ()) if index in self.computed]
        return found

    def _frees_any(self, nodes: list[SharedNode]) -> bool:
        """Would a block be free if these nodes gave theirs back? Parent and child may hold the same one."""
        holders = Counter(block for node in nodes for block in node.blocks or ())
        return any(self.pool.refs[block] == count for block, count in holders.items())

    def _drop(self, node: SharedNode) -> None:
        assert node.blocks is not None
        self.pool.release(node.blocks)
        node.blocks = node.scores = node.last_hidden = None
        self.computed.discard(node.index)

    def drop_all(self) -> None:
        """No node is computed any more."""
        for index in list(self.computed):
            self._drop(self.nodes[index])

    def held(self) -> list[list[int]]:
        """The block lists of all computed nodes, for BlockPool.check_integrity."""
        return [self.nodes[index].blocks or [] for index in self.computed]

    def check_integrity(self, num_waiting_below: dict[int, int]) -> None:
        """Assert the lifetimes: a node is kept only while a waiting sequence needs it."""
        for index, node in self.nodes.items():
            assert node.num_pending == num_waiting_below.get(index, 0), f"{index=} {node.num_pending=}"
            assert (node.blocks is not None) == (index in self.computed)
            if node.blocks is not None:
                assert node.num_pending > 0, f"node {index} is kept for nobody"
                assert not node.parent or node.parent in self.computed, f"node {index} has a gap above"
            assert not node.waiters or node.computing is not None, f"node {index} is waited for in vain"
