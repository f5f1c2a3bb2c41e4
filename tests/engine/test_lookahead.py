"""Steps launched before the one before them is read: when the host reads what, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeTokenizer
from mixed_rows import mixed_rows, outcome
from tiny_models import EOS, SMALL_SPEC, LetterTokenizer, forced_engine, kv_bytes, random_weights, tiny_engine
from torch import Tensor

from batchinfer.attention.backend import ReferenceAttention
from batchinfer.config import EngineConfig
from batchinfer.engine import draws, sampler
from batchinfer.engine.draws import MAX_LOGITS, MAX_LOGITS_GPU, rows_at_a_time
from batchinfer.engine.engine import Engine
from batchinfer.models.decoder import Decoder, GreedyDraw, KVCache, StepInputs
from batchinfer.types import ErrorCode, Prompt, SamplingParams

Outcomes = dict[tuple[int, int], dict[str, Any]]


def run(engine: Engine, rows: list[Prompt], *, ahead: bool = True) -> Outcomes:
    engine.looks_ahead = ahead
    found = {(one.row_index, one.sample_index): outcome(one) for one in engine.run(rows)}
    stats = engine.stats
    assert (stats.num_kv_blocks_used, stats.num_output_tokens_unfinished, stats.max_output_tokens_left) == (0, 0, 0)
    assert stats.num_output_tokens == sum(len(values["token_ids"]) for values in found.values())
    return found


def plain_rows(count: int, **params: Any) -> list[Prompt]:
    rng = np.random.default_rng(0)
    values = {"max_tokens": 12, **params}
    return [
        Prompt(i, rng.integers(8, 256, 5 + i).astype(np.int32), SamplingParams.from_mapping(values), key=i)
        for i in range(count)
    ]


# When the host reads --------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """How many steps were launched, and at which count something of which step was read."""

    num_launched: int = 0
    reads: list[tuple[int, int]] = field(default_factory=list)  # (step, steps launched by then)


CLOCK = Clock()
T = torch.Tensor
#: What needs values on the host.
READS = {
    *(T.item, T.tolist, T.numpy, T.cpu, T.__bool__, T.__int__, T.__float__, T.__index__, T.__array__, T.__contains__),
    *(T.nonzero, T.unique, T.equal, T.allclose, T.masked_select, torch.nonzero, torch.unique, torch.equal),
}


class LateTensor(torch.Tensor):
    """A result of the device: it notes when the host reads it, or anything made of it."""

    of_step: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        steps = [value.of_step for value in _flat((*args, *(kwargs or {}).values())) if isinstance(value, LateTensor)]
        by_mask = func in (T.__getitem__, T.__setitem__) and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in _flat([args[1]])
        )
        if (func in READS or by_mask) and steps:
            CLOCK.reads.append((max(steps), CLOCK.num_launched))
        result = super().__torch_function__(func, types, args, kwargs or {})
        for value in _flat([result]):
            if isinstance(value, LateTensor) and steps:
                value.of_step = max(steps)
        return result


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _flat(value)
        else:
            yield value


def late(values: Tensor, step: int) -> Tensor:
    found = values.as_subclass(LateTensor)
    found.of_step = step
    return found


def on_device(values: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return values.as_subclass(torch.Tensor)


class LateModel:
    """A model whose results know when they are read. It draws by itself, as the GPU's does."""

    def __init__(self) -> None:
        self._decoder = Decoder(SMALL_SPEC, random_weights(SMALL_SPEC, torch.float32), ReferenceAttention, 256)
        self.spec, self.dtype, self.device = SMALL_SPEC, self._decoder.dtype, self._decoder.device

    def make_kv(self, num_blocks: int, block_size: int) -> KVCache:
        return self._decoder.make_kv(num_blocks, block_size)

    def forward(self, inputs: StepInputs, kv: KVCache) -> Tensor:
        CLOCK.num_launched += 1
        return late(
            self._decoder.forward(replace(inputs, token_ids=on_device(inputs.token_ids)), kv), CLOCK.num_launched
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)

    def greedy(self, hidden: Tensor, num_ids: int, *, wants_logprobs: bool) -> GreedyDraw:
        logits = self.logits(hidden)
        best = logits[:, :num_ids].max(-1)
        logprobs = best.values - logits.logsumexp(-1) if wants_logprobs else None
        return GreedyDraw(best.indices, logprobs, torch.isfinite(logits).all(-1))

    def draw(self, logits: Tensor, columns: sampler.DrawColumns, *, writes: bool) -> Tensor:
        return late(sampler.draw(on_device(logits), columns, writes=writes), logits.of_step)  # type: ignore[attr-defined]

    def target_logprobs(self, hidden: Tensor, targets: Tensor) -> Any:
        return self._decoder.target_logprobs(hidden, targets)


