"""Scores of a row are the same bits whatever it is scored with: batch size, sharing, chunks, order, windows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import INSTRUCTION_SETS, SMALL_SPEC, kv_bytes, random_weights, tiny_engine

from batchinfer.config import EngineConfig
from batchinfer.scoring.result import RowScore

BACKENDS: list[tuple[torch.dtype, str | None]] = [
    (torch.float32, None),
    *((torch.bfloat16, name) for name in INSTRUCTION_SETS[:1]),
]


def documents() -> list[Any]:
    """Texts, ids, and continuations of a few contexts; long ones need windows."""
    rng = random.Random(4)

    def text(length: int) -> str:
        return "".join(rng.choice("abcdefgh ") for _ in range(length))

    contexts = [text(length) for length in (5, 30, 64, 90)]
    rows: list[Any] = [(context, text(rng.randint(1, 9))) for context in contexts for _ in range(4)]
    rows += [context + text(rng.randint(0, 40)) for context in contexts for _ in range(3)]
    rows += [[rng.randrange(6, 256) for _ in range(rng.choice((1, 2, 17, 100)))] for _ in range(6)]
    rows += [text(500), contexts[3] + text(300), (contexts[2] * 5, text(70)), None, "", rows[3], rows[20]]
    return rows


def bits(row: RowScore) -> tuple[Any, ...]:
    arrays = (row.token_ids, row.token_logprobs, row.token_entropies)
    return (row.nll, row.is_greedy, row.sees_all, row.error, *(a if a is None else a.tobytes() for a in arrays))


OPTIONS = {"window": 96, "stride": 40, "token_logprobs": True, "entropies": True}


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda backend: f"{str(backend[0])[6:]}-{backend[1] or 'torch'}")
def alone(request: pytest.FixtureRequest) -> tuple[tuple[torch.dtype, str | None], list[tuple[Any, ...]]]:
    config = EngineConfig(max_batch_tokens=512, max_num_seqs=1, prefix_sharing=False)
    engine = tiny_engine(config, dtype=request.param[0], kernels=request.param[1])
    return request.param, [bits(engine.score([one], **OPTIONS)[0]) for one in documents()]


@pytest.mark.parametrize(
    ("max_batch_tokens", "max_num_seqs", "num_blocks", "sharing"),
    [(512, 64, 4096, True), (33, 5, 4096, True), (7, 64, 8, True), (1, 1, 4096, True), (100, 64, 9, False)],
)
def test_every_row_equals_its_solo_run(
    alone: Any, max_batch_tokens: int, max_num_seqs: int, num_blocks: int, sharing: bool
) -> None:
    (dtype, kernels), expected = alone
    config = EngineConfig(
        max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs, block_size=16, prefix_sharing=sharing
    )
    engine = tiny_engine(config, dtype=dtype, kernels=kernels)
    engine.config = replace(config, kv_memory_bytes=kv_bytes(engine, num_blocks))
    order = random.Random(num_blocks).sample(range(len(expected)), len(expected))
    rows = documents()
    found = dict(zip(order, map(bits, engine.score([rows[i] for i in order], **OPTIONS)), strict=True))
    differing = [i for i, row in enumerate(expected) if found[i] != row]
    assert not differing, f"{len(differing)} of {len(expected)} differ, first {differing[0]}"
    if sharing:
        assert engine.stats.num_prompt_tokens_reused > 0


def test_what_is_kept_of_tokens_changes_no_sum() -> None:
    engine = tiny_engine(weights=random_weights(SMALL_SPEC, torch.float32))
    found = [
        [row.nll for row in engine.score(documents(), window=96, token_logprobs=keep, entropies=keep)]
        for keep in (True, False)
    ]
    assert found[0] == found[1]


def test_token_figures_add_up_to_the_row() -> None:
    for row in tiny_engine().score(documents(), **OPTIONS):
        if row.nll is None:
            continue
        assert row.token_logprobs is not None
        assert row.token_ids is not None
        assert len(row.token_logprobs) == len(row.token_ids) == row.num_scored_tokens
        assert row.nll == pytest.approx(-row.token_logprobs.sum(dtype=np.float64), rel=1e-12)
