"""Teacher-forced scores out of the engine: the right values, the same bits in any company, nothing computed twice."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import INSTRUCTION_SETS, SMALL_SPEC, kv_bytes, random_weights, tiny_engine
from torch import Tensor

from batchinfer.attention.tree import RaggedBatch
from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.models.decoder import KVCache, StepInputs
from batchinfer.types import (
    Completion,
    ErrorCode,
    FinishReason,
    Prompt,
    RowError,
    SamplingParams,
    ScoreRequest,
    TokenScores,
)

pytestmark = pytest.mark.usefixtures("both_ways")

Outcome = dict[str, Any]
WEIGHTS = random_weights(SMALL_SPEC, torch.float32)
BACKENDS: list[tuple[torch.dtype, str | None]] = [
    (torch.float32, None),
    *((torch.bfloat16, name) for name in (*INSTRUCTION_SETS[:1], None)),
]


def scoring(
    index: int, ids: list[int], *spans: tuple[int, int], next_id: int | None = None, keeps_hidden: bool = False
) -> Prompt:
    """A row that scores `spans` of `ids`; by default all but the first, the last of them being next_id."""
    if next_id is None:
        ids, next_id = ids[:-1], ids[-1]
    request = ScoreRequest(spans or ((1, len(ids) + 1),), next_id, keeps_hidden)
    return Prompt(index, np.array(ids, np.int32), SamplingParams(), score=request)


def mixed_rows() -> list[Prompt]:
    """Scoring rows of shared stems, with all kinds of spans, among rows that generate; duplicates and prefixes."""
    rng = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(6, 256) for _ in range(count)]

    stems = [tokens(length) for length in (1, 16, 40, 64, 97)]
    stems += [stems[2] + tokens(24), stems[4] + tokens(31)]
    rows: list[Prompt] = []
    for index in range(64):
        ids = rng.choice(stems) + (tokens(rng.choice((1, 2, 5, 17, 40))) if rng.random() < 0.8 else [])
        kind = rng.random()
        if kind < 0.15 and rows:
            rows.append(replace(rng.choice(rows), row_index=index))
        elif kind < 0.35:
            params = SamplingParams(
                max_tokens=rng.randint(1, 60),
                temperature=rng.choice((0.0, 0.9)),
                ignore_eos=True,
                prompt_logprobs=rng.random() < 0.5,
            )
            rows.append(Prompt(index, np.array(ids, np.int32), params, key=index))
        else:
            rows.append(scoring(index, ids, *random_spans(rng, len(ids)), next_id=rng.randrange(6, 256)))
            if rng.random() < 0.2:
                rows[-1].score = replace(rows[-1].score, keeps_hidden=True)  # type: ignore[type-var]
    return rows


def random_spans(rng: random.Random, num_tokens: int) -> list[tuple[int, int]]:
    """All tokens, the last few, only the next one, or some here and there."""
    end = num_tokens + 1
    kind = rng.randrange(4)
    if kind < 3:
        return [((1, max(1, end - 4), num_tokens)[kind], end)]
    borders = sorted(rng.sample(range(1, end + 1), min(4, end) // 2 * 2))
    return list(zip(borders[::2], borders[1::2], strict=True))


def outcome(completion: Completion) -> Outcome:
    scores, hidden = completion.scores, completion.hidden
    return {
        "error": completion.error,
        "token_ids": completion.token_ids,
        "prompt_logprobs": completion.prompt_logprobs,
        "reason": completion.finish_reason,
        "scores": None
        if scores is None
        else [scores.logprobs.tobytes(), scores.entropies.tobytes(), list(scores.is_top)],
        "hidden": None if hidden is None else hidden.float().numpy().tobytes(),
    }


def run_all(engine: Engine, rows: list[Prompt]) -> dict[int, Outcome]:
    found = {completion.row_index: outcome(completion) for completion in engine.run(rows)}
    assert len(found) == len(rows)
    assert engine.stats.num_rows_done == len(rows)
    return found


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda backend: f"{str(backend[0])[6:]}-{backend[1] or 'torch'}")
def solo(request: pytest.FixtureRequest) -> tuple[tuple[torch.dtype, str | None], dict[int, Outcome]]:
    """Each row alone, whole, without a cache."""
    dtype, kernels = request.param
    config = EngineConfig(max_batch_tokens=512, max_num_seqs=1, prefix_sharing=False, kv_memory_bytes=1 << 24)
    engine = tiny_engine(config, dtype=dtype, kernels=kernels)
    found: dict[int, Outcome] = {}
    for row in mixed_rows():
        found |= run_all(engine, [row])
    return request.param, found


@pytest.mark.parametrize(
    ("max_batch_tokens", "max_num_seqs", "num_blocks", "sharing", "order"),
    [
        (7, 64, 14, True, "forward"),
        (33, 64, 14, True, "shuffled"),
        (33, 64, 14, False, "shuffled"),
        (33, 4, 4096, True, "forward"),
        (512, 64, 4096, True, "shuffled"),
        (512, 64, 4096, False, "forward"),
    ],
)
def test_every_row_equals_its_solo_run(
    solo: Any, max_batch_tokens: int, max_num_seqs: int, num_blocks: int, sharing: bool, order: str
) -> None:
    (dtype, kernels), expected = solo
    config = EngineConfig(
        max_batch_tokens=max_batch_tokens,
        max_num_seqs=max_num_seqs,
        block_size=16,
        prefix_sharing=sharing,
        policy="prefix" if sharing and order == "forward" else "fcfs",
    )
    engine = tiny_engine(config, dtype=dtype, kernels=kernels)
    engine.config = replace(config, kv_memory_bytes=kv_bytes(engine, num_blocks))
    rows = mixed_rows()
    found = run_all(engine, rows if order == "forward" else random.Random(1).sample(rows, len(rows)))
    differing = [row for row in expected if found[row] != expected[row]]
    assert not differing, f"{len(differing)} of {len(expected)} differ, first {differing[0]}: {rows[differing[0]]}"
    if num_blocks == 14 and max_batch_tokens == 33 and not sharing:
        assert engine.stats.num_preemptions > 0, "the tiny pool was meant to preempt"
    if sharing:
        assert engine.stats.num_prompt_tokens_reused > 0


def test_rows_are_mixed(solo: Any) -> None:
    _, found = solo
    reasons = [one["reason"] for one in found.values()]
    assert reasons.count(FinishReason.SCORED) > 30
    assert reasons.count(FinishReason.LENGTH) > 5
    assert sum(one["hidden"] is not None for one in found.values()) > 5
    assert sum(one["prompt_logprobs"] is not None for one in found.values()) > 3


def hidden_states(ids: list[int]) -> Tensor:
    """Of all tokens in one forward pass: [len(ids), hidden_size]."""
    model = tiny_engine(weights=WEIGHTS).model
    num_blocks = -(-len(ids) // 16)
    kv = KVCache.make(SMALL_SPEC, num_blocks, 16, torch.float32, torch.device("cpu"))
    blocks = np.arange(num_blocks, dtype=np.int32)[None]
    ragged = RaggedBatch(blocks, np.zeros(1, np.int32), np.array([len(ids)], np.int32), block_size=16)
    places = torch.arange(len(ids))
    return model.forward(StepInputs(torch.tensor(ids), places, places, ragged), kv)


def test_values_are_those_of_the_model() -> None:
    engine = tiny_engine(weights=WEIGHTS)
    for row in mixed_rows():
        if row.score is None:
            continue
        logits = engine.model.logits(hidden_states(row.token_ids.tolist()))
        logprobs = torch.log_softmax(logits.double(), -1)
        ids = torch.tensor([*row.token_ids.tolist(), row.score.next_id])
        positions = torch.from_numpy(row.score.positions())
        direct, targets = logprobs[positions - 1], ids[positions]
        (completion,) = engine.run([replace(row, score=replace(row.score, keeps_hidden=False))])
        scores = completion.scores
        assert scores is not None
        assert scores.logprobs == pytest.approx(direct.gather(1, targets[:, None])[:, 0].numpy(), abs=2e-5)
        assert scores.entropies == pytest.approx(-(direct.exp() * direct).sum(-1).numpy(), abs=2e-5)
        assert scores.is_top.tolist() == (direct.argmax(-1) == targets).tolist()


def test_kept_hidden_states_are_those_of_the_scored_tokens() -> None:
    """Position p is predicted from p - 1; what rows have in common before that is still computed once."""
    rng = np.random.default_rng(3)
    stem = rng.integers(6, 256, 50).tolist()
    ids = [[*stem, 8, 9, int(last)] for last in (10, 11, 12)]  # they part two tokens after the first scored one
    rows = [scoring(i, row, (50, 53), keeps_hidden=True) for i, row in enumerate(ids)]
    engine = tiny_engine(EngineConfig(block_size=16, max_batch_tokens=32), weights=WEIGHTS)
    found = {one.row_index: one for one in engine.run(rows)}
    for i, row in enumerate(ids):
        hidden = found[i].hidden
        assert hidden is not None
        assert found[i].scores is None
        assert torch.allclose(hidden, hidden_states(row[:52])[49:52], atol=1e-5)
    assert engine.stats.num_prompt_tokens_computed == 49 + 3 * 3


class HeadCounter:
    """Counts the rows that go through the head of an engine's model."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[int] = []
        original = engine.model.target_logprobs

        def target_logprobs(hidden: Tensor, targets: Tensor) -> Any:
            self.calls.append(len(hidden))
            return original(hidden, targets)

        monkeypatch.setattr(engine.model, "target_logprobs", target_logprobs)


