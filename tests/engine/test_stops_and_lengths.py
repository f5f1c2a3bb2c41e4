"""How rows end, through the engine: stops, end-of-sequence ids, lengths, refusals, and an engine that lives on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import SMALL_SPEC, LetterTokenizer, forced_engine, kv_bytes, random_weights, tiny_engine

from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.errors import InputError
from batchinfer.types import DEFAULT_MAX_TOKENS, Completion, ErrorCode, FinishReason, Prompt, RowError, SamplingParams

pytestmark = pytest.mark.usefixtures("both_ways")

WEIGHTS = random_weights(SMALL_SPEC, torch.float32)


class PieceTokenizer(FakeTokenizer):
    """One text per id; ids beyond decode to nothing."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = list(pieces)
        self.num_ids = len(pieces)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[i] for i in ids if i < len(self.pieces))


def complete(engine: Engine, prompt: Any = (1, 1, 1), **params: Any) -> Completion:
    ((completion,),) = engine.generate([prompt], SamplingParams.from_mapping(params))
    assert completion.error is None
    return completion


def pieces_engine(*pieces: str, prompt: str = "p") -> Engine:
    """Generates the pieces, then 'z' without end. Prompts are three times `prompt`."""
    return forced_engine([*range(2, 2 + len(pieces)), 1], PieceTokenizer([prompt, "z", *pieces]), eos=())


# Stop strings


@pytest.mark.parametrize(
    ("params", "text", "reason", "num_tokens"),
    [
        ({"stop": "END"}, "x", "END", 3),
        ({"stop": "EN"}, "x", "EN", 3),
        ({"stop": "END", "include_stop": True}, "xEND", "END", 3),
        ({"stop": "EN", "include_stop": True}, "xEN", "EN", 3),
        ({"stop": ["y", "ND"]}, "xE", "ND", 3),
        ({"stop": ["ND", "END"]}, "x", "END", 3),
        ({"stop": ["E", "END"]}, "x", "E", 2),
        ({"stop": "Dy"}, "xEN", "Dy", 4),
        ({"stop": "ENDy", "max_tokens": 3}, "xEND", None, 3),
    ],
)
def test_stop_strings_need_no_token_border(
    params: dict[str, Any], text: str, reason: str | None, num_tokens: int
) -> None:
    found = complete(pieces_engine("x", "E", "ND", "y"), (0, 0, 0), logprobs=1, **params)
    assert (found.text, found.stop_reason) == (text, reason)
    assert found.finish_reason == (FinishReason.STOP if reason else FinishReason.LENGTH)
    assert found.token_ids == [2, 3, 4, 5][:num_tokens], "the ids that were sampled, none trimmed, none invented"
    assert found.logprobs is not None
    assert found.top_logprobs is not None
    assert len(found.logprobs) == len(found.top_logprobs) == num_tokens


def test_a_stop_string_in_the_prompt_or_across_its_end_is_none() -> None:
    engine = pieces_engine("ND", "x", "y", prompt="ENDE")
    found = complete(engine, (0, 0, 0), stop=["END"], max_tokens=4)
    assert (found.text, found.finish_reason) == ("NDxyz", FinishReason.LENGTH)


def test_a_stop_string_completed_together_with_the_last_token_is_a_stop() -> None:
    found = complete(pieces_engine("a", "b"), (0, 0, 0), stop="b", max_tokens=2)
    assert (found.text, found.finish_reason, found.stop_reason) == ("a", FinishReason.STOP, "b")


# End-of-sequence and stop token ids


def test_every_eos_id_stops_at_once_and_nothing_follows() -> None:
    for eos in (2, 5):
        found = complete(forced_engine([70, 71, eos, 72, 73]), logprobs=2, max_tokens=50)
        assert found.token_ids == [70, 71, eos]
        assert (found.finish_reason, found.stop_reason, found.text) == (FinishReason.STOP, eos, "FG")
        assert found.logprobs is not None
        assert found.top_logprobs is not None
        assert len(found.logprobs) == len(found.top_logprobs) == 3


def test_min_tokens_holds_back_every_eos_id() -> None:
    found = complete(forced_engine([5, 5, 5, 5, 5, 70]), min_tokens=4, max_tokens=10)
    assert len(found.token_ids) == 5
    assert not {2, 5} & set(found.token_ids[:4])
    assert found.token_ids[4] == 5


