"""Decides what runs in the next step: one token budget, no phases, admission by KV memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from batchinfer.engine.blocks import BlockPool
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.tree_cache import Match, TreeCache

#: A step that has no memory is halved down to this many tokens.
LEAST_BUDGET = 16
#: Longer first rows are not taken through in small steps, nor for more steps than this.
MAX_FIRST_STEPS = 128


@dataclass(slots=True)
class Step:
    """What to do before and in one forward pass."""

    scheduled: list[tuple[Sequence, int]] = field(default_factory=list)  # (sequence, tokens to advance)
    admitted: list[tuple[Sequence, Match]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source block, target block), all read first
    taken: list[int] = field(default_factory=list)  # blocks that were free before
    preempted: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0


class Scheduler:
    """Sequences wait, run and end here; nobody else changes `num_computed`, `blocks` or the queues.

    A sequence needs its `num_computed` to catch up with its `num_tokens`; a step is how far each one
    may advance under `max_batch_tokens`. Decodes (one token) go before prompt chunks, so that a long
    prompt slows no running row down; then new sequences are admitted in the given order while KV
    blocks last. When a running sequence finds no block, shared nodes that are needed latest are
    evicted, then the sequence admitted last is preempted: it gives up its KV and computes it again
    later, which changes no bit of its output.

    Full steps are the fastest way through the job, but the first row would end only after as many of
    them as it has tokens: minutes, where somebody waits to see whether the prompts are right. So the
    first row runs in small steps, if it is short.

    Args:
        first_row_tokens: token budget of the steps that take the first row to its end; 0: none are small.
    """

    def __init__(
        self,
        sequences: Iterable[Sequence],
        cache: TreeCache,
        pool: BlockPool,
        max_batch_tokens: int,
        max_num_seqs: int,
        first_row_tokens: int = 0,
    ) -> None:
        self.cache = cache
        self.pool = pool
        self.block_size = cache.block_size
        self.max_batch_tokens = max_batch_tokens
        # Every running sequence must be able to advance in every step.
        self.max_num_seqs = min(max_num_seqs, max_batch_tokens)
        self._waiting: list[tuple[int, Sequence]] = []  # a heap: orders are distinct
        self.add(sequences)
        self._first = self._waiting[0][1] if self._waiting else None
        self._first_row_tokens = first_row_tokens
        self._num_first_steps = 0
        self._budget = max_batch_tokens  # of the step that is being made
        self.num_parked = 0  # sequences that wait for a node, on its own list
        self.running: list[Sequence] = []  # in the order of admission

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Sequences of one more window. Their nodes are in the cache."""
        self._waiting += ((seq.order, seq) for seq in sequences)
        heapq.heapify(self._waiting)

    def halve_budget(self) -> bool:
        """Make smaller steps from now on, because one had no memory; False: they are as small as can be."""
        if self.max_batch_tokens <= LEAST_BUDGET:
            return False
        self.max_batch_tokens = max(LEAST_BUDGET, self.max_batch_tokens // 2)
        self.max_num_seqs = min(self.max_num_seqs, self.max_batch_tokens)
        return True

    @property
    def has_room(self) -> bool:
        """Nothing waits for a place: sequences of a later window may be added."""
        return not self._waiting and len(self.running) < self.max_num_seqs

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self.num_parked

    def waiting_in_order(self) -> list[Sequence]:
        """Sequences that wait for a place, those that wait for a node left out."""
        return [seq for _, seq in sorted(self._waiting)]

    def has_work(self) -> bool:
        return bool(self.running) or self.num_waiting > 0

    def schedule(self, *, may_preempt: bool = True) -> Step | None:
        """The next step. Empty only when nothing is left to do.

        Args:
            may_preempt: without it there is no step (None) where a sequence would have to be preempted. Ask again
                when it is known whether one has ended; blocks that were given out meanwhile are not lost.
        """
        step = Step()
        self._budget = self._next_budget()
        if not self._advance_running(step, may_preempt):
            return None
        if not step.preempted:  # a full pool is no time to admit
            self._admit_waiting(step)
        assert step.scheduled or not self.has_work(), f"stuck: {len(self.running)=} {self.num_waiting=}"
        return step

    def _next_budget(self) -> int:
        first = self._first
        if first is None or not self._first_row_tokens or first.max_tokens > MAX_FIRST_STEPS:
            return self.max_batch_tokens
        if self._num_first_steps > MAX_FIRST_STEPS or first.num_preempted:
            self._first = None
            return self.max_batch_tokens
        self._num_first_steps += 1
        # Room for each running sequence, as in every step, and for the first one's prompt.
        needed = first.num_tokens - first.num_computed
        return min(max(needed, self._first_row_tokens, len(self.running)), self.max_batch_tokens)

    def _advance_running(self, step: Step, may_preempt: bool) -> bool:
        taken: dict[int, int] = {}  # id(sequence) -> tokens
        budget = self._budget
        decodes_first = sorted(self.running, key=lambda seq: seq.num_tokens - seq.num_computed > 1)
        for seq in decodes_first:
            num_tokens = min(seq.num_tokens - seq.num_computed, budget)
            if not seq.is_running or not num_tokens:  # preempted a moment ago, or the budget is spent
                continue
            while not self._grow(seq, seq.num_computed + num_tokens, step):
                if not may_preempt:
                    return False
                victim = self.running[-1]
                budget += taken.pop(id(victim), 0)
                self._preempt(victim, step)
                if victim is seq:
                    break
            else:
                taken[id(seq)] = num_tokens
                budget -= num_tokens
        step.scheduled = [(seq, taken[id(seq)]) for seq in self.running if id(seq) in taken]
        step.num_tokens = sum(taken.values())
        return True

    def _grow(self, seq: Sequence, num_tokens: int, step: Step) -> bool:
        """Give the sequence blocks for its first `num_tokens`; False if there are not enough."""
        missing = -(-num_tokens // self.block_size) - len(seq.blocks)
        if missing > self.pool.num_free:
            self.cache.evict(missing - self.pool.num_free, self._now())
        if missing > self.pool.num_free:
            return False
        taken = self.pool.take(max(missing, 0))
        seq.blocks += taken
        step.taken += taken
        return True

    def _now(self) -> int:
        """Place in the order of the first sequence that waits, be it for a node."""
        computing = (self.cache.nodes[index] for seq in self.running for index in seq.path)
        parked = [seq.order for node in computing for seq in node.waiters]
        return min([*(order for order, _ in self._waiting[:1]), *parked], default=0)

    def _preempt(self, seq: Sequence, step: Step) -> None:
        self._leave(seq)
        step.preempted.append(seq)
        self._wait_again(seq)

    def _wait_again(self, seq: Sequence) -> None:
        seq.num_preempted += 1
        seq.num_computed = seq.num_cached = 0
        heapq.heappush(self._waiting, (seq.order, seq))
        self._return_to_queue(self.cache.on_stopped(seq, will_return=True))

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.is_running = False

    def _return_to_queue(self, released: list[Sequence]) -> None:
        self.num_parked -= len(released)
        for seq in released:
            heapq.heappush(self._waiting, (seq.order, seq))

    def _admit_waiting(self, step: Step) -> None:
        while self._waiting and len(self.running) < self.max_num_seqs:
            budget = self._budget - step.num_tokens
            if budget <= 0:
                return
            seq = self._waiting[0][1]
            match = self.cache.match(seq)
            if match.blocked_on is not None:
                heapq.heappop(self._waiting)
                match.blocked_on.waiters.append(seq)
                self.num_parked += 1
                continue
            num_tokens = min(seq.num_tokens - match.num_cached, budget)
            if not self._make_room(match, match.num_cached + num_tokens):
                if self.running:
                    return
                # Alone, and the kept prefix itself is in the way (its tail block is copied, not shared).
                assert match.spans, f"{seq.num_tokens} tokens do not fit into {self.pool.num_blocks=}"
                self.cache.evict(self.pool.num_blocks, self._now())
                continue
            heapq.heappop(self._waiting)
            self._admit(seq, match, num_tokens, step)

    def _make_room(self, match: Match, num_tokens: int) -> bool:
        """Are there blocks for the sequence's first tokens, and one for each running row to grow into?"""
        needed = -(-num_tokens // self.block_size) - match.num_cached // self.block_size
        spare = len(self.running)
        missing = needed + spare - self.pool.num_free
        if missing > 0:
            self.cache.evict(missing, self._now(), keep=(span.index for span in match.spans))
        return needed + spare <= self.pool.num_free

    def _admit(self, seq: Sequence, match: Match, num_tokens: int, step: Step) -> None:
        shared, remainder = self.cache.admit(seq, match)
        end = match.num_cached + num_tokens
        own = self.pool.take(-(-end // self.block_size) - len(shared))
        seq.blocks = shared + own
        step.taken += own
        seq.num_computed = seq.num_cached = match.num_cached
        if remainder is not None:
            step.copies.append((remainder, own[0]))
        seq.is_running = True
        self.running.append(seq)
        step.admitted.append((seq, match))
        step.scheduled.append((seq, num_tokens))
        step.num_tokens += num_tokens

    def on_computed(self, seq: Sequence, num_tokens: int) -> None:
        """The forward pass has stored the KV of the next `num_tokens` of the sequence."""
        seq.num_computed += num_tokens
        self._return_to_queue(self.cache.on_computed(seq))

    def finish(self, seq: Sequence) -> None:
        """The running sequence has ended: give its blocks back."""
        if seq is self._first:
            self._first = None
        self._leave(seq)
        self._return_to_queue(self.cache.on_stopped(seq, will_return=False))

    def start_over(self, finished: Iterable[Sequence]) -> list[Sequence]:
        """Give up all KV there is: what runs, and what has finished too early, is computed again from the start.

        Returns:
            The sequences that ran.
        """
        stopped = list(self.running)
        for seq in stopped:
            self._leave(seq)
        for seq in (*stopped, *finished):
            self._wait_again(seq)
        self.cache.drop_all()
        return stopped

    def check_integrity(self) -> None:
        """Assert what must hold between steps. For tests; O(everything)."""
        below: dict[int, int] = {}
        parked = [seq for node in self.cache.nodes.values() for seq in node.waiters]
        assert len(parked) == self.num_parked
        for seq in [*self.waiting_in_order(), *parked]:
            assert not seq.is_running
            assert not seq.blocks
            assert seq.num_computed == 0
            for index in seq.path:
                below[index] = below.get(index, 0) + 1
        for seq in self.running:
            assert seq.is_running
            assert seq.num_computed <= seq.num_tokens
            assert len(seq.blocks) * self.block_size >= seq.num_computed
        self.cache.check_integrity(below)
        self.pool.check_integrity([*self.cache.held(), *(seq.blocks for seq in self.running)])
