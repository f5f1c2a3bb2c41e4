"""NaN and infinity: the row's own error, and nobody else's. One token id poisons whatever reads it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import INSTRUCTION_SETS, SMALL_SPEC, kv_bytes, random_weights, tiny_engine

from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.types import Completion, ErrorCode, Prompt, SamplingParams

pytestmark = pytest.mark.usefixtures("both_ways")

BAD = 7  # a token id whose embedding is NaN


def poisoned_engine(
    config: EngineConfig | None = None,
    num_blocks: int | None = None,
    value: float = np.nan,
    kernels: str | None = None,
) -> Engine:
    weights = random_weights(SMALL_SPEC, torch.float32 if kernels is None else torch.bfloat16)
    weights.embed[BAD] = value  # the head is a tensor of its own and stays finite
    engine = tiny_engine(config or EngineConfig(block_size=16), weights=weights, kernels=kernels)
    if num_blocks is not None:
        engine.config = replace(engine.config, kv_memory_bytes=kv_bytes(engine, num_blocks))
    return engine


def prompts(rows: list[list[int]], max_tokens: int = 12, **params: object) -> list[Prompt]:
    values = {"max_tokens": max_tokens, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": True, **params}
    return [
        Prompt(i, np.array(ids, np.int32), SamplingParams.from_mapping(values), key=i) for i, ids in enumerate(rows)
    ]


def run(engine: Engine, rows: list[Prompt]) -> dict[int, Completion]:
    found = {completion.row_index: completion for completion in engine.run(rows)}
    assert len(found) == len(rows)
    assert engine.stats.num_kv_blocks_used == 0
    return found


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(8, 256, count).tolist()


def assert_only_bad_rows_fail(found: dict[int, Completion], rows: list[Prompt], kernels: str | None = None) -> None:
    """Every row without the bad id is bitwise what it is alone on a fresh engine."""
    alone = poisoned_engine(EngineConfig(block_size=16, prefix_sharing=False), kernels=kernels)
    for row in rows:
        completion = found[row.row_index]
        if BAD in row.token_ids:
            assert completion.error is not None
            assert completion.error.code == ErrorCode.NON_FINITE_LOGITS
            assert (completion.text, completion.token_ids, completion.logprobs) == (None, [], None)
            continue
        (expected,) = list(alone.run([row]))
        assert completion.error is None, f"row {row.row_index} failed with its neighbour"
        assert completion.token_ids == expected.token_ids
        assert completion.logprobs == expected.logprobs
        assert completion.prompt_logprobs == expected.prompt_logprobs


STEM = tokens(20, seed=1)
FAMILY = [
    [*STEM, BAD, *tokens(2, 2)],
    [*STEM, *tokens(1, 3)],
    [*STEM, *tokens(5, 4), BAD],
    [*STEM, *tokens(30, 5)],
    [BAD],
    tokens(40, 6),
    [*STEM, BAD],
    STEM,
]


@pytest.mark.parametrize("max_batch_tokens", [1, 5, 20, 21, 64, 512])
@pytest.mark.parametrize("order", ["prefix", "fcfs", "reversed"])
def test_neighbours_that_share_a_prefix_are_unaffected(max_batch_tokens: int, order: str) -> None:
    rows = prompts(FAMILY[::-1] if order == "reversed" else FAMILY)
    policy = "prefix" if order == "prefix" else "fcfs"
    engine = poisoned_engine(EngineConfig(block_size=16, max_batch_tokens=max_batch_tokens, policy=policy))
    assert_only_bad_rows_fail(run(engine, rows), rows)


@pytest.mark.parametrize("kernels", INSTRUCTION_SETS)
@pytest.mark.parametrize(("max_batch_tokens", "num_blocks"), [(5, 5), (64, 5), (64, 40)])
def test_neighbours_are_unaffected_under_the_cpu_kernels(max_batch_tokens: int, num_blocks: int, kernels: str) -> None:
    rows = prompts(FAMILY)
    config = EngineConfig(block_size=16, max_batch_tokens=max_batch_tokens, max_num_seqs=3, policy="fcfs")
    engine = poisoned_engine(config, num_blocks, kernels=kernels)
    assert_only_bad_rows_fail(run(engine, rows), rows, kernels)


@pytest.mark.parametrize("max_batch_tokens", [3, 64])
@pytest.mark.parametrize("sharing", [True, False])
def test_the_next_owner_of_a_block_is_unaffected(max_batch_tokens: int, sharing: bool) -> None:
    rows = prompts(FAMILY * 2, max_tokens=20)
    for index, row in enumerate(rows):
        row.row_index = row.key = index
    config = EngineConfig(
        block_size=16, max_batch_tokens=max_batch_tokens, max_num_seqs=3, policy="fcfs", prefix_sharing=sharing
    )
    engine = poisoned_engine(config, num_blocks=5)
    assert_only_bad_rows_fail(run(engine, rows), rows)


def test_a_following_run_is_unaffected_also_after_a_run_closed_midway() -> None:
    good, bad = prompts([tokens(20, 8)] * 4), prompts([[BAD, *tokens(60, 9)], tokens(3, 1)])
    for row in good:
        row.params = replace(row.params, seed=row.row_index)
    for close_after_steps in (1, 2, None):
        engine = poisoned_engine(EngineConfig(block_size=16, max_batch_tokens=16), num_blocks=16)
        steps = 0

        def stop(_: object) -> None:
            nonlocal steps
            steps += 1
            if steps == close_after_steps:  # noqa: B023
                raise KeyboardInterrupt

        if close_after_steps is None:
            run(engine, bad)
        else:
            with pytest.raises(KeyboardInterrupt):
                list(engine.run(bad, stop))
        assert_only_bad_rows_fail(run(engine, good), good)


def test_infinite_embeddings_and_infinite_heads_are_found_too() -> None:
    rows = prompts([[BAD, 9], [9, 9]])
    found = run(poisoned_engine(value=float("inf")), rows)
    assert [found[i].error is None for i in range(2)] == [False, True]
    weights = random_weights(SMALL_SPEC, torch.float32)
    weights.lm_head[100] = float("inf")
    found = run(tiny_engine(weights=weights), rows)
    assert all(completion.error is not None for completion in found.values())


def test_a_token_that_is_generated_can_poison_its_row_only() -> None:
    """The head draws BAD as the second token of every third row."""
    rows = prompts([tokens(10 + i, i) for i in range(6)], max_tokens=10)
    plain = run(tiny_engine(EngineConfig(block_size=16), weights=random_weights(SMALL_SPEC, torch.float32)), rows)
    victim = plain[2].token_ids[4]
    weights = random_weights(SMALL_SPEC, torch.float32)
    weights.embed[victim] = float("nan")
    found = run(tiny_engine(EngineConfig(block_size=16), weights=weights), rows)
    for index, row in enumerate(rows):
        is_hit = victim in row.token_ids or victim in plain[index].token_ids[:-1]
        assert (found[index].error is not None) == is_hit
        if not is_hit:
            assert found[index].token_ids == plain[index].token_ids
        elif victim not in row.token_ids:
            error = found[index].error
            assert error is not None
            assert f"output token {plain[index].token_ids.index(victim) + 1}" in error.message


def test_duplicates_of_a_failed_row_fail_with_it() -> None:
    rows = prompts([[BAD, 9], [9, 9], [BAD, 9]], n=2)
    found = list(poisoned_engine().run(rows))
    assert len(found) == 6
    assert sorted(c.row_index for c in found if c.error) == [0, 0, 2, 2]