def test_min_tokens_holds_back_stop_token_ids_and_stop_strings() -> None:
    found = complete(forced_engine([70] * 9), min_tokens=4, max_tokens=9, stop_token_ids=[70])
    assert 70 not in found.token_ids[:4]
    assert (found.token_ids[4:], found.stop_reason) == ([70], 70)
    found = complete(forced_engine([70] * 9), min_tokens=4, max_tokens=9, stop="F")
    assert (found.token_ids, found.text, found.stop_reason) == ([70] * 4, "FFF", "F")


@pytest.mark.parametrize("eos", [2, 5])
def test_ignore_eos_goes_on_to_the_limit(eos: int) -> None:
    found = complete(forced_engine([eos] * 20), ignore_eos=True, max_tokens=10)
    assert found.token_ids == [eos] * 10
    assert (found.finish_reason, found.stop_reason) == (FinishReason.LENGTH, None)


def test_ignore_eos_leaves_stop_token_ids_alone() -> None:
    found = complete(forced_engine([5, 70, 71]), ignore_eos=True, stop_token_ids=[70], max_tokens=10)
    assert (found.token_ids, found.stop_reason, found.finish_reason) == ([5, 70], 70, FinishReason.STOP)


@pytest.mark.parametrize(("place", "reason"), [(3, FinishReason.STOP), (4, FinishReason.LENGTH)])
def test_eos_exactly_at_the_limit_is_a_stop(place: int, reason: FinishReason) -> None:
    tokens = [70] * 10
    tokens[place] = 5
    found = complete(forced_engine(tokens), max_tokens=4)
    assert len(found.token_ids) == 4
    assert found.finish_reason == reason


def test_include_stop_keeps_the_text_of_a_stop_token() -> None:
    assert complete(forced_engine([70, 71, 72]), stop_token_ids=[71]).text == "F"
    assert complete(forced_engine([70, 71, 72]), stop_token_ids=[71], include_stop=True).text == "FG"


def test_a_stop_token_in_the_prompt_is_no_stop() -> None:
    found = complete(forced_engine([70, 71, 5]), (2, 5, 70), stop_token_ids=[71])
    assert (found.token_ids, found.stop_reason) == ([70, 71], 71)


def test_the_default_limit_is_documented_and_long() -> None:
    assert SamplingParams().max_tokens == DEFAULT_MAX_TOKENS == 1024
    found = complete(forced_engine([70], max_model_len=2000))
    assert (len(found.token_ids), found.finish_reason) == (1024, FinishReason.LENGTH)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 5))
def test_ids_and_logprobs_are_of_equal_length_and_end_where_they_must(data: st.DataObject, seed: int) -> None:
    """Whatever ends a row, preempted ones and samples included: a property over mixed rows."""
    rng = np.random.default_rng(seed)
    engine = tiny_engine(EngineConfig(block_size=16, max_batch_tokens=24), weights=WEIGHTS)
    engine.config = replace(engine.config, kv_memory_bytes=kv_bytes(engine, 6))
    rows = []
    for index in range(data.draw(st.integers(1, 6))):
        params = SamplingParams(
            max_tokens=data.draw(st.integers(1, 50)),
            min_tokens=data.draw(st.sampled_from([0, 1])),
            temperature=data.draw(st.sampled_from([0.0, 1.0])),
            n=data.draw(st.integers(1, 3)),
            stop=data.draw(st.sampled_from([(), ("e",), ("ab", "q")])),
            stop_token_ids=data.draw(st.sampled_from([(), (9, 30)])),
            include_stop=data.draw(st.booleans()),
            ignore_eos=data.draw(st.booleans()),
            logprobs=data.draw(st.sampled_from([0, 2])),
            seed=seed,
        )
        prompt = rng.integers(6, 256, data.draw(st.integers(1, 40))).astype(np.int32)
        rows.append(Prompt(index, prompt, params, key=index))
    found = list(engine.run(rows))
    assert len(found) == sum(row.params.n for row in rows)
    for completion in found:
        assert completion.error is None
        params, ids = rows[completion.row_index].params, completion.token_ids
        assert completion.logprobs is not None
        assert params.min_tokens <= len(ids) <= params.max_tokens
        assert len(ids) == len(completion.logprobs)
        assert all(np.isfinite(completion.logprobs))
        if params.logprobs:
            assert completion.top_logprobs is not None
            assert [len(top) for top in completion.top_logprobs] == [2] * len(ids)
        enders = {*params.stop_token_ids, *(() if params.ignore_eos else engine.eos_token_ids)}
        assert not enders & set(ids[:-1]), "nothing after the end"
        assert completion.text is not None
        whole = LetterTokenizer().decode(ids)
        assert whole.startswith(completion.text)
        if completion.finish_reason == FinishReason.LENGTH:
            assert (len(ids), completion.stop_reason, completion.text) == (params.max_tokens, None, whole)
            assert ids[-1] not in enders
        elif isinstance(completion.stop_reason, str):
            assert completion.stop_reason in whole
            assert completion.text.endswith(completion.stop_reason) == params.include_stop
            assert all(stop not in completion.text[:-1] for stop in params.stop)
        else:
            assert completion.stop_reason == ids[-1]
            assert ids[-1] in enders
            assert completion.text == LetterTokenizer().decode(ids if params.include_stop else ids[:-1])
    assert engine.stats.num_kv_blocks_used == 0


