"""KV in fp8 through the whole engine, on plain torch: the invariance contract, bad rows, memory, and who refuses it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from mixed_rows import mixed_rows, outcome
from tiny_models import EOS, INSTRUCTION_SETS, SMALL_SPEC, LetterTokenizer, kv_bytes, random_weights, tiny_engine

from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.kernels.fp8_kv import FP8
from batchinfer.models.spec import KV_SCALE_BYTES
from batchinfer.types import Completion, ErrorCode, Prompt, SamplingParams

Outcomes = dict[tuple[int, int], dict[str, Any]]
#: Blocks of 16 tokens; the longest row alone needs 13.
TINY_POOL = 14
ALONE = EngineConfig(
    max_batch_tokens=512, max_num_seqs=1, block_size=64, prefix_sharing=False, kv_memory_bytes=1 << 24, kv_dtype="fp8"
)


def rows() -> list[Prompt]:
    return mixed_rows(24)


def run(engine: Engine, prompts: list[Prompt]) -> Outcomes:
    return {(done.row_index, done.sample_index): outcome(done) for done in engine.run(prompts)}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def solo(request: pytest.FixtureRequest) -> tuple[torch.dtype, Outcomes]:
    engine = tiny_engine(ALONE, dtype=request.param, kv_dtype=FP8)
    return request.param, {key: value for row in rows() for key, value in run(engine, [row]).items()}


@pytest.mark.parametrize(
    ("max_batch_tokens", "max_num_seqs", "pool", "sharing"),
    [
        (7, 64, TINY_POOL, True),
        (33, 4, TINY_POOL, False),
        (33, 64, 4096, True),
        (512, 64, 4096, False),
        (512, 64, TINY_POOL, True),
    ],
)
def test_every_row_equals_its_solo_run(
    solo: tuple[torch.dtype, Outcomes], max_batch_tokens: int, max_num_seqs: int, pool: int, sharing: bool
) -> None:
    dtype, expected = solo
    config = EngineConfig(
        max_batch_tokens=max_batch_tokens,
        max_num_seqs=max_num_seqs,
        block_size=16 if pool == TINY_POOL else 64,
        prefix_sharing=sharing,
        kv_dtype="fp8",
    )
    engine = tiny_engine(config, dtype=dtype, kv_dtype=FP8)
    engine.config = replace(config, kv_memory_bytes=kv_bytes(engine, pool))
    found = run(engine, random.Random(1).sample(rows(), 24))
    differing = [key for key in expected if found[key] != expected[key]]
    assert not differing, f"{len(differing)} of {len(expected)} differ, first {differing[0]}"
    assert engine.stats.num_kv_blocks == pool
    if sharing:
        assert engine.stats.num_prompt_tokens_reused > 0
    if (max_batch_tokens, pool) == (33, TINY_POOL):
        assert engine.stats.num_preemptions > 0, "the tiny pool was meant to preempt"


def test_it_is_near_kv_of_the_weights_dtype(solo: tuple[torch.dtype, Outcomes]) -> None:
    """Scores of given tokens: not the same, or nothing was quantised, and not far."""
    dtype, found = solo
    engine = tiny_engine(replace(ALONE, kv_dtype="auto"), dtype=dtype)
    differences = []
    for row in rows():
        if row.params.prompt_logprobs:
            expected = run(engine, [row])[row.row_index, 0]["prompt_logprobs"][1:]
            differences += np.subtract(expected, found[row.row_index, 0]["prompt_logprobs"][1:]).tolist()
    assert len(differences) > 50
    assert 0.001 < np.abs(differences).mean() < 0.05


def test_a_row_that_is_not_finite_is_its_own_error() -> None:
    weights = random_weights(SMALL_SPEC, torch.float32)
    bad = 7  # a token whose embedding is NaN; the head is a tensor of its own
    weights.embed[bad] = np.nan
    rng = np.random.default_rng(0)
    stem = rng.integers(8, 256, 40).tolist()
    texts = [[*stem, 9, 10], [*stem[:30], bad, 11], [*stem, bad], [*stem, 12, 13, 14], [bad, *stem]]
    params = SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=True)
    prompts = [Prompt(i, np.array(ids, np.int32), params, key=i) for i, ids in enumerate(texts)]
    engine = tiny_engine(
        EngineConfig(block_size=16, max_batch_tokens=32, kv_dtype="fp8"), weights=weights, kv_dtype=FP8
    )
    alone = tiny_engine(ALONE, weights=weights, kv_dtype=FP8)
    for _ in range(2):  # again over blocks that held NaN
        found: dict[int, Completion] = {done.row_index: done for done in engine.run(prompts)}
        for row in prompts:
            error = found[row.row_index].error
            if bad in row.token_ids:
                assert error is not None
                assert error.code == ErrorCode.NON_FINITE_LOGITS
            else:
                assert outcome(found[row.row_index]) == run(alone, [row])[row.row_index, 0]


def test_memory_counts_scales_to_the_byte() -> None:
    engine = tiny_engine(EngineConfig(block_size=16, kv_dtype="fp8"), dtype=torch.bfloat16, kv_dtype=FP8)
    spec = SMALL_SPEC
    per_token = 2 * spec.num_layers * spec.num_kv_heads * (spec.head_dim + KV_SCALE_BYTES)
    assert engine.kv_bytes_per_token == per_token
    assert tiny_engine(dtype=torch.bfloat16).kv_bytes_per_token == 4 * spec.num_layers * 2 * spec.head_dim
    engine.config = replace(engine.config, kv_memory_bytes=10 * 16 * per_token + 15)
    prompt = Prompt(0, np.arange(8, 40, dtype=np.int32), SamplingParams(max_tokens=3), key=0)
    assert [done.error for done in engine.run([prompt])] == [None]
    assert engine.stats.num_kv_blocks == 10
    assert engine._kv is not None
    assert engine._kv.nbytes == 10 * 16 * per_token


def test_a_model_without_it_is_refused() -> None:
    for kernels in (None, *INSTRUCTION_SETS[:1]):
        with pytest.raises(ValueError, match=r"kv_dtype is fp8, but the model keeps its KV in torch\.bfloat16"):
            tiny_engine(EngineConfig(kv_dtype="fp8"), dtype=torch.bfloat16, kernels=kernels)
    model = tiny_engine(kv_dtype=FP8).model
    assert Engine.from_parts(model, LetterTokenizer(), EOS, 64).kv_dtype == FP8, "what the model says"