@pytest.fixture
def clock() -> Clock:
    CLOCK.num_launched = 0
    CLOCK.reads.clear()
    return CLOCK


def late_engine(**options: Any) -> Engine:
    engine = Engine.from_parts(LateModel(), LetterTokenizer(), EOS, 256, EngineConfig(block_size=16, **options))
    engine.check_integrity = True
    return engine


def rows_without_scores() -> list[Prompt]:
    """Penalties, bans, draws, stops, log-probabilities: everything but scores of prompt tokens."""
    return [replace(row, params=replace(row.params, prompt_logprobs=False)) for row in mixed_rows(40)]


@pytest.mark.parametrize("options", [{}, {"max_batch_tokens": 33, "max_num_seqs": 6}], ids=["together", "in chunks"])
def test_nothing_of_a_step_is_read_before_the_next_one_is_launched(clock: Clock, options: dict[str, int]) -> None:
    rows = rows_without_scores()
    found = run(late_engine(**options), rows)
    num_steps = clock.num_launched
    assert {step for step, _ in clock.reads} == set(range(1, num_steps + 1)), "every step is read"
    early = {step for step, launched in clock.reads if launched <= step}
    assert early == {num_steps}, "behind the last step there is none"
    assert max(launched - step for step, launched in clock.reads) == 1, "one step ahead and no more"
    assert run(late_engine(**options), rows, ahead=False) == found


def test_without_looking_ahead_each_step_is_read_before_the_next(clock: Clock) -> None:
    """So the double sees what it must see."""
    run(late_engine(), rows_without_scores(), ahead=False)
    assert all(step == launched for step, launched in clock.reads)
    assert len({step for step, _ in clock.reads}) == clock.num_launched


def test_steps_that_score_prompt_tokens_are_read_at_once(clock: Clock) -> None:
    """A node hands its scores on to the next sequence on the host."""
    rows = plain_rows(6, ignore_eos=True) + [
        replace(row, row_index=row.row_index + 6, params=replace(row.params, prompt_logprobs=True))
        for row in plain_rows(6, ignore_eos=True)
    ]
    found = run(late_engine(max_batch_tokens=24), rows)
    early = {step for step, launched in clock.reads if launched <= step}
    assert 1 < len(early) < clock.num_launched / 2
    assert found == run(late_engine(max_batch_tokens=24), rows, ahead=False)


# What it costs --------------------------------------------------------------------------------------------------------


def test_rows_that_reach_their_limit_cost_nothing() -> None:
    """It is known beforehand, so places and blocks go on at the same step as without looking ahead."""
    rows = plain_rows(9, ignore_eos=True)
    counts = []
    for ahead in (False, True):
        engine = tiny_engine(EngineConfig(max_num_seqs=3, block_size=16))
        run(engine, rows, ahead=ahead)
        counts.append((engine.stats.num_steps, engine.stats.num_tokens_discarded))
    assert counts[0] == counts[1]
    assert counts[0][1] == 0


@pytest.mark.parametrize("stop", [{"stop_token_ids": [72]}, {"stop": ["H"]}, {}], ids=["id", "string", "EOS"])
def test_a_row_that_stops_is_computed_once_too_often(stop: dict[str, Any]) -> None:
    engine = forced_engine([70, 71, 72, 2 if not stop else 73, 74, 75], num_prompt=3)
    rows = [
        Prompt(i, np.array([9, 9, i], np.int32), SamplingParams.from_mapping({"max_tokens": 6, **stop}), key=i)
        for i in range(5)
    ]
    found = run(engine, rows)
    assert all(values["token_ids"] == ([70, 71, 72, 2] if not stop else [70, 71, 72]) for values in found.values())
    assert engine.stats.num_tokens_discarded == 5
    run(engine, rows, ahead=False)
    assert engine.stats.num_tokens_discarded == 0


