"""Windows that follow each other without a gap: each row equals its solo run, and nothing of the past is kept."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_rows import mixed_rows, outcome
from tiny_models import INSTRUCTION_SETS, forced_engine, kv_bytes, tiny_engine

from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.engine.feed import Feed
from batchinfer.types import Completion, ErrorCode, Prompt, SamplingParams

pytestmark = pytest.mark.usefixtures("both_ways")

Key = tuple[int, int]
SMALL = EngineConfig(max_batch_tokens=24, max_num_seqs=7, block_size=16)


def windows_of(rows: list[Prompt], size: int) -> list[list[Prompt]]:
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


def collect(completions: Iterator[Completion]) -> dict[Key, Completion]:
    found: dict[Key, Completion] = {}
    for completion in completions:
        key = (completion.row_index, completion.sample_index)
        assert key not in found, f"{key} came twice"
        found[key] = completion
    return found


def outcomes(found: dict[Key, Completion]) -> dict[Key, dict[str, Any]]:
    return {key: outcome(completion) for key, completion in found.items()}


def plain_rows(lengths: Sequence[int], max_tokens: Sequence[int]) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [
        Prompt(
            i, rng.integers(6, 256, length).astype(np.int32), SamplingParams(max_tokens=limit, ignore_eos=True), key=i
        )
        for i, (length, limit) in enumerate(zip(lengths, max_tokens, strict=True))
    ]


@pytest.mark.parametrize("kernels", [None, *INSTRUCTION_SETS[:1]])
@pytest.mark.parametrize("size", [1, 7, 30, 64])
@pytest.mark.parametrize("num_blocks", [14, 4096], ids=["tiny-pool", "large-pool"])
def test_rows_in_windows_equal_rows_in_one(kernels: str | None, size: int, num_blocks: int) -> None:
    dtype = torch.float32 if kernels is None else torch.bfloat16
    rows = mixed_rows()
    expected = outcomes(collect(tiny_engine(EngineConfig(block_size=64), dtype=dtype, kernels=kernels).run(rows)))
    engine = tiny_engine(SMALL, dtype=dtype, kernels=kernels)
    engine.config = replace(SMALL, kv_memory_bytes=kv_bytes(engine, num_blocks))
    assert outcomes(collect(engine.run_windows(windows_of(rows, size)))) == expected
    stats = engine.stats
    assert (stats.num_rows, stats.num_rows_done, stats.num_rows_failed) == (64, 64, 0)
    assert (stats.num_kv_blocks_used, stats.num_seqs_waiting, stats.max_output_tokens_left) == (0, 0, 0)
    assert stats.num_output_tokens_unfinished == 0


def test_a_window_starts_before_the_one_before_it_has_ended() -> None:
    rows = plain_rows([8] * 12, [60, 4, 4, 4] * 3)  # each window of four has a long row, its tail
    engine = tiny_engine(replace(SMALL, max_num_seqs=4, max_batch_tokens=64))
    order = [completion.row_index for completion in engine.run_windows(windows_of(rows, 4))]
    assert order.index(5) < order.index(0), "the second window's short rows run beside the first one's tail"
    overlapped = engine.stats.num_steps
    apart = 0
    for window in windows_of(rows, 4):
        collect(engine.run(window))
        apart += engine.stats.num_steps
    assert overlapped < 0.7 * apart


def test_a_window_that_needs_a_larger_pool_gets_it() -> None:
    rows = plain_rows([8, 8, 200, 8], [4, 4, 40, 4])
    engine = tiny_engine(SMALL)
    pools = []
    found = {}
    for completion in engine.run_windows(windows_of(rows, 1)):
        pools.append(engine.stats.num_kv_blocks)
        found[completion.row_index, 0] = completion
    assert pools[0] < pools[2]
    assert pools[3] == pools[2], "it is not made smaller again"
    alone = {key: one for row in rows for key, one in collect(tiny_engine(SMALL).run([row])).items()}
    assert outcomes(found) == outcomes(alone)


def test_refused_rows_and_empty_windows() -> None:
    rows = plain_rows([8, 0, 300, 8], [4] * 4)
    windows = [[], rows[:2], [], [rows[2]], [], [rows[3]], []]
    engine = tiny_engine(SMALL)
    found = collect(engine.run_windows(windows))
    codes = {key[0]: one.error and one.error.code for key, one in found.items()}
    assert codes == {0: None, 1: ErrorCode.PROMPT_EMPTY, 2: ErrorCode.PROMPT_TOO_LONG, 3: None}
    assert (engine.stats.num_rows, engine.stats.num_rows_done, engine.stats.num_rows_failed) == (4, 4, 2)
    assert collect(engine.run_windows([])) == {}


def test_what_reading_raises_comes_in_its_turn_and_the_engine_goes_on() -> None:
    rows = plain_rows([8] * 4, [4] * 4)

    def windows() -> Iterator[list[Prompt]]:
        yield rows[:2]
        raise OSError("the disk is gone")

    engine = tiny_engine(SMALL)
    done = []
    with pytest.raises(OSError, match="the disk is gone"):
        done += [completion.row_index for completion in engine.run_windows(windows())]
    assert len(collect(engine.run(rows))) == 4


def test_closing_stops_the_reading() -> None:
    closed = threading.Event()

    def windows() -> Iterator[list[Prompt]]:
        try:
            while True:
                yield plain_rows([8], [30])
        finally:
            closed.set()

    engine = tiny_engine(SMALL)
    run = engine.run_windows(windows())
    next(run)
    run.close()  # type: ignore[attr-defined]
    assert closed.wait(5)
    assert not [thread for thread in threading.enumerate() if thread.name == "batchinfer-feed" and thread.is_alive()]
    assert len(collect(engine.run(plain_rows([8], [4])))) == 1


def test_nothing_of_a_window_is_kept_when_it_has_ended() -> None:
    engine = forced_engine([70, 71], num_prompt=8)
    engine.config = EngineConfig(max_num_seqs=4)
    engine.check_integrity = False
    alive: dict[int, weakref.ref[np.ndarray]] = {}

    def windows() -> Iterator[list[Prompt]]:
        for window in range(20):
            rows = [
                Prompt(10 * window + i, np.array([1, 1, 1, 1, 1, 1, window, i], np.int32), SamplingParams(max_tokens=2))
                for i in range(10)
            ]
            alive[window] = weakref.ref(rows[0].token_ids)
            yield rows

    run = engine.run_windows(windows())
    for completion in run:
        window = completion.row_index // 10
        del completion
        if window == 15:
            gc.collect()
            kept = [index for index, ref in alive.items() if ref() is not None]
            assert min(kept) >= 14
    assert len(alive) == 20


def test_the_nodes_of_ended_windows_are_forgotten() -> None:
    engine = tiny_engine(SMALL)
    stem = list(range(10, 40))
    rows = [
        Prompt(i, np.array([*stem, i], np.int32), SamplingParams(max_tokens=3, ignore_eos=True), key=i)
        for i in range(40)
    ]
    sizes = []
    from batchinfer.engine import core

    seen: list[core.EngineRun] = []
    original = core.EngineRun.step

    def step(self: core.EngineRun) -> list[Completion]:
        seen[:] = [self]
        sizes.append(len(self.cache.nodes))
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.EngineRun, "step", step)
        collect(engine.run_windows(windows_of(rows, 8)))
    assert max(sizes) <= 2, "one shared node in each of the windows that overlap"
    assert not seen[0].cache.nodes


def with_done(rows: list[Prompt], done: set[Key]) -> list[Prompt]:
    return [
        replace(row, done_samples=frozenset(sample for index, sample in done if index == row.row_index)) for row in rows
    ]


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), share=st.floats(0, 1), sharing=st.booleans())
def test_samples_that_are_done_are_not_run_again_and_change_no_other(seed: int, share: float, sharing: bool) -> None:
    rows = mixed_rows(24)
    engine = tiny_engine(replace(SMALL, max_num_seqs=16, max_batch_tokens=200, prefix_sharing=sharing))
    whole = collect(engine.run(rows))
    rng = random.Random(seed)
    done = {key for key in whole if rng.random() < share}
    rest = collect(engine.run(with_done(rows, done)))
    assert set(rest) == set(whole) - done
    assert all(rest[key] == whole[key] for key in rest), "num_cached_tokens too: it is a fact of the window"
    num_left = len({row for row, _ in rest})
    assert (engine.stats.num_rows, engine.stats.num_rows_done) == (num_left, num_left)


@pytest.mark.parametrize("num_blocks", [14, 4096])
def test_the_number_of_cached_tokens_is_a_fact_of_the_window(num_blocks: int) -> None:
    rows = mixed_rows()
    expected = {key: one.num_cached_tokens for key, one in collect(tiny_engine().run(rows)).items()}
    assert sum(expected.values()) > 1000
    engine = tiny_engine(SMALL)
    engine.config = replace(SMALL, kv_memory_bytes=kv_bytes(engine, num_blocks))
    assert {key: one.num_cached_tokens for key, one in collect(engine.run(rows)).items()} == expected


def test_a_refused_row_that_is_done_is_not_refused_again() -> None:
    rows = plain_rows([0, 8], [4, 4])
    engine = tiny_engine(SMALL)
    found = collect(engine.run([replace(rows[0], done_samples=frozenset({0})), rows[1]]))
    assert list(found) == [(1, 0)]


class LittleMemory:
    """A model whose forward pass has no memory for more than `most` tokens."""

    def __init__(self, engine: Engine, most: int) -> None:
        self._forward = engine.model.forward
        self.most = most
        self.sizes: list[int] = []

    def __call__(self, inputs: Any, kv: Any) -> torch.Tensor:
        self.sizes.append(len(inputs.token_ids))
        if len(inputs.token_ids) > self.most:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")
        return self._forward(inputs, kv)


def test_a_step_without_memory_halves_the_budget_and_changes_nothing() -> None:
    rows = mixed_rows(40)
    expected = outcomes(collect(tiny_engine().run(rows)))
    engine = tiny_engine(EngineConfig(max_batch_tokens=256, max_num_seqs=32))
    engine.model.forward = model = LittleMemory(engine, most=40)  # type: ignore[method-assign]
    assert outcomes(collect(engine.run(rows))) == expected
    assert engine.stats.num_steps_without_memory == 3, "256, 128, 64"
    assert max(model.sizes[-20:]) <= 32


def test_without_memory_for_the_least_step_the_run_ends() -> None:
    engine = tiny_engine(EngineConfig(max_batch_tokens=64))
    engine.model.forward = LittleMemory(engine, most=0)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        collect(engine.run(plain_rows([30, 30], [3, 3])))


def test_another_error_is_not_taken_for_missing_memory() -> None:
    engine = tiny_engine()

    def fails(inputs: Any, kv: Any) -> torch.Tensor:
        raise RuntimeError("shapes do not fit")

    engine.model.forward = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        collect(engine.run(plain_rows([30], [3])))
    assert engine.stats.num_steps_without_memory == 0


def test_the_feed_is_one_item_ahead_and_no_more() -> None:
    taken = []

    def items() -> Iterator[int]:
        for item in range(5):
            taken.append(item)
            yield item

    feed: Feed[int, int] = Feed(items(), lambda item: 10 * item)
    assert feed.take(wait=True) == 0
    assert feed.take(wait=True) == 10
    for _ in range(100):
        if len(taken) == 3:
            break
        threading.Event().wait(0.01)
    threading.Event().wait(0.05)
    assert taken == [0, 1, 2]
    assert [feed.take(wait=True) for _ in range(4)] == [20, 30, 40, None]
    assert feed.is_at_end
    feed.close()


def test_the_feed_does_not_wait_unless_told() -> None:
    gate = threading.Event()

    def items() -> Iterator[int]:
        gate.wait(10)
        yield 1

    feed: Feed[int, int] = Feed(items(), lambda item: item)
    assert feed.take(wait=False) is None
    assert not feed.is_at_end
    gate.set()
    assert feed.take(wait=True) == 1
    assert feed.take(wait=True) is None
    assert feed.is_at_end
