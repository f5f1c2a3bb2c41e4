"""The pool of KV blocks: ids, reference counts, a free list. It holds no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


class BlockPool:
    """Blocks 0 .. num_blocks - 1, each free or held by one or more owners (sequences, tree nodes)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = np.zeros(num_blocks, dtype=np.int32)
        self._free = list(range(num_blocks - 1, -1, -1))  # popped from the end: low ids first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free blocks, each with one owner. The caller has checked `num_free`."""
        assert count <= len(self._free), f"{count=} {self.num_free=}"
        if not count:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        self.refs[taken] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more owner for each block."""
        for block in blocks:
            assert self.refs[block] > 0, f"{block=} is free"
            self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less for each block; those with none left are free."""
        for block in blocks:
            assert self.refs[block] > 0, f"{block=} released twice"
            self.refs[block] -= 1
            if not self.refs[block]:
                self._free.append(block)

    def check_integrity(self, owners: Iterable[Iterable[int]]) -> None:
        """Assert that the counts are those of `owners` (each a list of blocks) and that nothing leaked."""
        counts = np.zeros(self.num_blocks, dtype=np.int32)
        for blocks in owners:
            for block in blocks:
                counts[block] += 1
        assert (counts == self.refs).all(), f"reference counts differ: {np.flatnonzero(counts != self.refs)[:8]=}"
        free = np.zeros(self.num_blocks, dtype=bool)
        free[self._free] = True
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert (free == (self.refs == 0)).all(), "a block is neither free nor held"
