"""The scheduler driven without a model: what runs, shares, is copied, evicted, preempted, and in which order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from fakes import FakeTokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchinfer.config import Policy
from batchinfer.engine.blocks import BlockPool
from batchinfer.engine.scheduler import Scheduler, Step
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.tree_cache import TreeCache
from batchinfer.engine.window import WindowPlanner
from batchinfer.types import Prompt, SamplingParams

BLOCK = 4


@dataclass
class Drive:
    """Runs a scheduler as EngineRun does, with a KV pool that remembers which token was stored where."""

    prompts: list[list[int]]
    num_outputs: list[int]  # by prompt: when its sequences end
    num_blocks: int
    max_batch_tokens: int = 64
    max_num_seqs: int = 8
    policy: Policy = "prefix"
    priorities: list[float] | None = None
    sharing: bool = True
    block_size: int = BLOCK
    n: int = 1
    max_tokens: list[int] | None = None  # num_outputs may end a sequence earlier
    first_row_tokens: int = 0
    looks_ahead: bool = False  # who has ended with a step is known when the next one is launched

    steps: list[Step] = field(init=False, default_factory=list)
    finished: list[Sequence] = field(init=False, default_factory=list)
    num_computed_tokens: int = field(init=False, default=0)
    unread: list[Sequence] = field(init=False, default_factory=list)  # have ended with the last step

    def __post_init__(self) -> None:
        limits = self.max_tokens or self.num_outputs
        rows = [
            Prompt(
                index,
                np.array(ids, np.int32),
                # A temperature: greedy duplicates would be collapsed.
                SamplingParams(max_tokens=limits[index], temperature=1.0, n=self.n),
                key=index,
                priority=self.priorities[index] if self.priorities else 0.0,
            )
            for index, ids in enumerate(self.prompts)
        ]
        plan = WindowPlanner(FakeTokenizer(), 10_000, self.policy, prefix_sharing=self.sharing).plan(rows)
        self.sequences = list(plan.sequences)
        self.pool = BlockPool(self.num_blocks)
        self.cache = TreeCache(self.pool, self.block_size, plan.nodes)
        self.scheduler = Scheduler(
            plan.sequences, self.cache, self.pool, self.max_batch_tokens, self.max_num_seqs, self.first_row_tokens
        )
        self.kv = np.full(self.num_blocks * self.block_size, -1)  # the history of tokens, hashed, that a slot holds

    def step(self) -> Step:
        step = self.scheduler.schedule(may_preempt=not self.unread)
        if step is None or not step.scheduled:
            self._take(self.unread)
            self.unread = []
            step = self.scheduler.schedule()
            assert step is not None
            if not step.scheduled:
                return step
        self.steps.append(step)
        assert 0 < step.num_tokens <= self.max_batch_tokens
        assert step.num_tokens == sum(num_tokens for _, num_tokens in step.scheduled)
        assert len(self.scheduler.running) <= self.max_num_seqs
        assert len({id(seq) for seq, _ in step.scheduled}) == len(step.scheduled)
        blocks = self.kv.reshape(-1, self.block_size)
        copied = [(blocks[source].copy(), target) for source, target in step.copies]
        for block in step.taken:
            blocks[block] = -1
        for content, target in copied:
            blocks[target] = content
        for seq, num_tokens in step.scheduled:
            self._compute(seq, num_tokens)
        ended = [seq for seq, num_tokens in step.scheduled if self._advance(seq, num_tokens)]
        if self.looks_ahead:
            ended, self.unread = self.unread, ended
        self._take(ended)
        self.scheduler.check_integrity()
        return step

    def _advance(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether the sequence ends with the step."""
        self.scheduler.on_computed(seq, num_tokens)
        if seq.num_computed < seq.num_tokens:
            return False
        seq.append(1000 * (seq.order + 1) + seq.num_output)
        if self.looks_ahead and seq.num_output == seq.max_tokens:
            self.scheduler.finish(seq)
        return seq.num_output == self.num_outputs[seq.prompt.row_index]

    def _take(self, ended: list[Sequence]) -> None:
        for seq in ended:
            if seq.is_running:
                self.scheduler.finish(seq)
            self.finished.append(seq)

    def _compute(self, seq: Sequence, num_tokens: int) -> None:
        """Store the KV of the next tokens, after checking that all KV before them is the sequence's own history."""
        assert num_tokens >= 1
        end = seq.num_computed + num_tokens
        assert end <= seq.num_tokens
        positions = np.arange(end)
        slots = np.array(seq.blocks)[positions // self.block_size] * self.block_size + positions % self.block_size
        history = [hash(tuple(seq.tokens[: position + 1].tolist())) for position in positions]
        assert self.kv[slots[: seq.num_computed]].tolist() == history[: seq.num_computed], "another row's KV"
        self.kv[slots[seq.num_computed :]] = history[seq.num_computed :]
        self.num_computed_tokens += num_tokens

    def run(self, max_steps: int = 100_000) -> Drive:
        while self.scheduler.has_work() or self.unread:
            self.step()
            assert len(self.steps) <= max_steps, "does not come to an end"
        assert sorted(map(id, self.finished)) == sorted(map(id, self.sequences)), "a sequence was lost or ended twice"
        assert self.pool.num_used == 0
        return self

    def admitted(self) -> list[int]:
        """Rows in the order of their first admission."""
        rows = [seq.prompt.row_index for step in self.steps for seq, _ in step.admitted]
        return list(dict.fromkeys(rows))


def blocks_needed(prompt: list[int], max_tokens: int, block_size: int = BLOCK) -> int:
    return -(-(len(prompt) + max_tokens - 1) // block_size)


@st.composite
def families(draw: st.DrawFn) -> list[list[int]]:
    """Prompts of which many are continuations, prefixes or copies of others."""
    prompts: list[list[int]] = []
    for index in range(draw(st.integers(1, 14))):
        stem: list[int] = []
        if prompts and draw(st.integers(0, 3)):
            other = prompts[draw(st.integers(0, index - 1))]
            stem = other[: draw(st.integers(0, len(other)))]
        tail = draw(st.lists(st.integers(0, 3), min_size=0 if stem else 1, max_size=9))
        prompts.append(stem + tail)
    return prompts


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompts=families(),
    data=st.data(),
    max_batch_tokens=st.integers(1, 20),
    max_num_seqs=st.integers(1, 6),
    policy=st.sampled_from(["prefix", "fcfs", "priority"]),
    sharing=st.booleans(),
    n=st.integers(1, 2),
    looks_ahead=st.booleans(),
)
def test_everything_runs_to_its_end(
    prompts: list[list[int]],
    data: st.DataObject,
    max_batch_tokens: int,
    max_num_seqs: int,
    policy: Policy,
    sharing: bool,
    n: int,
    looks_ahead: bool,
) -> None:
    max_tokens = [data.draw(st.integers(1, 9)) for _ in prompts]
    num_outputs = [data.draw(st.integers(1, most)) for most in max_tokens]
    least = max(blocks_needed(prompt, most) for prompt, most in zip(prompts, max_tokens, strict=True))
    drive = Drive(
        prompts,
        num_outputs,
        num_blocks=least + data.draw(st.sampled_from([0, 0, 1, 2, 5, 40])),
        max_batch_tokens=max_batch_tokens,
        max_num_seqs=max_num_seqs,
        policy=policy,
        priorities=[data.draw(st.integers(0, 2)) for _ in prompts],
        sharing=sharing,
        n=n,
        max_tokens=max_tokens,
        looks_ahead=looks_ahead,
    )
    drive.run()
    for seq in drive.finished:
        most, wanted = max_tokens[seq.prompt.row_index], num_outputs[seq.prompt.row_index]
        assert seq.num_output - wanted in ((0, 1) if looks_ahead and wanted < most else (0,))
        assert seq.tokens[: seq.num_prompt].tolist() == prompts[seq.prompt.row_index]


@settings(max_examples=100, deadline=None)
@given(prompts=families(), max_batch_tokens=st.integers(1, 20), max_num_seqs=st.integers(1, 6))
def test_with_room_every_shared_token_is_computed_once(
    prompts: list[list[int]], max_batch_tokens: int, max_num_seqs: int
) -> None:
    drive = Drive(
        prompts, [1] * len(prompts), num_blocks=200, max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs
    )
    drive.run()
    unique = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    # A row whose whole prompt is there still computes its last token, which gives the first output token.
    num_whole = sum(seq.num_cached == seq.num_prompt - 1 for seq in drive.finished)
    assert len(unique) <= drive.num_computed_tokens <= len(unique) + num_whole


def test_blocks_are_shared_whole_and_the_rest_is_copied() -> None:
    stem = [1, 2, 3, 4, 5, 6]  # one block and a half
    drive = Drive([[*stem, 7], [*stem, 8, 9]], [3, 2], num_blocks=20)
    first = drive.step()
    assert [(seq.prompt.row_index, num) for seq, num in first.scheduled] == [(0, 7)], "the second waits for the stem"
    second = drive.step()
    one, two = (seq for seq, _ in second.scheduled)
    assert one.blocks == [0, 1]
    assert two.blocks == [0, 2]
    assert second.copies == [(1, 2)]
    assert second.taken == [2]
    assert two.num_cached == 6
    assert [(seq.prompt.row_index, num) for seq, num in second.scheduled] == [(0, 1), (1, 2)]
    drive.run()


def test_a_span_that_ends_at_a_block_border_needs_no_copy() -> None:
    stem = list(range(8))
    drive = Drive([[*stem, 8], [*stem, 9]], [3, 3], num_blocks=20)
    drive.step()
    step = drive.step()
    assert step.copies == []
    assert [seq.blocks for seq, _ in step.scheduled] == [[0, 1, 2], [0, 1, 3]]


def test_a_child_node_lies_over_the_tail_block_of_its_parent() -> None:
    # Spans [0, 6) and [6, 9), as in the docstring of the tree cache; a row that leaves after each.
    drive = Drive(
        [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8, 8, 8, 1], [1, 2, 3, 4, 5, 6, 8, 8, 8, 2]], [9, 9, 9], 20
    )
    drive.step()
    step = drive.step()  # the second row computes [6, 9) and the third waits for it
    assert step.copies == [(1, 2)]
    step = drive.step()
    _, second, third = (seq for seq, _ in step.scheduled)
    assert second.blocks == [0, 2, 3]
    assert third.blocks == [0, 2, 5], "block 4 went to the first row, which has grown"
    assert step.copies == [(3, 5)]
    assert third.num_cached == 9