def test_completions_come_while_others_run() -> None:
    engine = tiny_engine()
    engine.looks_ahead = True
    rows = plain_rows(4, ignore_eos=True)
    rows[2] = replace(rows[2], params=replace(rows[2].params, max_tokens=2))
    run_ = engine.run(rows)
    assert next(run_).row_index == 2
    assert engine.stats.num_seqs_running == 3
    assert len(list(run_)) == 3


# What turns out in the step before ------------------------------------------------------------------------------------


def test_a_sequence_is_preempted_only_when_it_is_known_who_has_ended() -> None:
    """Two rows, room for one and a bit: the first one stops just where the second would be preempted."""
    counts = []
    for ahead in (False, True):
        engine = forced_engine([70] * 13 + [2] + [70] * 20, tokenizer=FakeTokenizer(), num_prompt=3)
        engine.config = EngineConfig(block_size=16, prefix_sharing=False)
        engine.config = replace(engine.config, kv_memory_bytes=kv_bytes(engine, 3))
        rows = [
            Prompt(0, np.array([9, 9, 9], np.int32), SamplingParams(max_tokens=30), key=0),
            Prompt(1, np.array([9, 9, 8], np.int32), SamplingParams(max_tokens=30, ignore_eos=True), key=1),
        ]
        found = run(engine, rows, ahead=ahead)
        assert (len(found[0, 0]["token_ids"]), len(found[1, 0]["token_ids"])) == (14, 30)
        counts.append(engine.stats.num_preemptions)
    assert counts == [0, 0]


def test_a_nan_behind_a_row_that_has_ended_harms_nobody() -> None:
    """The end-of-sequence token is never computed, unless ahead: here its KV is NaN, in blocks that others take."""
    weights = random_weights(SMALL_SPEC, torch.float32)
    weights.embed[list(EOS)] = float("nan")
    rows = [replace(row, params=replace(row.params, ignore_eos=False)) for row in mixed_rows(40)]
    rows = [row for row in rows if not set(EOS) & set(row.token_ids.tolist())]
    outcomes = []
    for ahead in (False, True):
        engine = tiny_engine(EngineConfig(block_size=16, max_num_seqs=6, max_batch_tokens=64), weights=weights)
        engine.config = replace(engine.config, kv_memory_bytes=kv_bytes(engine, 14))
        outcomes.append(run(engine, rows, ahead=ahead))
    assert any(values["stop_reason"] in EOS for values in outcomes[0].values())
    assert all(values["error"] is None for values in outcomes[0].values())
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("max_num_seqs", [2, 64])
def test_a_nan_that_was_built_upon_is_computed_again_and_only_once(max_num_seqs: int) -> None:
    weights = random_weights(SMALL_SPEC, torch.float32)
    weights.embed[7] = float("nan")
    stem = list(range(20, 50))
    rows = [
        Prompt(i, np.array([*stem, 7 if i == 0 else 60 + i, 8], np.int32), SamplingParams(max_tokens=9), key=i)
        for i in range(6)
    ]
    # Some reach their limit in the step that is thrown away, and have left the scheduler by then.
    rows += [
        replace(row, row_index=6 + i, params=replace(row.params, max_tokens=1 + i % 4))
        for i, row in enumerate(plain_rows(8, ignore_eos=True))
    ]
    engine = tiny_engine(EngineConfig(block_size=16, policy="fcfs", max_num_seqs=max_num_seqs), weights=weights)
    found = run(engine, rows)
    assert engine.stats.num_tokens_discarded > 0
    assert 0 < engine.stats.num_preemptions <= 13
    errors = [found[i, 0]["error"] for i in range(14)]
    assert errors[0]["code"] == ErrorCode.NON_FINITE_LOGITS
    assert errors[1:] == [None] * 13
    assert found == run(tiny_engine(EngineConfig(block_size=16), weights=weights), rows, ahead=False)


