"""Two models on the same tokens: divergences against direct computation, in any company, and of a model with itself."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from score_models import cyclic, table_engine, uniform
from tiny_models import INSTRUCTION_SETS, SMALL_SPEC, random_weights, tiny_engine
from torch import Tensor

from batchinfer.attention.tree import RaggedBatch
from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.errors import InputError
from batchinfer.models.decoder import KVCache, StepInputs
from batchinfer.models.source import resolve_model
from batchinfer.scoring.divergence import TokenDivergence, compare_tokens
from batchinfer.scoring.item import ScoreItem
from batchinfer.types import ErrorCode

BEFORE, AFTER = (random_weights(SMALL_SPEC, torch.float32, seed) for seed in (0, 1))


def item(ids: list[int], *spans: tuple[int, int]) -> ScoreItem:
    return ScoreItem(np.array(ids, np.int32), spans or ((1, len(ids)),))


def rows() -> list[ScoreItem]:
    """Answers to three prompts, some sampled several times, some beginning alike; one row with two turns."""
    rng = random.Random(8)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(6, 256) for _ in range(count)]

    found = []
    for length in (20, 50, 90):
        prompt, opening = tokens(length), tokens(3)
        for extra in (1, 5, 5, 30):
            answer = opening + tokens(extra)
            found.append(item(prompt + answer, (length, length + len(answer))))
        found.append(found[-1])
    found.append(item(tokens(60), (10, 20), (40, 60)))
    found.append(ScoreItem.empty("nothing"))
    found.append(item(tokens(70)))
    return found


def logits_of(engine: Engine, ids: list[int]) -> Tensor:
    """fp32 logits at every position, from one forward pass."""
    num_blocks = -(-len(ids) // 16)
    kv = KVCache.make(SMALL_SPEC, num_blocks, 16, torch.float32, torch.device("cpu"))
    blocks = np.arange(num_blocks, dtype=np.int32)[None]
    ragged = RaggedBatch(blocks, np.zeros(1, np.int32), np.array([len(ids)], np.int32), block_size=16)
    places = torch.arange(len(ids))
    return engine.model.logits(engine.model.forward(StepInputs(torch.tensor(ids), places, places, ragged), kv))


def assert_same(found: TokenDivergence, expected: TokenDivergence) -> None:
    for field in fields(TokenDivergence):
        one, two = getattr(found, field.name), getattr(expected, field.name)
        assert np.array_equal(one, two) if isinstance(one, np.ndarray) else one == two, field.name


def test_equals_a_direct_computation() -> None:
    before, after = tiny_engine(weights=BEFORE), tiny_engine(weights=AFTER)
    for one, found in zip(rows(), compare_tokens(before, after, rows()), strict=True):
        if one.error is not None:
            assert (found.error, len(found)) == (one.error, 0)
            continue
        ids = one.token_ids.tolist()
        p, q = (torch.log_softmax(logits_of(engine, ids).double(), -1) for engine in (before, after))
        positions = np.concatenate([np.arange(*span) for span in one.spans])
        p, q, targets = p[positions - 1], q[positions - 1], torch.from_numpy(one.token_ids[positions].astype(np.int64))
        assert found.token_ids.tolist() == targets.tolist()
        assert found.kl_before_after == pytest.approx((p.exp() * (p - q)).sum(-1).numpy(), abs=1e-6)
        assert found.kl_after_before == pytest.approx((q.exp() * (q - p)).sum(-1).numpy(), abs=1e-6)
        assert found.entropies_before == pytest.approx(-(p.exp() * p).sum(-1).numpy(), abs=1e-6)
        assert found.entropies_after == pytest.approx(-(q.exp() * q).sum(-1).numpy(), abs=1e-6)
        assert found.logprobs_before == pytest.approx(p.gather(1, targets[:, None])[:, 0].numpy(), abs=1e-5)
        assert found.logprobs_after == pytest.approx(q.gather(1, targets[:, None])[:, 0].numpy(), abs=1e-5)
        assert found.is_same_top.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()


@pytest.mark.parametrize("kernels", [None, *INSTRUCTION_SETS[:1]])
def test_a_model_does_not_diverge_from_itself_in_other_batches(kernels: str | None) -> None:
    dtype = torch.float32 if kernels is None else torch.bfloat16
    one = tiny_engine(dtype=dtype, kernels=kernels)
    config = EngineConfig(max_batch_tokens=7, max_num_seqs=3, block_size=16, prefix_sharing=False)
    other = tiny_engine(config, dtype=dtype, kernels=kernels)
    for found in compare_tokens(one, other, rows()):
        assert (found.kl_before_after == 0).all()
        assert (found.kl_after_before == 0).all()
        assert found.is_same_top.all()
        assert (found.logprobs_before == found.logprobs_after).all()
    assert one.stats.num_prompt_tokens_reused > 0


@pytest.mark.parametrize("max_tokens", [1, 20, 1 << 14])
def test_a_row_has_the_same_bits_in_any_company(max_tokens: int) -> None:
    before, after = tiny_engine(weights=BEFORE), tiny_engine(weights=AFTER)
    alone = [compare_tokens(before, after, [one])[0] for one in rows()]
    for found, expected in zip(compare_tokens(before, after, rows(), max_tokens=max_tokens), alone, strict=True):
        assert_same(found, expected)


def test_the_directions_have_their_names() -> None:
    """Cyclic before (p = .9), uniform after."""
    vocab = 256
    before, after = table_engine(cyclic(vocab, 0.9)), table_engine(uniform(vocab))
    (found,) = compare_tokens(before, after, [item([3, 4, 5])])
    forward = 0.9 * np.log(0.9 * vocab) + 0.1 * np.log(0.1 / 255 * vocab)
    backward = -(np.log(0.9 * vocab) + 255 * np.log(0.1 / 255 * vocab)) / vocab
    assert found.kl_before_after == pytest.approx([forward] * 2, rel=1e-5)
    assert found.kl_after_before == pytest.approx([backward] * 2, rel=1e-5)
    assert found.entropies_after == pytest.approx([np.log(vocab)] * 2, rel=1e-6)
    assert np.exp(found.logprobs_before) == pytest.approx([0.9] * 2, rel=1e-6)
    (swapped,) = compare_tokens(after, before, [item([3, 4, 5])])
    assert swapped.kl_before_after == pytest.approx(found.kl_after_before)


def test_prompts_are_computed_once_for_all_their_answers() -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(6, 256) for _ in range(100)]
    answers = [item([*prompt, 7, 8, last], (100, 103)) for last in range(20, 28)]
    engine = tiny_engine(weights=BEFORE)
    compare_tokens(engine, engine, answers)
    # Token 99 predicts the first answer token, so each row computes it, and its answer but the last token.
    assert engine.stats.num_prompt_tokens_computed == 99 + 8 * 3


def test_long_rows_go_in_windows() -> None:
    before, after = (tiny_engine(weights=weights, max_model_len=32) for weights in (BEFORE, AFTER))
    ids = [random.Random(2).randrange(6, 256) for _ in range(100)]
    (found,) = compare_tokens(before, after, [item(ids)])
    assert found.token_ids.tolist() == ids[1:]
    (first,) = compare_tokens(before, after, [item(ids[:33])])
    assert found.kl_before_after[:32] == pytest.approx(first.kl_before_after, abs=1e-7)


def test_nan_is_the_error_of_its_row() -> None:
    weights = random_weights(SMALL_SPEC, torch.float32)
    weights.embed[7] = np.nan
    bad = tiny_engine(weights=weights)
    good, poisoned = item([9, 8, 10, 11]), item([9, 8, 7, 11])
    found = compare_tokens(tiny_engine(weights=AFTER), bad, [good, poisoned, good])
    assert [one.error and one.error.code for one in found] == [None, ErrorCode.NON_FINITE_LOGITS, None]
    assert_same(found[0], found[2])


def test_vocabularies_of_other_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="256 and 272"):
        compare_tokens(table_engine(uniform(256)), table_engine(uniform(272)), [item([1, 2])])


def test_it_can_be_stopped() -> None:
    def stop(stats: object) -> None:
        raise KeyboardInterrupt

    engine = tiny_engine(weights=BEFORE)
    with pytest.raises(KeyboardInterrupt):
        compare_tokens(engine, engine, rows(), on_step=stop)
    assert len(compare_tokens(engine, engine, rows())) == len(rows()), "the engine can be used again"


@pytest.mark.slow
def test_smollm2_does_not_diverge_from_itself() -> None:
    """In other batches and chunks; and the fp32 model is near the bf16 one, which rounds its activations."""
    source = resolve_model("smollm2-135m")
    config = EngineConfig(device="cpu", threads=1, block_size=16)
    one = Engine(source, config)
    texts = ["The capital of France is Paris.", "The capital of Italy is a large city with many people in it."]
    items = [item(ids.tolist()) for ids in source.tokenizer.encode_batch(texts)]
    other = Engine(source, replace(config, max_batch_tokens=5, prefix_sharing=False))
    for found in compare_tokens(one, other, items):
        assert np.abs(found.kl_before_after).max() <= 1e-6
        assert np.abs(found.kl_after_before).max() <= 1e-6
    exact = Engine(source, replace(config, dtype="float32"))
    for found in compare_tokens(exact, one, items):
        assert 0 < found.kl_before_after.mean() < 0.02