def test_a_full_hit_computes_the_last_token_again() -> None:
    drive = Drive([[1, 2, 3, 4], [1, 2, 3, 4]], [2, 2], num_blocks=9)
    drive.step()
    step = drive.step()
    assert [(seq.prompt.row_index, num) for seq, num in step.scheduled] == [(0, 1), (1, 1)]
    assert step.scheduled[1][0].num_cached == 3
    assert step.copies == [(0, step.scheduled[1][0].blocks[0])]


def test_shared_blocks_are_given_back_when_the_last_row_has_taken_them() -> None:
    stem = list(range(8))
    drive = Drive([[*stem, 8], [*stem, 9], [*stem, 10]], [1, 1, 20], num_blocks=20, max_num_seqs=1, policy="fcfs")
    drive.step()
    assert drive.pool.num_used == 2, "the first row is done, its stem is kept"
    drive.step()
    assert drive.pool.num_used == 2
    drive.step()
    assert drive.cache.held() == []
    assert drive.pool.num_used == 3, "the last row's own"


def test_no_sharing_without_prefix_sharing() -> None:
    drive = Drive([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], [1, 1], num_blocks=20, sharing=False).run()
    assert drive.num_computed_tokens == 10
    assert len(drive.steps) == 1


def test_prefix_order_goes_depth_first_fcfs_as_given_and_priority_highest_first() -> None:
    prompts = [[1, 1, 1], [2, 2], [1, 1, 2], [2, 3], [0]]
    priorities = [0.0, 1.0, 1.0, 5.0, -1.0]
    found = {
        policy: Drive(prompts, [1] * 5, 20, max_num_seqs=1, policy=policy, priorities=priorities).run().admitted()
        for policy in ("prefix", "fcfs", "priority")
    }
    assert found == {"prefix": [4, 0, 2, 1, 3], "fcfs": [0, 1, 2, 3, 4], "priority": [3, 2, 1, 0, 4]}


