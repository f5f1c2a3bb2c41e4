"""Prompt logprobs: the same bits from a cache, from chunks and after preemption; and the right values."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import SMALL_SPEC, kv_bytes, random_weights, tiny_engine

from batchinfer.attention.tree import RaggedBatch
from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.models.decoder import KVCache, StepInputs
from batchinfer.types import Completion, Prompt, SamplingParams

pytestmark = pytest.mark.usefixtures("both_ways")

WEIGHTS = random_weights(SMALL_SPEC, torch.float32)
LENGTHS = (15, 16, 17, 31, 32, 33, 50)  # around the borders of blocks of 16
CHUNKS = (1, 7, 16, 49, 50, 64)


def prompts() -> list[Prompt]:
    """Prefixes of one text, continuations of them, duplicates; some ask for prompt logprobs, some do not."""
    rng = np.random.default_rng(11)
    text = rng.integers(6, 256, 50)
    rows = [text[:length] for length in LENGTHS]
    rows += [np.concatenate((text[:length], rng.integers(6, 256, extra))) for length in LENGTHS for extra in (1, 20)]
    rows += [text[:16], text[:33], rows[8], text[:1], rng.integers(6, 256, 1)]
    return [
        Prompt(
            i,
            ids.astype(np.int32),
            SamplingParams(
                max_tokens=3,
                temperature=0.8,
                seed=i,
                n=2 if i % 5 == 4 else 1,
                logprobs=1,
                prompt_logprobs=i % 4 != 3,
                ignore_eos=True,
            ),
            key=i,
        )
        for i, ids in enumerate(rows)
    ]


def run(engine: Engine, rows: list[Prompt]) -> dict[tuple[int, int], Completion]:
    found = {(one.row_index, one.sample_index): replace(one, num_cached_tokens=0) for one in engine.run(rows)}
    assert len(found) == sum(row.params.n for row in rows)
    return found


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, int], Completion]:
    """Each row alone, whole, without a cache."""
    engine = tiny_engine(EngineConfig(block_size=16, prefix_sharing=False), weights=WEIGHTS)
    return {key: one for row in prompts() for key, one in run(engine, [row]).items()}


def test_one_value_for_each_token_but_the_first(expected: dict[tuple[int, int], Completion]) -> None:
    rows = prompts()
    for (index, _), completion in expected.items():
        if not rows[index].params.prompt_logprobs:
            assert completion.prompt_logprobs is None
            continue
        values = completion.prompt_logprobs
        assert values is not None
        assert len(values) == len(rows[index].token_ids)
        assert values[0] is None
        assert all(isinstance(value, float) and -50 < value < 0 for value in values[1:])


def test_values_are_those_of_the_model(expected: dict[tuple[int, int], Completion]) -> None:
    """log_softmax of the decoder's logits over the whole prompt in one forward pass."""
    model = tiny_engine(weights=WEIGHTS).model
    for row in prompts():
        if not row.params.prompt_logprobs:
            continue
        num = len(row.token_ids)
        kv = KVCache.make(SMALL_SPEC, 8, 16, torch.float32, torch.device("cpu"))
        ragged = RaggedBatch(
            np.arange(8, dtype=np.int32)[None], np.zeros(1, np.int32), np.array([num], np.int32), block_size=16
        )
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        hidden = model.forward(StepInputs(ids, torch.arange(num), torch.arange(num), ragged), kv)
        logprobs = torch.log_softmax(model.logits(hidden).double(), -1)
        direct = logprobs[:-1].gather(1, ids[1:, None])[:, 0].tolist()
        found = expected[row.row_index, 0].prompt_logprobs
        assert found is not None
        assert found[1:] == pytest.approx(direct, abs=2e-5)


@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_cached_and_chunked_equal_uncached(expected: dict[tuple[int, int], Completion], chunk: int, order: str) -> None:
    rows = prompts()
    if order != "forward":
        rows = rows[::-1] if order == "backward" else random.Random(chunk).sample(rows, len(rows))
    policy = "prefix" if order == "backward" else "fcfs"
    engine = tiny_engine(
        EngineConfig(block_size=16, max_batch_tokens=chunk, max_num_seqs=5, policy=policy), weights=WEIGHTS
    )
    for _ in range(2):
        assert run(engine, rows) == expected
        assert engine.stats.num_prompt_tokens_reused > 0


def test_equal_after_preemption(expected: dict[tuple[int, int], Completion]) -> None:
    engine = tiny_engine(EngineConfig(block_size=16, max_batch_tokens=40, policy="fcfs"), weights=WEIGHTS)
    engine.config = replace(engine.config, kv_memory_bytes=kv_bytes(engine, 6))
    rows = [replace(row, params=replace(row.params, max_tokens=20)) for row in prompts()]
    alone = tiny_engine(EngineConfig(block_size=16, prefix_sharing=False), weights=WEIGHTS)
    longer = {key: one for row in rows for key, one in run(alone, [row]).items()}
    assert run(engine, rows) == longer
    assert engine.stats.num_preemptions > 0
    for key, one in longer.items():
        assert one.prompt_logprobs == expected[key].prompt_logprobs


def test_a_prompt_of_50_tokens_in_chunks_of_every_size() -> None:
    row = Prompt(0, prompts()[6].token_ids, SamplingParams(max_tokens=5, temperature=1.0, seed=3, prompt_logprobs=True))
    found = []
    for chunk in range(1, 52, 3):
        engine = tiny_engine(EngineConfig(max_batch_tokens=chunk), weights=WEIGHTS)
        found.append(run(engine, [row]))
        assert engine.stats.num_steps == -(-50 // chunk) + 4
    assert all(one == found[0] for one in found)


def test_a_row_that_wants_none_computes_what_another_wants() -> None:
    """The first row computes the shared span for the second, which takes over its values."""
    ids = prompts()[6].token_ids
    rows = [
        Prompt(i, np.append(ids, np.int32(9 + i)), SamplingParams(max_tokens=1, prompt_logprobs=i == 1), key=i)
        for i in range(2)
    ]
    engine = tiny_engine(EngineConfig(block_size=16, max_num_seqs=1), weights=WEIGHTS)
    first, second = engine.run(rows)
    assert (first.prompt_logprobs, first.num_cached_tokens) == (None, 0)
    assert second.num_cached_tokens == 50
    (alone,) = engine.run(rows[1:])
    assert second.prompt_logprobs == alone.prompt_logprobs


def test_full_hits_have_all_values() -> None:
    params = SamplingParams(max_tokens=2, temperature=1.0, n=3, prompt_logprobs=True, ignore_eos=True)
    for length in LENGTHS:
        row = Prompt(0, prompts()[6].token_ids[:length], params)
        found = list(tiny_engine(EngineConfig(block_size=16, max_num_seqs=1), weights=WEIGHTS).run([row]))
        assert [one.num_cached_tokens for one in found] == [0, length - 1, length - 1]
        assert found[0].prompt_logprobs is not None
        assert len(found[0].prompt_logprobs) == length
        assert all(one.prompt_logprobs == found[0].prompt_logprobs for one in found)
