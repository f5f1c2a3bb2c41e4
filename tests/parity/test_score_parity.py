"""Scores beside a straightforward loop over transformers: the same windows, one row at a time, fp32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from peer_models import full_logprobs, parity_recipe, save_model

from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.models.source import resolve_model
from batchinfer.scoring.result import RowScore

TOLERANCE = 1e-4


class Expected(NamedTuple):
    logprobs: np.ndarray
    entropies: np.ndarray
    is_top: np.ndarray


def loop(model: Any, ids: list[int], first: int, window: int, stride: int) -> Expected:
    """Log-probabilities and entropies of ids[first:], a window of the row at a time, at once and alone."""
    found: list[torch.Tensor] = []
    next_position = first
    while next_position < len(ids):
        end = min(len(ids) - 1, max(window, next_position - 1 + stride))  # tokens [begin, end) are read
        begin = max(0, end - window)
        rows = full_logprobs(model, ids[begin:end]).double()[next_position - 1 - begin :]
        targets = torch.tensor(ids[next_position : end + 1])
        of_targets = rows.gather(1, targets[:, None])[:, 0]
        entropies = -(rows.exp() * rows).sum(-1)
        found.append(torch.stack((of_targets, entropies, (of_targets == rows.amax(-1)).double())))
        next_position = end + 1
    return Expected(*torch.cat(found, dim=1).numpy())


def assert_equal(row: RowScore, expected: Expected) -> None:
    assert row.error is None
    assert row.nll is not None
    assert row.token_logprobs is not None
    assert row.token_entropies is not None
    assert row.num_scored_tokens == len(expected.logprobs)
    assert np.abs(row.token_logprobs - expected.logprobs).max() < TOLERANCE
    assert np.abs(row.token_entropies - expected.entropies).max() < TOLERANCE
    assert row.perplexity == pytest.approx(np.exp(-expected.logprobs.mean()), rel=TOLERANCE)
    assert row.nll == pytest.approx(-expected.logprobs.sum(), abs=TOLERANCE * len(expected.logprobs))


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 8},
}


@pytest.mark.parametrize(("window", "stride"), [(None, None), (32, 32), (32, 5), (17, 16)])
@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models(family: str, window: int | None, stride: int | None, tmp_path: Path) -> None:
    model = save_model(family, tmp_path, **FAMILIES[family])
    rng = random.Random(3)
    stem = [rng.randrange(300) for _ in range(60)]
    rows = [
        stem[:cut] + [rng.randrange(300) for _ in range(extra)] for cut, extra in ((60, 9), (60, 3), (20, 90), (5, 2))
    ]
    inputs: list[Any] = [*rows, (stem, rows[0][60:]), (stem[:33], rows[1][33:]), rows[2]]
    config = EngineConfig(dtype="float32", device="cpu", threads=1, block_size=16, max_batch_tokens=50, max_num_seqs=4)
    engine = Engine(str(tmp_path), config)
    found = engine.score(inputs, window=window, stride=stride, entropies=True)
    assert engine.stats.num_prompt_tokens_reused > 0
    for one, row in zip(inputs, found, strict=True):
        ids, first = (list(one[0]) + list(one[1]), len(one[0])) if isinstance(one, tuple) else (one, 1)
        size = window or engine.max_model_len
        expected = loop(model, ids, first, size, stride or size)
        assert_equal(row, expected)
        assert row.is_greedy == bool(expected.is_top.all())


@pytest.mark.slow
def test_smollm2_on_real_texts(repo_root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A few of the shortest quickstart prompts: plain, and in windows; alone, and together in chunks."""
    source = resolve_model("smollm2-135m")
    peer = parity_recipe().load_transformers(source, torch.float32)
    assert "\r" not in capfd.readouterr().err, "a progress bar would fill the log"
    texts = pq.read_table(repo_root / "data" / "quickstart.parquet", columns=["prompt"])["prompt"].to_pylist()
    texts = sorted(texts, key=len)[:5]
    engine = Engine(source, EngineConfig(dtype="float32", device="cpu", threads=1, max_batch_tokens=200, block_size=16))
    ids = [row.tolist() for row in source.tokenizer.encode_batch(texts)]
    for window, stride in ((None, None), (64, 40)):
        found = engine.score(texts, window=window, stride=stride, entropies=True)
        size = window or engine.max_model_len
        for row, tokens in zip(found, ids, strict=True):
            assert_equal(row, loop(peer, tokens, 1, size, stride or size))
        for text, row in zip(texts, found, strict=True):
            assert engine.score([text], window=window, stride=stride)[0].nll == row.nll
    with_bos = engine.score(texts[:2], bos="always")
    for row, tokens in zip(with_bos, ids, strict=False):
        bos = source.tokenizer.bos_token_id
        expected = loop(peer, [bos, *tokens], 1, 8192, 8192)
        assert row.num_scored_tokens == len(tokens)
        assert row.nll == pytest.approx(-expected.logprobs.sum(), abs=TOLERANCE * len(tokens))