def test_decodes_go_before_prompt_chunks() -> None:
    drive = Drive([[1], [2] * 30], [10, 1], num_blocks=30, max_batch_tokens=8)
    assert [num for _, num in drive.step().scheduled] == [1, 7]
    for _ in range(3):
        step = drive.step()
        assert [(seq.prompt.row_index, num) for seq, num in step.scheduled] == [(0, 1), (1, 7)]
    assert [num for _, num in drive.step().scheduled] == [1, 2]


def test_the_first_row_ends_after_small_steps() -> None:
    drive = Drive([[1] * 20, [2] * 50, [3] * 50], [5] * 3, num_blocks=90, max_batch_tokens=64, first_row_tokens=8)
    drive.run()
    assert [step.num_tokens for step in drive.steps[:6]] == [20, 8, 8, 8, 8, 64]
    assert drive.finished[0].prompt.row_index == 0


def test_a_long_first_row_is_not_taken_through_in_small_steps() -> None:
    drive = Drive([[1] * 20, [2] * 50], [5, 5], 90, max_tokens=[1000, 5], first_row_tokens=8)
    assert drive.step().num_tokens == 64


def test_a_first_row_that_is_preempted_is_not_waited_for() -> None:
    drive = Drive([[1] * 8, [2] * 8], [30, 30], num_blocks=10, first_row_tokens=8)
    drive.run()
    assert any(step.preempted for step in drive.steps)
    assert len(drive.finished) == 2


