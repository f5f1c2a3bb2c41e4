"""The invariance contract: 64 mixed rows under every way to run them, each equal to its solo run, bitwise."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from mixed_rows import mixed_rows, outcome
from tiny_models import INSTRUCTION_SETS, SMALL_SPEC, kv_bytes, random_weights, tiny_engine

from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.engine.stats import EngineStats
from batchinfer.types import Prompt, SamplingParams

Backend = tuple[torch.dtype, str | None]
#: dtype, and the C++ kernels' instruction set or None for plain torch
BACKENDS: list[Backend] = [
    (torch.float32, None),
    (torch.bfloat16, None),
    *((torch.bfloat16, name) for name in INSTRUCTION_SETS[:1]),
]
#: The same source for older processors: some of the ways to run are enough.
OLDER: list[Backend] = [(torch.bfloat16, name) for name in INSTRUCTION_SETS[1:]]
Solo = tuple[tuple[torch.dtype, str | None], dict[tuple[int, int], dict[str, Any]]]
LARGE_POOL = 4096
#: Blocks of 16 tokens; the longest row alone needs 13.
TINY_POOL = 14


def run_all(engine: Engine, rows: list[Prompt]) -> dict[tuple[int, int], dict[str, Any]]:
    found = {}
    for completion in engine.run(rows):
        key = (completion.row_index, completion.sample_index)
        assert key not in found, f"{key} came twice"
        found[key] = outcome(completion)
    assert len(found) == sum(row.params.n for row in rows)
    return found


def run_alone(backend: Backend) -> Solo:
    """Each row alone: no sharing, no chunking, a large pool, one sequence at a time."""
    config = EngineConfig(
        max_batch_tokens=512, max_num_seqs=1, block_size=64, prefix_sharing=False, kv_memory_bytes=1 << 24
    )
    engine = tiny_engine(config, dtype=backend[0], kernels=backend[1])
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for row in mixed_rows():
        found |= run_all(engine, [row])
    return backend, found


def name_of(backend: Backend) -> str:
    return f"{str(backend[0])[6:]}-{backend[1] or 'torch'}"


@pytest.fixture(scope="module", params=BACKENDS, ids=name_of)
def solo(request: pytest.FixtureRequest) -> Solo:
    return run_alone(request.param)


@pytest.fixture(scope="module", params=OLDER, ids=name_of)
def older_solo(request: pytest.FixtureRequest) -> Solo:
    return run_alone(request.param)


def test_rows_are_mixed(solo: Solo) -> None:
    """The harness would prove little if rows were alike or ended at once."""
    _, found = solo
    reasons = [values["finish_reason"] for values in found.values()]
    assert reasons.count("stop") > 10
    assert reasons.count("length") > 10
    assert {type(values["stop_reason"]) for values in found.values()} == {int, str, type(None)}
    assert len({tuple(values["token_ids"]) for values in found.values()}) > 50


ORDERS = {
    "forward": lambda rows: rows,
    "shuffled": lambda rows: random.Random(3).sample(rows, len(rows)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sharing", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("pool", [TINY_POOL, LARGE_POOL], ids=["tiny-pool", "large-pool"])
@pytest.mark.parametrize(
    ("max_batch_tokens", "max_num_seqs"), [*product((7, 33, 512), (4, 64)), (1, 1)], ids=lambda value: str(value)
)
def test_every_row_equals_its_solo_run(
    solo: Solo,
    max_batch_tokens: int,
    max_num_seqs: int,
    pool: int,
    sharing: bool,
    order: str,
) -> None:
    check_equal_to_solo(solo, max_batch_tokens, max_num_seqs, pool, sharing, order)


@pytest.mark.parametrize(
    ("max_batch_tokens", "max_num_seqs", "pool", "sharing", "order"),
    [
        (7, 64, TINY_POOL, True, "shuffled"),
        (33, 4, TINY_POOL, False, "forward"),
        (33, 64, LARGE_POOL, True, "forward"),
        (512, 64, LARGE_POOL, True, "shuffled"),
        (512, 64, TINY_POOL, False, "shuffled"),
    ],
)
def test_every_row_equals_its_solo_run_on_older_processors(
    older_solo: Solo, max_batch_tokens: int, max_num_seqs: int, pool: int, sharing: bool, order: str
) -> None:
    check_equal_to_solo(older_solo, max_batch_tokens, max_num_seqs, pool, sharing, order)


@pytest.mark.parametrize(
    ("max_batch_tokens", "max_num_seqs", "pool", "sharing", "order"),
    [
        (1, 1, LARGE_POOL, True, "forward"),
        (7, 4, TINY_POOL, True, "shuffled"),
        (7, 64, LARGE_POOL, False, "forward"),
        (33, 4, TINY_POOL, False, "forward"),
        (33, 64, TINY_POOL, True, "shuffled"),
        (512, 4, LARGE_POOL, False, "shuffled"),
        (512, 64, TINY_POOL, False, "shuffled"),
        (512, 64, LARGE_POOL, True, "forward"),
    ],
)
def test_every_row_equals_its_solo_run_looking_ahead(
    solo: Solo, max_batch_tokens: int, max_num_seqs: int, pool: int, sharing: bool, order: str
) -> None:
    stats = check_equal_to_solo(solo, max_batch_tokens, max_num_seqs, pool, sharing, order, looks_ahead=True)
    assert stats.num_tokens_discarded > 0, "rows that stop are computed once too often"
    assert (stats.num_kv_blocks_used, stats.max_output_tokens_left, stats.num_output_tokens_unfinished) == (0, 0, 0)
    num_output = sum(len(values["token_ids"]) for values in solo[1].values())
    assert stats.num_output_tokens == num_output, "what is discarded is not reported"


def check_equal_to_solo(
    solo: Solo,
    max_batch_tokens: int,
    max_num_seqs: int,
    pool: int,
    sharing: bool,
    order: str,
    looks_ahead: bool = False,
) -> EngineStats:
    (dtype, kernels), expected = solo
    config = EngineConfig(
        max_batch_tokens=max_batch_tokens,
        max_num_seqs=max_num_seqs,
        block_size=16 if pool == TINY_POOL else 64,
        prefix_sharing=sharing,
        policy={"forward": "prefix", "shuffled": "priority"}[order] if sharing else "fcfs",
    )
    engine = tiny_engine(config, dtype=dtype, kernels=kernels)
    engine.config = replace(config, kv_memory_bytes=kv_bytes(engine, pool))
    engine.looks_ahead = looks_ahead
    found = run_all(engine, ORDERS[order](mixed_rows()))
    differing = [key for key in expected if found[key] != expected[key]]
    assert not differing, f"{len(differing)} of {len(expected)} differ, first {differing[0]}"
    if pool == TINY_POOL and max_batch_tokens == 33 and not sharing:
        assert engine.stats.num_preemptions > 0, "the tiny pool was meant to preempt"
    if sharing:
        assert engine.stats.num_prompt_tokens_reused > 0
    return engine.stats


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_every_row_can_be_preempted_twice(looks_ahead: bool) -> None:
    """Rows of equal length in a pool for one and a half of them: whoever comes late is thrown out again and again."""
    rows = [
        Prompt(
            i,
            np.arange(10 + i, 30 + i, dtype=np.int32),
            SamplingParams(max_tokens=60, ignore_eos=True, seed=i, temperature=0.8, logprobs=2, prompt_logprobs=True),
            key=i,
        )
        for i in range(6)
    ]
    weights = random_weights(SMALL_SPEC, torch.float32)
    alone = tiny_engine(EngineConfig(block_size=16, prefix_sharing=False), weights=weights)
    expected = {key: value for row in rows for key, value in run_all(alone, [row]).items()}
    engine = tiny_engine(EngineConfig(block_size=16), weights=weights)
    engine.config = replace(engine.config, kv_memory_bytes=kv_bytes(engine, 8))
    engine.looks_ahead = looks_ahead
    assert run_all(engine, rows) == expected
    assert engine.stats.num_preemptions >= 2
    assert engine.stats.num_kv_blocks_used == 0
    assert engine.stats.num_prompt_tokens_recomputed > 0


@pytest.mark.parametrize("kernels", [None, *INSTRUCTION_SETS])
def test_threads_and_block_sizes_change_nothing(kernels: str | None) -> None:
    rows = mixed_rows(24)
    outcomes = []
    before = torch.get_num_threads()
    try:
        for threads, block_size in ((1, 16), (2, 32), (2, 128), (3, 256)):
            torch.set_num_threads(threads)
            config = EngineConfig(block_size=block_size)
            outcomes.append(run_all(tiny_engine(config, dtype=torch.bfloat16, kernels=kernels), rows))
    finally:
        torch.set_num_threads(before)
    assert all(found == outcomes[0] for found in outcomes[1:])
