"""A window's rows leave memory when they end."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest
from tiny_models import forced_engine

from batchinfer.config import EngineConfig
from batchinfer.engine.sequence import Sequence
from batchinfer.types import Prompt, SamplingParams


def num_sequences() -> int:
    return sum(type(thing) is Sequence for thing in gc.get_objects())


@pytest.mark.parametrize("sharing", [True, False])
def test_sequences_that_have_ended_are_freed(sharing: bool) -> None:
    engine = forced_engine([70, 71], num_prompt=8)
    engine.config = EngineConfig(prefix_sharing=sharing, max_num_seqs=4)
    engine.check_integrity = False
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=True, stop=("never",))
    rows = [Prompt(i, np.array([1, 1, 1, 1, i // 16, 2, i % 16, 3], np.int32), params, key=i) for i in range(200)]
    before = num_sequences()
    for num_done, _ in enumerate(engine.run(rows)):
        if num_done % 40 == 0:
            left = engine.stats.num_seqs_running + engine.stats.num_seqs_waiting
            assert num_sequences() - before <= left + 4, "beside those that ended in the latest step"
    assert num_sequences() == before


def test_a_waiting_row_takes_no_copy_of_its_prompt() -> None:
    engine = forced_engine([70], num_prompt=1000, max_model_len=2000)
    rows = [Prompt(i, np.full(1000, i, np.int32), SamplingParams(max_tokens=5), key=i) for i in range(20)]
    run = engine.run(rows)
    next(run)
    waiting = [one for one in gc.get_objects() if type(one) is Sequence and not one.is_running and not one.num_output]
    assert waiting
    for seq in waiting:
        assert seq.tokens is seq.prompt.token_ids
        assert sys.getsizeof(seq.logprobs) < 100
    run.close()  # type: ignore[attr-defined]