def test_continuations_compute_their_context_once_and_it_does_not_go_through_the_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = np.random.default_rng(0).integers(6, 256, 200).tolist()
    answers = [[7, 8, 9], [7, 9], [30], [40, 41, 42, 43]]
    rows = [scoring(i, context + answer, (200, 200 + len(answer))) for i, answer in enumerate(answers)]
    engine = tiny_engine(weights=WEIGHTS)
    heads = HeadCounter(engine, monkeypatch)
    found = {one.row_index: one for one in engine.run(rows)}
    assert [len(found[i].scores or ()) for i in range(4)] == [3, 2, 1, 4]
    # The last token of an answer is not computed, and the first two answers share their first one.
    assert engine.stats.num_prompt_tokens_computed == 200 + 2 + 0 + 0 + 3
    assert sum(heads.calls) == 3 + 2 + 1 + 4 - 1
    assert len(heads.calls) <= engine.stats.num_steps


def test_answers_of_one_token_cost_a_token_each() -> None:
    context = np.random.default_rng(0).integers(6, 256, 200).tolist()
    rows = [scoring(i, [*context, 50 + i]) for i in range(4)]
    for row in rows:
        row.score = replace(row.score, spans=((200, 201),))  # type: ignore[type-var]
    engine = tiny_engine(weights=WEIGHTS)
    scores = {one.row_index: one.scores for one in engine.run(rows)}
    assert engine.stats.num_prompt_tokens_computed == 200 + 3
    logprobs = torch.log_softmax(engine.model.logits(hidden_states(context)[-1:]), -1)[0, 50:54].tolist()
    assert [float(scores[i].logprobs[0]) for i in range(4)] == pytest.approx(logprobs, abs=1e-5)  # type: ignore[union-attr]


