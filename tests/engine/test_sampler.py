"""The sampler against a slow twin: one row at a time, numpy, float64, from the definition in SamplingParams."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from fakes import FakeTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.batch import PersistentBatch
from batchinfer.engine.detokenizer import OutputText
from batchinfer.engine.penalties import penalise
from batchinfer.engine.pending import PendingTokens
from batchinfer.engine.random import gumbel_noise_all, stream_key
from batchinfer.engine.sampler import Sampled, Sampler
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.staging import Staging
from batchinfer.types import Prompt, SamplingParams

EOS = (2, 5)
Float64s = npt.NDArray[np.float64]


def sequence(
    params: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None, key: int = 0
) -> Sequence:
    ids = np.array(prompt or [0], np.int32)
    seq = Sequence(
        Prompt(0, ids, params),
        sample_index=0,
        order=0,
        path=(),
        text=OutputText(FakeTokenizer()),
        stream_key=stream_key(params.seed, key, 0),
        max_tokens=params.max_tokens,
    )
    seq.penalised()
    for token_id in output or []:
        seq.append(token_id)
    return seq


def sample(logits: Float64s | list[list[float]], seqs: list[Sequence], num_ids: int | None = None) -> Sampled:
    tensor = torch.tensor(np.array(logits), dtype=torch.float32)
    batch = PersistentBatch(len(seqs), 1, 16, torch.device("cpu"))
    for seq in seqs:
        batch.add(seq)
    try:
        drawn = Sampler(tensor.shape[1] if num_ids is None else num_ids, EOS)(tensor, seqs, batch)
        return drawn.read(iter([values.numpy() for values in drawn.tensors()]))
    finally:
        for seq in seqs:
            batch.remove(seq)


def slow_logits(logits: npt.ArrayLike, seq: Sequence, num_ids: int) -> Float64s:
    """After penalties, bans, temperature and truncation; -inf where nothing may be drawn."""
    params, out = seq.params, np.array(logits, dtype=np.float64)
    prompt, output = seq.prompt.token_ids.tolist(), seq.tokens[seq.num_prompt : seq.num_tokens].tolist()
    for token_id in range(len(out)):
        if token_id in prompt or token_id in output:
            positive = out[token_id] > 0
            out[token_id] *= 1 / params.repetition_penalty if positive else params.repetition_penalty
        out[token_id] -= params.frequency_penalty * output.count(token_id)
        out[token_id] -= params.presence_penalty * (token_id in output)
        is_banned = len(output) < params.min_tokens and token_id in (*EOS, *params.stop_token_ids)
        if is_banned or token_id >= num_ids:
            out[token_id] = -np.inf
    if params.temperature == 0:
        return out
    out /= params.temperature
    ranked = sorted(range(len(out)), key=lambda token_id: (-out[token_id], token_id))
    kept = ranked[: params.top_k] if params.top_k else ranked
    probs = np.exp(out - out.max())
    total = sum(probs[kept])
    if params.top_p < 1:
        reached, nucleus = 0.0, []
        for token_id in kept:
            nucleus.append(token_id)
            reached += probs[token_id] / total
            if reached >= params.top_p:
                break
        kept = nucleus
    kept = [token_id for token_id in kept if probs[token_id] >= params.min_p * probs[kept[0]]]
    cut = np.full(len(out), -np.inf)
    cut[kept] = out[kept]
    return cut


def log_softmax(logits: Float64s) -> Float64s:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def slow_token(logits: Float64s, seq: Sequence) -> int:
    if seq.params.temperature > 0:
        key = seq.stream_key - (1 << 64) if seq.stream_key >> 63 else seq.stream_key
        noise = gumbel_noise_all(torch.tensor([key]), torch.tensor([seq.num_output]), len(logits))[0]
        logits = logits + noise.double().numpy()
    return int(np.argmax(logits))


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    vocab_size = draw(st.integers(6, 40))
    ids = st.integers(0, vocab_size - 1)
    params = SamplingParams(
        max_tokens=20,
        min_tokens=draw(st.sampled_from([0, 0, 1, 4])),
        temperature=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 100])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.95, 0.5, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.6, -0.4])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.37, -0.21])),
        seed=draw(st.integers(0, 1000)),
        stop_token_ids=draw(st.sampled_from([(), (1,), (3, 10_000)])),
        logprobs=draw(st.sampled_from([None, 0, 1, 5])),
        logprobs_mode=draw(st.sampled_from(["raw", "processed"])),
    )
    return {
        "params": params,
        "prompt": draw(st.lists(ids, min_size=1, max_size=8)),
        "output": draw(st.lists(ids, max_size=6)),
        "scale": draw(st.sampled_from([0.5, 2.0, 5.0])),
    }


@settings(max_examples=150, deadline=None)
@given(batch=st.lists(rows(), min_size=1, max_size=20), seed=st.integers(0, 2**32 - 1), num_padded=st.integers(0, 5))
def test_equals_the_slow_twin(batch: list[dict[str, Any]], seed: int, num_padded: int) -> None:
    rng = np.random.default_rng(seed)
    vocab_size = 45
    num_ids = vocab_size - num_padded
    seqs = [sequence(row["params"], row["prompt"], row["output"], key) for key, row in enumerate(batch)]
    logits = np.stack([rng.normal(size=vocab_size) * row["scale"] for row in batch]).astype(np.float32)
    found = sample(logits.astype(np.float64), seqs, num_ids)
    assert found.is_finite == [True] * len(seqs)
    for row, seq in enumerate(seqs):
        params = seq.params
        processed = slow_logits(logits[row], seq, num_ids)
        token_id = slow_token(processed, seq)
        assert found.token_ids[row] == token_id
        if params.logprobs is None:
            assert found.logprobs[row] is None
            assert found.top_logprobs[row] is None
            continue
        expected = log_softmax(logits[row].astype(np.float64) if params.logprobs_mode == "raw" else processed)
        assert found.logprobs[row] == pytest.approx(expected[token_id], abs=2e-5)
        top = found.top_logprobs[row]
        assert top is not None
        assert len(top) == params.logprobs
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
        assert [value for _, value in top] == pytest.approx(np.sort(expected)[::-1][: len(top)].tolist(), abs=2e-5)
        assert len({one for one, _ in top}) == len(top)
        for one, value in top:
            assert value == pytest.approx(expected[one], abs=2e-5)


@settings(max_examples=40, deadline=None)
@given(batch=st.lists(rows(), min_size=2, max_size=20), seed=st.integers(0, 2**32 - 1))
def test_a_row_is_the_same_bits_alone_and_in_any_order(batch: list[dict[str, Any]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(len(batch), 45)) * 3

    def run(chosen: list[int]) -> list[tuple[Any, ...]]:
        seqs = [sequence(batch[i]["params"], batch[i]["prompt"], batch[i]["output"], i) for i in chosen]
        found = sample(logits[chosen], seqs)
        return list(zip(found.token_ids, found.logprobs, found.top_logprobs, strict=True))

    together = run(list(range(len(batch))))
    assert run(list(range(len(batch)))[::-1])[::-1] == together
    for i in range(len(batch)):
        assert run([i]) == [together[i]]


def test_ties_go_to_lower_ids() -> None:
    flat = [[0.0, 1.0, 1.0, 0.0, 1.0, 1.0]]
    assert sample(flat, [sequence(SamplingParams())]).token_ids == [1]
    for top_k, allowed in ((1, {1}), (2, {1, 2}), (3, {1, 2, 4})):
        seqs = [sequence(SamplingParams(temperature=1.0, top_k=top_k, seed=seed)) for seed in range(200)]
        assert set(sample(flat * 200, seqs).token_ids) == allowed
    seqs = [sequence(SamplingParams(temperature=1.0, top_p=0.3, seed=seed)) for seed in range(200)]
    assert set(sample(flat * 200, seqs).token_ids) == {1, 2}, "each of the four has a little less than a quarter"


def test_top_p_counts_what_top_k_left() -> None:
    """Probabilities .4 .3 .2 .1; of the first three, .444 .333 .222: 0.75 needs two of them, 0.78 three."""
    logits = np.log([[0.4, 0.3, 0.2, 0.1]])
    for top_p, allowed in ((0.44, {0}), (0.45, {0, 1}), (0.77, {0, 1}), (0.78, {0, 1, 2}), (1.0, {0, 1, 2})):
        params = [SamplingParams(temperature=1.0, top_k=3, top_p=top_p, seed=seed) for seed in range(300)]
        assert set(sample(np.repeat(logits, 300, 0), [sequence(one) for one in params]).token_ids) == allowed


def test_one_token_is_always_left() -> None:
    params = SamplingParams(temperature=1.0, top_p=1e-300, min_p=1.0, top_k=1)
    assert sample([[1.0, 5.0, 2.0]], [sequence(params)]).token_ids == [1]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 4},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.3, "min_p": 0.2},
        {"temperature": 1.0, "repetition_penalty": 1.5, "frequency_penalty": 0.3, "min_tokens": 9},
    ],
    ids=str,
)
@pytest.mark.parametrize("vary", ["seed", "key", "position"])
def test_draws_follow_the_distribution(params: dict[str, Any], vary: str) -> None:
    """Chi-square over 8,000 draws, each from another stream or place. The seeds are fixed: it cannot flake."""
    logits = np.array([1.2, 0.3, -0.5, 2.0, 0.0, 1.1, -2.0])
    output = [3, 3, 1]
    num = 8000
    seqs = []
    for i in range(num):
        one = SamplingParams.from_mapping({**params, "seed": 100 + i if vary == "seed" else 1})
        if vary == "position" and "min_tokens" not in params and "frequency_penalty" not in params:
            # The number of output tokens is all the sampler reads of them.
            seq = sequence(one, [3, 6], output)
            seq.num_tokens = seq.num_prompt + i
        else:
            seq = sequence(one, [3, 6], output, key=5000 + i)
        seqs.append(seq)
    expected = np.exp(log_softmax(slow_logits(logits, seqs[3], len(logits))))
    counts = Counter(sample(np.repeat(logits[None], num, 0), seqs).token_ids)
    assert set(counts) == set(np.flatnonzero(expected))
    chi_square = sum((counts[i] - num * p) ** 2 / (num * p) for i, p in enumerate(expected) if p > 0)
    degrees = np.count_nonzero(expected) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees) + 4


def test_seeds_rows_samples_and_positions_give_different_streams() -> None:
    flat = np.zeros((40, 1000))
    base = SamplingParams(temperature=1.0)

    def draw(seqs: list[Sequence]) -> tuple[int, ...]:
        return tuple(sample(flat, seqs).token_ids)

    def with_samples() -> list[Sequence]:
        seqs = [sequence(base) for _ in range(40)]
        for i, seq in enumerate(seqs):
            seq.stream_key = stream_key(0, 0, i)
        return seqs

    same = draw([sequence(base) for _ in range(40)])
    assert len(set(same)) == 1
    streams = [
        draw([sequence(SamplingParams(temperature=1.0, seed=i)) for i in range(40)]),
        draw([sequence(base, key=i) for i in range(40)]),
        draw(with_samples()),
        draw([sequence(base, output=[1] * i) for i in range(40)]),
    ]
    for drawn in streams:
        assert len(set(drawn)) > 35
    assert len(set(streams)) == 4


def test_which_logprob() -> None:
    """Logits [2, 0], T = 0.5: raw -0.1269 whatever T; processed -0.0181 at T = 0.5, and -0.1269 when greedy."""
    logits = [[2.0, 0.0]]

    def logprob(**values: Any) -> float:
        params = SamplingParams.from_mapping({"logprobs": 2, **values})
        for seed in range(1000):  # until the first token is drawn
            found = sample(logits, [sequence(SamplingParams.from_mapping({"seed": seed}, params))])
            if found.token_ids == [0]:
                assert found.top_logprobs[0] is not None
                assert found.top_logprobs[0][0] == (0, found.logprobs[0])
                assert found.logprobs[0] is not None
                return found.logprobs[0]
        raise AssertionError("never drawn")

    assert logprob(temperature=0.5) == pytest.approx(-0.1269, abs=1e-4)
    assert logprob(temperature=0.5, logprobs_mode="processed") == pytest.approx(-0.0181, abs=1e-4)
    assert logprob(temperature=0.0) == pytest.approx(-0.1269, abs=1e-4)
    assert logprob(temperature=0.0, logprobs_mode="processed") == pytest.approx(-0.1269, abs=1e-4)
    assert logprob(temperature=1.0, top_k=1, logprobs_mode="processed") == 0.0
    assert logprob(temperature=1.0, top_k=1) == pytest.approx(-0.1269, abs=1e-4)


def test_greedy_processed_logprobs_are_after_penalties_and_bans() -> None:
    params = SamplingParams(min_tokens=3, presence_penalty=1.0, logprobs=1, logprobs_mode="processed")
    seq = sequence(params, output=[0])
    found = sample([[3.0, 1.0, 9.0, 2.5, 0.0, 9.0]], [seq])
    assert found.token_ids == [3]
    expected = log_softmax(np.array([2.0, 1.0, -np.inf, 2.5, 0.0, -np.inf]))
    assert found.logprobs[0] == pytest.approx(expected[3], abs=1e-6)


def test_more_logprobs_than_ids_gives_them_all() -> None:
    found = sample([[0.0, 1.0, 2.0]], [sequence(SamplingParams(logprobs=50))])
    assert found.top_logprobs[0] is not None
    assert [token_id for token_id, _ in found.top_logprobs[0]] == [2, 1, 0]


def test_a_very_low_temperature_is_greedy_and_its_logprobs_are_numbers() -> None:
    """Logits divided by such a temperature overflow fp32."""
    logits = [[5.0, 90.0, 89.0, 3.0]]
    for temperature in (1e-37, 1e-38, 1e-44, 1e-60):
        for cut in ({}, {"top_p": 0.9}, {"top_k": 2}):
            params = SamplingParams.from_mapping(
                {"temperature": temperature, "logprobs": 1, "logprobs_mode": "processed", **cut}
            )
            found = sample(logits, [sequence(params)])
            assert found.token_ids == [1]
            assert found.logprobs == [pytest.approx(0.0, abs=0.4)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_marked_and_its_neighbours_are_unaffected(bad: float) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 30))
    params = [
        SamplingParams(logprobs=2),
        SamplingParams(logprobs=2, temperature=1.0),
        SamplingParams(logprobs=2, temperature=1.0, top_p=0.9),
        SamplingParams(logprobs=2, temperature=0.7, logprobs_mode="processed"),
    ]
    clean = sample(logits, [sequence(one) for one in params])
    for victim in range(4):
        spoilt = logits.copy()
        spoilt[victim, 11] = bad
        found = sample(spoilt, [sequence(one) for one in params])
        assert found.is_finite == [row != victim for row in range(4)]
        for row in set(range(4)) - {victim}:
            assert found.token_ids[row] == clean.token_ids[row]
            assert found.logprobs[row] == clean.logprobs[row]
            assert found.top_logprobs[row] == clean.top_logprobs[row]


def test_a_masked_logit_of_the_model_is_no_error() -> None:
    found = sample([[0.0, -np.inf, 1.0]], [sequence(SamplingParams(logprobs=0))])
    assert (found.is_finite, found.token_ids) == ([True], [2])
    found = sample([[-np.inf, -np.inf, -np.inf]], [sequence(SamplingParams())])
    assert found.is_finite == [False]


def test_ids_of_the_padded_vocabulary_are_never_drawn() -> None:
    logits = np.zeros((200, 12))
    logits[:, 9:] = 50.0
    greedy = sample(logits[:1], [sequence(SamplingParams())], num_ids=9)
    assert greedy.token_ids == [0]
    for params in ({"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}, {"temperature": 1.0, "top_p": 0.9}):
        seqs = [sequence(SamplingParams.from_mapping({**params, "seed": seed})) for seed in range(200)]
        assert max(sample(logits, seqs, num_ids=9).token_ids) < 9


def test_bans_and_penalties_name_ids_the_model_may_not_have() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(1, 999), repetition_penalty=2.0)
    found = sample([[1.0, 8.0, 7.0, 3.0]], [sequence(params, prompt=[3], output=[0])])
    assert found.token_ids == [3], "1 and 2 are banned, 3 is halved to 1.5 and 0 to 0.5"


@settings(max_examples=150, deadline=None)
@given(
    outputs=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=6), min_size=1, max_size=5),
    data=st.data(),
)
def test_a_token_that_only_the_device_knows_is_penalised_as_any_other(
    outputs: list[list[int]], data: st.DataObject
) -> None:
    """Bitwise: whether it is new, in the prompt, or drawn before."""
    params = [
        SamplingParams(
            max_tokens=20,
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.3, 0.8])),
            presence_penalty=data.draw(st.sampled_from([0.0, 0.6, -0.4])),
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.37, -0.21])),
        )
        for _ in outputs
    ]
    prompts = [data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)) for _ in outputs]
    is_pending = [data.draw(st.booleans()) for _ in outputs]
    known = [sequence(*row) for row in zip(params, prompts, outputs, strict=True)]
    ahead = [
        sequence(one, prompt, output[:-1] if waits else output)
        for one, prompt, output, waits in zip(params, prompts, outputs, is_pending, strict=True)
    ]
    some = [row for row, waits in enumerate(is_pending) if waits][::-1]
    for row in some:
        ahead[row].draw()
    pending = PendingTokens(torch.tensor([outputs[row][-1] for row in some]).long(), [ahead[row] for row in some])
    logits = torch.randn(len(outputs), 8, generator=torch.Generator().manual_seed(1))
    logits[:, 0] = 0.0
    expected, found = logits.clone(), logits.clone()
    staging = Staging(torch.device("cpu"))
    penalise(expected, known, staging, None)
    penalise(found, ahead, staging, pending)
    assert torch.equal(found, expected)
    for row, seq in enumerate(known):
        slow = slow_logits(logits[row].numpy(), seq, 8)
        assert expected[row].numpy() == pytest.approx(slow, abs=1e-5)