def test_a_row_that_has_ended_where_the_next_step_scores() -> None:
    """That step is not ahead. The row has one token left to draw in it, and is gone."""
    engine = forced_engine([70, 71, 2, 73], num_prompt=3)
    engine.config = EngineConfig(max_num_seqs=2, policy="fcfs", prefix_sharing=False)
    params = [
        SamplingParams(max_tokens=4),
        SamplingParams(max_tokens=3, ignore_eos=True),
        SamplingParams(max_tokens=4, prompt_logprobs=True),
    ]
    rows = [Prompt(i, np.array([9, 9, i], np.int32), one, key=i) for i, one in enumerate(params)]
    found = run(engine, rows)
    assert [found[i, 0]["token_ids"] for i in range(3)] == [[70, 71, 2]] * 3
    assert engine.stats.num_tokens_discarded == 2
    assert found == run(engine, rows, ahead=False)


class FailingModel:
    """Its forward pass has no memory every third time."""

    def __init__(self, engine: Engine) -> None:
        self._forward = engine.model.forward
        self.num_calls = 0

    def __call__(self, inputs: Any, kv: Any) -> Tensor:
        self.num_calls += 1
        if self.num_calls % 3 == 0 and self.num_calls < 20:
            raise MemoryError
        return self._forward(inputs, kv)


@pytest.mark.parametrize("num_blocks", [14, 400])
def test_a_step_without_memory_behind_one_that_runs_changes_nothing(num_blocks: int) -> None:
    rows = mixed_rows(40)
    expected = run(tiny_engine(EngineConfig(block_size=16)), rows, ahead=False)
    engine = tiny_engine(EngineConfig(block_size=16, max_batch_tokens=2048, max_num_seqs=12))
    engine.config = replace(engine.config, kv_memory_bytes=kv_bytes(engine, num_blocks))
    engine.model.forward = FailingModel(engine)  # type: ignore[method-assign]
    assert run(engine, rows) == expected
    assert engine.stats.num_steps_without_memory == 6


def test_without_memory_and_behind_a_nan_at_once() -> None:
    """The step that failed has admitted rows to what the NaN wrote, and copied it."""
    weights = random_weights(SMALL_SPEC, torch.float32)
    weights.embed[7] = float("nan")
    stem = list(range(20, 45))
    rows = [
        Prompt(i, np.array([*stem, 7 if i == 0 else 60 + i], np.int32), SamplingParams(max_tokens=9), key=i)
        for i in range(6)
    ]
    expected = run(tiny_engine(EngineConfig(block_size=16), weights=weights), rows, ahead=False)
    for failing in (2, 3, 4):
        engine = tiny_engine(EngineConfig(block_size=16), weights=weights)
        forward, calls = engine.model.forward, [0]

        def fail(inputs: Any, kv: Any, forward: Any = forward, calls: list[int] = calls, at: int = failing) -> Tensor:
            calls[0] += 1
            if calls[0] == at:
                raise MemoryError
            return forward(inputs, kv)

        engine.model.forward = fail  # type: ignore[method-assign]
        assert run(engine, rows) == expected


def test_a_run_that_is_closed_with_a_step_under_way_leaves_no_pool() -> None:
    """Nobody has looked whether that step wrote NaN."""
    engine = tiny_engine()
    engine.looks_ahead = True
    rows = plain_rows(4, ignore_eos=True)
    rows[0] = replace(rows[0], params=replace(rows[0].params, max_tokens=2))
    run_ = engine.run(rows)
    next(run_)
    run_.close()  # type: ignore[attr-defined]
    assert engine._kv is None
    run(engine, rows)
    assert engine._kv is not None


# Rows at a time -------------------------------------------------------------------------------------------------------


def test_a_gpu_samples_more_rows_at_a_time() -> None:
    class Model:
        spec = replace(SMALL_SPEC, vocab_size=128_256)

        def __init__(self, device: str) -> None:
            self.device = torch.device(device)

    assert rows_at_a_time(Model("cpu")) == MAX_LOGITS // 128_256 == 130  # type: ignore[arg-type]
    assert rows_at_a_time(Model("cuda")) == MAX_LOGITS_GPU // 128_256 == 523  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_that_are_sampled_in_parts(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    rows = rows_without_scores()
    expected = run(tiny_engine(), rows, ahead=False)
    monkeypatch.setattr(draws, "MAX_LOGITS", 17 * SMALL_SPEC.vocab_size)
    assert run(tiny_engine(), rows, ahead=ahead) == expected


def test_ahead_is_for_gpus() -> None:
    assert tiny_engine().looks_ahead is False