def test_a_budget_below_max_num_seqs_bounds_the_running_rows() -> None:
    drive = Drive([[i] for i in range(6)], [5] * 6, num_blocks=30, max_batch_tokens=3, max_num_seqs=6)
    assert drive.scheduler.max_num_seqs == 3
    drive.run()
    # Each row, once running, advances in every step until it ends.
    for seq in drive.sequences:
        places = [i for i, step in enumerate(drive.steps) if any(one is seq for one, _ in step.scheduled)]
        assert places == list(range(places[0], places[0] + 5))


def test_the_row_admitted_last_is_preempted_and_goes_first_again() -> None:
    # Three rows of one block each; every row grows to three blocks, and there are five.
    drive = Drive([[1, 1, 1], [2, 2, 2], [3, 3, 3], [4, 4, 4]], [9, 9, 9, 9], num_blocks=6, max_num_seqs=3)
    preempted: list[int] = []
    while not preempted:
        preempted = [seq.prompt.row_index for seq in drive.step().preempted]
    assert preempted == [2]
    assert drive.steps[-1].admitted == []
    assert drive.scheduler.waiting_in_order()[0].prompt.row_index == 2
    drive.run()
    assert drive.admitted() == [0, 1, 2, 3]
    assert Counter(seq.num_preempted > 0 for seq in drive.finished)[True] >= 1


def test_of_kept_prefixes_the_one_needed_latest_is_evicted() -> None:
    """Order of execution: a, b, c, filler, b', a' ... by fcfs, with rooms for the stems but not for the filler."""
    a, b, c = [1] * 4, [2] * 4, [3] * 4
    filler = [9] * 8
    prompts = [[*a, 5], [*b, 5], [*c, 5], filler, [*b, 6], [*c, 6], [*a, 6]]
    drive = Drive(prompts, [1] * 7, num_blocks=4, max_num_seqs=1, policy="fcfs")
    for _ in range(3):
        drive.step()
    kept = {tuple(span.tolist()): node for node, span in _kept_spans(drive).items()}
    assert set(kept) == {tuple(a), tuple(b), tuple(c)}
    drive.step()  # the filler needs two blocks, one is free
    assert {tuple(span.tolist()) for span in _kept_spans(drive).values()} == {tuple(b), tuple(c)}
    drive.run()
    assert [seq.num_cached for seq in drive.finished] == [0, 0, 0, 0, 4, 4, 0]


def _kept_spans(drive: Drive) -> dict[int, np.ndarray]:
    spans = {}
    for index in drive.cache.computed:
        node = drive.cache.nodes[index]
        seq = next(seq for seq in drive.sequences if index in seq.path)
        spans[index] = seq.prompt.token_ids[node.start : node.end]
    return spans