# Text


@pytest.mark.parametrize("text", ["🙂🙂 汉字 é", "é", "a🙂"])
def test_characters_of_several_tokens(text: str) -> None:
    data = list(text.encode())
    found = complete(forced_engine([*data, 2]), max_tokens=50, stop="never")
    assert found.text == text
    for cut in range(1, len(data) + 1):
        found = complete(forced_engine(data), max_tokens=cut, ignore_eos=True)
        assert found.text == bytes(data[:cut]).decode("utf-8", "replace"), "as the decoding of all ids"


def test_a_genuine_replacement_character_at_the_end_is_kept() -> None:
    data = list("a\ufffd".encode())
    assert complete(forced_engine([*data, 2]), stop="never").text == "a\ufffd"


def test_an_id_that_the_tokenizer_lacks_is_never_drawn() -> None:
    """Vocabulary 320, tokenizer 256: the model wants 315, and the row goes on with the best real id."""
    engine = forced_engine([70, 315, 71, 2])
    found = complete(engine, max_tokens=10)
    assert found.token_ids == [70, 0, 71, 2]
    assert complete(engine, (315, 315, 315), max_tokens=1).token_ids == [70], "in a prompt it is an id like others"


# n


def test_samples_of_a_row() -> None:
    engine = tiny_engine(weights=WEIGHTS)
    params = SamplingParams(n=4, seed=7, temperature=1.0, max_tokens=12, ignore_eos=True)
    (four,) = engine.generate([[9, 9, 9]], params)
    assert [completion.sample_index for completion in four] == [0, 1, 2, 3]
    assert len({tuple(completion.token_ids) for completion in four}) == 4
    (two,) = engine.generate([[9, 9, 9]], replace(params, n=2))
    assert [c.token_ids for c in two] == [c.token_ids for c in four[:2]]
    (greedy,) = engine.generate([[9, 9, 9]], replace(params, temperature=0.0))
    assert [completion.sample_index for completion in greedy] == [0, 1, 2, 3]
    assert len({tuple(completion.token_ids) for completion in greedy}) == 1
    engine.config = replace(engine.config, block_size=16, kv_memory_bytes=kv_bytes(engine, 1))
    (again,) = engine.generate([[9, 9, 9]], params)
    assert [c.token_ids for c in again] == [c.token_ids for c in four], "in the smallest pool"


@pytest.mark.parametrize("max_num_seqs", [1, 4, 32])
def test_a_seeded_row_does_not_depend_on_its_neighbours(max_num_seqs: int) -> None:
    rng = np.random.default_rng(0)

    def row(index: int) -> Prompt:
        seeded = index == 3
        params = SamplingParams(
            temperature=0.8, seed=42 if seeded else int(rng.integers(2**40)), max_tokens=15, ignore_eos=True
        )
        return Prompt(index, np.array([9, 8, index + 10], np.int32), params, key=index)

    rows = [row(index) for index in range(32)]
    expected = next(tiny_engine(weights=WEIGHTS).run([rows[3]])).token_ids
    engine = tiny_engine(EngineConfig(max_num_seqs=max_num_seqs), weights=WEIGHTS)
    for order in (rows, rows[::-1], rows[2:5]):
        found = {completion.row_index: completion.token_ids for completion in engine.run(order)}
        assert found[3] == expected


# Lengths


