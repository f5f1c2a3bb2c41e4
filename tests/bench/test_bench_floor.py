"""The floor is the plan's work over the machine's rates, and counts what cannot differ once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import TINY_SPEC

from batchinfer.bench.floor import floor_of
from batchinfer.bench.work import lengths_of, longest, plan_work
from batchinfer.config import EngineConfig
from batchinfer.machine_speed import MachineSpeed
from batchinfer.planner.cost import JobPlan
from batchinfer.types import Completion, Prompt, RowError, SamplingParams

PARAMS = SamplingParams(max_tokens=8)
# Weights of a layer: q, k and v, o, three of the MLP; see TINY_SPEC.
LAYER = 16 * (2 + 2) * 8 + 16 * 16 + 3 * 16 * 32
KV_WEIGHTS = 16 * 2 * 8
SPEED = MachineSpeed(read_bytes_per_s=1e6, torch_flops=1e9, kernels_flops=2e9)


def prompts_of(*texts: str, params: SamplingParams = PARAMS) -> list[Prompt]:
    return [
        Prompt(row, np.frombuffer(text.encode(), np.uint8).astype(np.int32), params, key=row)
        for row, text in enumerate(texts)
    ]


def planned(prompts: list[Prompt], lengths: dict[tuple[int, int], int]) -> JobPlan:
    return plan_work(prompts, lengths, TINY_SPEC, 4, EngineConfig())


def test_each_part_takes_the_longer_of_arithmetic_and_memory() -> None:
    cost = planned(prompts_of("abcd", "abce"), {(0, 0): 8, (1, 0): 8}).with_sharing
    floor = floor_of(cost, SPEED)
    matmul, attention, head = floor.parts
    # 5 prompt tokens, 3 of which nothing is drawn from, and 7 outputs that are computed of each.
    assert matmul.flops == 2 * (2 * LAYER * (5 + 2 * 7) - 3 * (LAYER - KV_WEIGHTS))
    assert (attention.flops, head.flops) == (cost.attention_flops, 2 * 16 * 256 * 16)
    assert head.bytes == 4 * 16 * 256 * 8  # the lm_head in each of 8 steps
    assert matmul.bytes + attention.bytes + head.bytes == cost.bytes
    for part in floor.parts:
        assert part.floor_s == max(part.flops / 2e9, part.bytes / 1e6)
    assert floor.seconds == pytest.approx(sum(part.floor_s for part in floor.parts))
    arithmetic = floor_of(cost, replace(SPEED, read_bytes_per_s=1e15))
    assert arithmetic.seconds == pytest.approx(cost.flops / 2e9)


def test_rows_that_ended_early_count_as_long_as_they_came_out() -> None:
    prompts = prompts_of("abcd", "xyz")
    completions = [
        Completion(0, token_ids=[1, 2, 3]),
        Completion(1, token_ids=[1] * 8),
        Completion(2, error=RowError("prompt_null", "null")),  # type: ignore[arg-type]
    ]
    lengths = lengths_of(completions)
    assert lengths == {(0, 0): 3, (1, 0): 8}
    plan = planned(prompts, dict(lengths))
    assert plan.max_output_tokens == 11
    assert plan.with_sharing.num_decode_tokens_computed == 2 + 7


def test_equal_greedy_rows_count_once_and_so_do_their_samples() -> None:
    params = replace(PARAMS, n=3)
    prompts = prompts_of("same", "same", "other", params=params)
    lengths = {(row, sample): 8 for row in range(3) for sample in range(3)}
    plan = planned(prompts, lengths)
    assert (plan.num_samples, plan.with_sharing.num_decode_tokens_computed) == (2, 2 * 7)


def test_drawn_rows_count_once_only_if_their_streams_are_equal() -> None:
    params = replace(PARAMS, temperature=1.0, n=2)
    same = prompts_of("same", "same", "same", params=params)
    same[1].key = same[0].key
    lengths = {(row, sample): 8 for row in range(3) for sample in range(2)}
    assert planned(same, lengths).num_samples == 2 + 2


def test_longest_leaves_out_what_cannot_run_and_cuts_to_the_context() -> None:
    prompts = prompts_of("abcd", "", "abcdefgh", params=replace(PARAMS, n=2))
    prompts += [replace(prompts[0], row_index=3, error=RowError("invalid_params", "no"))]  # type: ignore[arg-type]
    assert longest(prompts, 8) == {(0, 0): 4, (0, 1): 4}


def test_no_row_at_all_costs_nothing() -> None:
    assert floor_of(planned([], {}).with_sharing, SPEED).seconds == 0


def test_the_better_of_two_measurements_counts() -> None:
    slower = MachineSpeed(read_bytes_per_s=2e6, torch_flops=5e8, kernels_flops=None)
    assert SPEED.best_with(slower) == MachineSpeed(2e6, 1e9, 2e9)
    assert slower.best_with(slower).kernels_flops is None
    assert (SPEED.flops_per_s, slower.flops_per_s) == (2e9, 5e8)