def test_only_nodes_that_somebody_scores_go_through_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    stem = np.random.default_rng(1).integers(6, 256, 60).tolist()
    rows = [
        Prompt(0, np.array([*stem, 7], np.int32), SamplingParams(max_tokens=1)),
        scoring(1, [*stem, 8, 9], (61, 62)),
        scoring(2, [*stem, 10, 11], (58, 62)),
    ]
    engine = tiny_engine(weights=WEIGHTS)
    heads = HeadCounter(engine, monkeypatch)
    list(engine.run(rows))
    assert sum(heads.calls) == 1 + 4, "two tokens of the stem for row 2, its own two, one of row 1"


def test_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(weights=WEIGHTS)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a row that only scores was sampled")

    monkeypatch.setattr(engine, "_sampler", type(engine._sampler).__new__(type(engine._sampler)))
    monkeypatch.setattr(type(engine._sampler), "__call__", refuse)
    (completion,) = engine.run([scoring(0, [9, 8, 7, 6])])
    assert completion.finish_reason is FinishReason.SCORED
    assert (completion.text, completion.token_ids, completion.error) == (None, [], None)
    assert engine.stats.num_output_tokens == 0


def test_a_row_may_fill_the_whole_context_and_no_more() -> None:
    engine = tiny_engine(weights=WEIGHTS, max_model_len=32)
    ids = np.random.default_rng(1).integers(6, 256, 34).tolist()
    found = {one.row_index: one for one in engine.run([scoring(0, ids[:33]), scoring(1, ids)])}
    assert len(found[0].scores or ()) == 32
    assert found[1].error is not None
    assert found[1].error.code == ErrorCode.PROMPT_TOO_LONG
    engine.config = replace(engine.config, block_size=16, kv_memory_bytes=kv_bytes(engine, 1) // 4)
    codes = {
        one.row_index: one.error and one.error.code for one in engine.run([scoring(0, ids[:17]), scoring(1, ids[:18])])
    }
    assert codes == {0: None, 1: ErrorCode.NEVER_FITS}


def test_errors_and_empty_rows_are_results() -> None:
    engine = tiny_engine(weights=WEIGHTS)
    refused = RowError(ErrorCode.PROMPT_NULL, "null")
    rows = [replace(scoring(0, [5, 6]), error=refused), scoring(1, [], (1, 2), next_id=4)]
    found = {one.row_index: one.error for one in engine.run(rows)}
    assert found[0] == refused
    assert found[1] is not None
    assert found[1].code == ErrorCode.PROMPT_EMPTY


@pytest.mark.parametrize("spans", [(), ((0, 2),), ((2, 2),), ((1, 3), (3, 5)), ((4, 5), (1, 2))])
def test_spans_are_ascending_apart_and_from_1(spans: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="spans"):
        ScoreRequest(spans, 7)


def test_requests_that_make_no_sense_are_refused() -> None:
    engine = tiny_engine(weights=WEIGHTS)
    with pytest.raises(ValueError, match="3 tokens and the next one"):
        list(engine.run([scoring(0, [5, 6, 7], (1, 5), next_id=8)]))
    with pytest.raises(ValueError, match="n must be 1"):
        list(engine.run([replace(scoring(0, [5, 6, 7]), params=SamplingParams(n=2))]))


@pytest.fixture
def poisoned() -> Engine:
    weights = random_weights(SMALL_SPEC, torch.float32)
    weights.embed[7] = np.nan
    return tiny_engine(EngineConfig(block_size=16), weights=weights)


def test_nan_is_the_error_of_its_row_alone(poisoned: Engine) -> None:
    stem = np.random.default_rng(2).integers(8, 256, 40).tolist()
    rows = [
        scoring(0, [*stem, 7, 9]),
        scoring(1, [*stem, 9, 9]),
        scoring(2, [*stem, 9, 7]),  # the bad id is only a target
    ]
    found = {one.row_index: one for one in poisoned.run(rows)}
    codes = [found[i].error.code if found[i].error else None for i in range(3)]
    assert codes == [ErrorCode.NON_FINITE_LOGITS, None, None]
    (alone,) = poisoned.run([rows[1]])
    assert outcome(found[1]) == outcome(alone)


def test_scores_are_cut_and_put_together_by_place() -> None:
    scores = TokenScores.empty(4)
    scores[1:3] = TokenScores(np.array([1, 2], np.float32), np.array([3, 4], np.float32), np.array([True, False]))
    picked = scores[np.array([2, 1])]
    assert (picked.logprobs.tolist(), picked.entropies.tolist(), picked.is_top.tolist()) == (
        [2, 1],
        [4, 3],
        [False, True],
    )
    view, copied = scores[1:2], scores[1:2].copy()
    view.logprobs[0] = 9
    assert (scores.logprobs[1], copied.logprobs[0], len(scores)) == (9, 1, 4)