@pytest.mark.parametrize("sharing", [True, False])
def test_prompts_as_long_as_the_model_takes(sharing: bool) -> None:
    limit = 40
    engine = tiny_engine(EngineConfig(prefix_sharing=sharing), weights=WEIGHTS, max_model_len=limit)
    lengths = [limit - 1, 3, limit, limit + 1, 2, limit - 2, 500]
    found = engine.generate([[9] * length for length in lengths], SamplingParams(max_tokens=9, ignore_eos=True))
    assert [len(samples) for samples in found] == [1] * len(lengths)
    for length, (completion,) in zip(lengths, found, strict=True):
        assert completion.num_prompt_tokens == length
        if length >= limit:
            assert completion.error is not None
            assert completion.error.code == ErrorCode.PROMPT_TOO_LONG
            assert str(length) in completion.error.message
            assert str(limit) in completion.error.message
            assert (completion.text, completion.token_ids, completion.finish_reason) == (None, [], FinishReason.ERROR)
        else:
            assert len(completion.token_ids) == min(9, limit - length)
            assert completion.finish_reason == FinishReason.LENGTH
    assert engine.stats.num_rows_failed == 3
    assert engine.stats.num_rows_done == len(lengths)


def test_a_hundred_rows_with_impossible_ones_among_them() -> None:
    limit = 30
    engine = tiny_engine(weights=WEIGHTS, max_model_len=limit)
    lengths = [limit - 1 + index % 3 for index in range(100)]
    found = engine.generate([[9, index + 10] * (n // 2) + [8] * (n % 2) for index, n in enumerate(lengths)])
    codes = [samples[0].error.code if samples[0].error else None for samples in found]
    assert codes == [None if length < limit else ErrorCode.PROMPT_TOO_LONG for length in lengths]


def test_a_row_that_never_fits_is_refused_with_numbers() -> None:
    engine = tiny_engine(EngineConfig(block_size=16), weights=WEIGHTS)
    small = replace(engine.config, kv_memory_bytes=kv_bytes(engine, 2))
    engine.config = small
    params = SamplingParams(max_tokens=13, ignore_eos=True)
    rows = [Prompt(i, np.full(n, 9, np.int32), params, key=i) for i, n in enumerate((20, 21, 40, 300))]
    found = {completion.row_index: completion for completion in engine.run(rows)}
    assert found[0].error is None, "20 + 13 tokens, the last of which needs no KV, fill two blocks"
    assert len(found[0].token_ids) == 13
    error = found[1].error
    assert error is not None
    assert error.code == ErrorCode.NEVER_FITS
    for number in ("21", "13", "3 KV blocks of 16", "has 2", f"{kv_bytes(engine, 3):,} bytes"):
        assert number in error.message
    assert found[3].error is not None
    assert found[3].error.code == ErrorCode.PROMPT_TOO_LONG, "no pool would help"
    assert rows[1].error is None, "the caller's prompts are not changed"
    engine.config = replace(small, kv_memory_bytes=kv_bytes(engine, 4))
    again = {completion.row_index: completion.error for completion in engine.run(rows)}
    assert [again[i] is None for i in range(4)] == [True, True, True, False]


def test_the_pool_is_measured_once_per_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory changes from one moment to the next: what was admitted must fit into what is made."""
    engine = tiny_engine(EngineConfig(block_size=16), weights=WEIGHTS)
    sizes = iter([kv_bytes(engine, 3)])
    monkeypatch.setattr(engine, "_kv_limit_bytes", lambda: next(sizes))
    found = engine.generate([[9] * 20, [8] * 20, [7] * 60], SamplingParams(max_tokens=20, ignore_eos=True))
    assert [samples[0].error is None for samples in found] == [True, True, False]
    assert engine.stats.num_kv_blocks == 3


def test_the_pool_is_what_can_run_at_once_not_what_the_window_holds() -> None:
    engine = tiny_engine(EngineConfig(block_size=16, max_num_seqs=4), weights=WEIGHTS)
    found = engine.generate([[9 + i] * (1 + i % 30) for i in range(100)], SamplingParams(max_tokens=2, ignore_eos=True))
    assert all(samples[0].error is None for samples in found)
    assert engine.stats.num_kv_blocks == 4 * 3, "30 + 2 tokens are two blocks, and one to spare"
    assert engine.stats.num_preemptions == 0


def test_a_pool_below_one_block_is_an_input_error() -> None:
    engine = tiny_engine(EngineConfig(kv_memory_bytes=100), weights=WEIGHTS)
    with pytest.raises(InputError, match=r"--kv-memory is 100 bytes.*takes 32,768"):
        engine.generate([[9]])


def test_empty_prompts_and_prompts_with_errors_are_rows() -> None:
    engine = tiny_engine(weights=WEIGHTS)
    bad = RowError(ErrorCode.PROMPT_NULL, "null")
    params = SamplingParams(max_tokens=3, n=2)
    rows = [
        Prompt(0, np.zeros(0, np.int32), params),
        Prompt(1, np.array([9], np.int32), params),
        Prompt(2, np.zeros(0, np.int32), params, error=bad),
    ]
    found = sorted(((c.row_index, c.sample_index), c) for c in engine.run(rows))
    assert [key for key, _ in found] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    codes = [completion.error.code if completion.error else None for _, completion in found]
    assert codes == [ErrorCode.PROMPT_EMPTY, None, None, ErrorCode.PROMPT_NULL]
    assert (engine.stats.num_rows_done, engine.stats.num_rows_failed) == (3, 2)
    assert list(engine.run([])) == []
    assert next(engine.run(rows[:1])).error is not None
    assert complete(engine, (9,), max_tokens=3).token_ids == found[1][1].token_ids, "the engine lives on"


def test_ids_outside_the_vocabulary_are_that_rows_error() -> None:
    engine = tiny_engine(weights=WEIGHTS)
    found = engine.generate([[9], [272], [-1], [2**40], [271]], SamplingParams(max_tokens=2))
    codes = [samples[0].error.code if samples[0].error else None for samples in found]
    assert codes == [None, *[ErrorCode.INVALID_PROMPT] * 3, None]
    assert found[3][0].error is not None
    assert str(2**40) in found[3][0].error.message


@pytest.mark.parametrize(
    "content", [[1.5], [[1, 2]], [[1], [1, 2]], [None], [2**70], [True], 5, b"text", {"role": "user"}, ["text"]]
)
def test_what_is_no_prompt_is_a_value_error(content: Any) -> None:
    with pytest.raises(ValueError, match="prompt 1: a prompt must be text, a list of token ids"):
        tiny_engine(weights=WEIGHTS).generate([[9], content])


# The engine after a run that did not end


def mixed(num_rows: int = 12) -> list[Prompt]:
    rng = np.random.default_rng(4)
    stem = rng.integers(6, 256, 20)
    return [
        Prompt(
            i,
            np.concatenate((stem[: 20 * (i % 2)], rng.integers(6, 256, 5 + i))).astype(np.int32),
            SamplingParams(max_tokens=4 + i, temperature=0.9, seed=i, logprobs=1, prompt_logprobs=i % 3 == 0),
            key=i,
        )
        for i in range(num_rows)
    ]


def outcome(completions: list[Completion]) -> list[Completion]:
    return sorted(completions, key=lambda completion: (completion.row_index, completion.sample_index))


@pytest.mark.parametrize("num_taken", [0, 1, 5])
def test_a_closed_run_stops_and_the_next_one_is_whole(num_taken: int) -> None:
    config = EngineConfig(block_size=16, max_batch_tokens=32, max_num_seqs=4)
    expected = outcome(list(tiny_engine(config, weights=WEIGHTS).run(mixed())))
    engine = tiny_engine(config, weights=WEIGHTS)
    iterator = engine.run(mixed())
    taken = [next(iterator) for _ in range(num_taken)]
    num_steps = engine.stats.num_steps
    iterator.close()  # type: ignore[attr-defined]
    assert engine.stats.num_steps == num_steps
    assert outcome(list(engine.run(mixed()))) == expected
    assert all(completion in expected for completion in taken)


def test_two_runs_at_once_are_refused_and_harm_nobody() -> None:
    engine = tiny_engine(weights=WEIGHTS)
    expected = outcome(list(engine.run(mixed())))
    iterator = engine.run(mixed())
    first = next(iterator)
    with pytest.raises(RuntimeError, match="close the iterator"):
        next(engine.run(mixed()))
    assert outcome([first, *iterator]) == expected


def test_an_error_in_a_step_leaves_a_usable_engine() -> None:
    engine = tiny_engine(EngineConfig(block_size=16, max_batch_tokens=32), weights=WEIGHTS)
    expected = outcome(list(engine.run(mixed())))
    forward, calls = engine.model.forward, []

    def fail(inputs: Any, kv: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("a fault")
        return forward(inputs, kv)

    engine.model.forward = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="a fault"):
        list(engine.run(mixed()))
    assert outcome(list(engine.run(mixed()))) == expected