def test_a_block_that_only_nodes_hold_can_always_be_freed() -> None:
    """Parent and child in one block: neither frees it alone, and the next row needs the whole pool."""
    prompts = [[1, 2, 5], [1, 9, 9, 9, 9, 9, 9, 9], [1, 2, 6], [1, 7]]
    for max_num_seqs in (1, 2):
        drive = Drive(prompts, [1, 1, 1, 1], num_blocks=2, max_num_seqs=max_num_seqs, policy="fcfs")
        drive.run(max_steps=50)


def test_a_row_alone_may_use_the_whole_pool() -> None:
    drive = Drive([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]], [8, 7], num_blocks=3).run()
    assert len(drive.finished) == 2


def test_long_prompt_does_not_starve_behind_a_stream_of_short_ones() -> None:
    prompts = [[7] * 40, *([i, i] for i in range(30))]
    drive = Drive(prompts, [1] * 31, num_blocks=14, max_batch_tokens=4, max_num_seqs=3, policy="fcfs").run()
    assert drive.finished.index(drive.sequences[0]) < 25


def test_waiting_rows_are_admitted_in_order_after_the_row_they_waited_for_is_preempted() -> None:
    # Row 1 computes a stem that 2 and 3 wait for and loses its blocks half-way; it still goes before them.
    stem = [2] * 12
    drive = Drive([[1], [*stem, 5], [*stem, 6], [*stem, 7]], [14, 1, 1, 1], num_blocks=4, max_batch_tokens=3)
    drive.run()
    assert drive.sequences[1].num_preempted > 0
    first = [seq.prompt.row_index for step in drive.steps for seq, _ in step.admitted]
    assert first == sorted(first), "each admission, the repeated ones too, in the order of execution"


@settings(max_examples=100, deadline=None)
@given(data=st.data(), prompts=families())
def test_admission_without_pressure_follows_the_order(data: st.DataObject, prompts: list[list[int]]) -> None:
    """Without sharing nobody is parked: rows start exactly in the order given."""
    priorities = [data.draw(st.integers(0, 3)) for _ in prompts]
    for policy in ("fcfs", "priority"):
        drive = Drive(prompts, [2] * len(prompts), 200, 5, 3, policy, priorities, sharing=False).run()
        places = range(len(prompts))
        expected = sorted(places, key=lambda row: -priorities[row]) if policy == "priority" else list(places)
        assert drive.admitted() == expected


def test_where_somebody_would_be_preempted_there_is_no_step_without_leave() -> None:
    drive = Drive([[1, 2, 3], [4, 5, 6]], [9, 9], num_blocks=3, sharing=False)
    drive.step()
    drive.step()
    before = [list(seq.blocks) for seq in drive.scheduler.running]
    assert drive.scheduler.schedule(may_preempt=False) is None
    assert all(seq.is_running for seq in drive.sequences)
    assert [seq.blocks[:1] for seq in drive.scheduler.running] == before
    drive.scheduler.check_integrity()
    step = drive.step()
    assert [seq.prompt.row_index for seq in step.preempted] == [1]
    drive.run()


def test_starting_over_gives_all_blocks_back_and_loses_nobody() -> None:
    stem = [1, 2, 3, 4, 5]
    prompts = [[*stem, 6], [*stem, 7], [*stem, 8, 9], [3, 3, 3]]
    drive = Drive(prompts, [1, 6, 6, 6], num_blocks=40, policy="fcfs", max_num_seqs=2, max_tokens=[9, 9, 9, 9])
    drive.step()
    drive.step()
    (finished,) = drive.finished
    assert drive.cache.computed, "the third row waits for the stem"
    running = list(drive.scheduler.running)
    assert drive.scheduler.start_over([finished]) == running
    assert drive.pool.num_used == 0
    assert not drive.cache.computed
    assert [seq.prompt.row_index for seq in drive.scheduler.waiting_in_order()] == [0, 1, 2, 3]
    drive.scheduler.check_integrity()
    drive.finished.clear()
    drive.num_outputs = [2, 6, 6, 6]  # it has one token already
    drive.run()
