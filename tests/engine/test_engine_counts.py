"""What the engine says of a run while it runs: tokens drawn, and the most that are left."""

from __future__ import annotations

import pytest
from tiny_models import kv_bytes, tiny_engine

from batchinfer import SamplingParams
from batchinfer.config import EngineConfig
from batchinfer.engine.stats import EngineStats

pytestmark = pytest.mark.usefixtures("both_ways")


@pytest.mark.parametrize("num_blocks", [200, 6])
def test_drawn_tokens_count_as_they_come_and_the_most_that_are_left_falls_to_nothing(num_blocks: int) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, n=2, stop=("a",), ignore_eos=True)
    engine = tiny_engine(EngineConfig(block_size=16, max_batch_tokens=48))
    engine = tiny_engine(EngineConfig(block_size=16, max_batch_tokens=48, kv_memory_bytes=kv_bytes(engine, num_blocks)))
    prompts = [engine.prompt([9 + row % 7] * (20 + row), params, row, str(row)) for row in range(8)]
    left, drawn = [], []

    def on_step(stats: EngineStats) -> None:
        left.append(stats.max_output_tokens_left)
        drawn.append(stats.num_output_tokens + stats.num_output_tokens_unfinished)

    completions = list(engine.run(prompts, on_step))
    assert left[0] <= 8 * 2 * 40
    assert left == sorted(left, reverse=True)
    assert drawn == sorted(drawn), "preempted rows keep what they have"
    assert engine.stats.max_output_tokens_left == 0
    assert engine.stats.num_output_tokens_unfinished == 0
    assert drawn[-1] == engine.stats.num_output_tokens == sum(len(c.token_ids) for c in completions)
    assert (engine.stats.num_preemptions > 0) == (num_blocks == 6)


def test_samples_can_reach_all_of_the_possible_sharing() -> None:
    """Every sample computes the last prompt token again, so that token is not counted as shareable."""
    engine = tiny_engine()
    params = SamplingParams(max_tokens=3, n=20, temperature=1.0)
    engine.generate([list(range(10, 23))], params)
    assert engine.stats.num_prompt_tokens == 20 * 13
    assert engine.stats.num_prompt_tokens_shareable == 19 * 12
    assert engine.stats.num_prompt_tokens_reused == 19 * 12
