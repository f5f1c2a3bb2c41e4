"""Scores against models whose probabilities are known by heart: what goes wrong in perplexities, as exact checks."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from score_models import BOS, branching, cyclic, merging_tokenizer, table_engine, uniform

from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.scoring.result import CorpusScore, RowScore

V = 256


def corpus(rows: list[RowScore]) -> CorpusScore:
    total = CorpusScore()
    for row in rows:
        total.add(row)
    return total


def test_the_uniform_model_has_the_perplexity_of_its_vocabulary() -> None:
    rows = table_engine(uniform(V)).score(["abc", "a longer text of some words", [5, 5, 5]], entropies=True)
    for row in rows:
        assert row.perplexity == pytest.approx(V, rel=1e-6)
        assert row.token_entropies == pytest.approx(math.log(V), rel=1e-6)
        assert row.bits_per_byte == pytest.approx(8, rel=1e-6)
    assert corpus(rows).perplexity == pytest.approx(V, rel=1e-6)


def test_the_cyclic_model_predicts_the_next_token_and_not_this_one() -> None:
    """A shift of one position, or logarithms of another base, would show."""
    engine = table_engine(cyclic(V, 0.9))
    right, wrong, repeated = engine.score([list(range(40)), list(range(40, 0, -1)), [7] * 40])
    assert right.perplexity == pytest.approx(1 / 0.9, rel=1e-6)
    assert right.nll == pytest.approx(-39 * math.log(0.9), rel=1e-5)
    assert right.is_greedy is True
    for row in (wrong, repeated):
        assert row.perplexity == pytest.approx(255 / 0.1, rel=1e-5)
        assert row.is_greedy is False
    (mostly,) = engine.score([[1, 2, 3, 4, 9]])
    assert mostly.is_greedy is False
    assert mostly.token_logprobs == pytest.approx([math.log(0.9)] * 3 + [math.log(0.1 / 255)], rel=1e-5)


def test_the_entropy_is_that_of_the_distribution() -> None:
    (row,) = table_engine(cyclic(V, 0.9)).score([list(range(9))], entropies=True)
    assert row.token_entropies == pytest.approx(-0.9 * math.log(0.9) - 0.1 * math.log(0.1 / 255), rel=1e-5)


@pytest.mark.parametrize("config", [EngineConfig(), EngineConfig(max_batch_tokens=3), EngineConfig(max_num_seqs=1)])
def test_corpus_perplexity_is_of_tokens_and_not_of_rows(config: EngineConfig) -> None:
    """One token at ln 2, nine at ln 8: 6.964. Not 5.0 (mean of perplexities) and not 4.0 (exp of the mean of means)."""
    engine = table_engine(branching({100: 2, 0: 8, 1: 8, 2: 8, 3: 8, 4: 8, 5: 8, 6: 8, 7: 8}), config=config)
    documents: list[list[int]] = [[100, 0], [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]]
    rows = engine.score(documents)
    assert [row.perplexity for row in rows] == pytest.approx([2, 8], rel=1e-6)
    total = corpus(rows)
    assert total.perplexity == pytest.approx(math.exp((math.log(2) + 9 * math.log(8)) / 10), rel=1e-6)
    assert total.perplexity == pytest.approx(6.964, abs=1e-3)
    assert total.mean_of_row_perplexities == pytest.approx(5, rel=1e-6)
    # Split into batches in any way: the same bits.
    apart = [replace(engine.score([document])[0], row_index=i) for i, document in enumerate(documents)]
    assert corpus(apart) == total


@pytest.mark.parametrize(("bos", "num_scored"), [("auto", 0), ("always", 1)])
def test_the_first_token_needs_a_context(bos: Any, num_scored: int) -> None:
    tokenizer = merging_tokenizer()
    one, empty, longer = table_engine(uniform(tokenizer.num_ids), tokenizer).score(["abc", "", "abcx"], bos=bos)
    assert one.num_scored_tokens == num_scored
    assert longer.num_scored_tokens == num_scored + 1
    assert (one.nll is None, one.perplexity is None, one.bits_per_byte is None) == (num_scored == 0,) * 3
    assert (empty.num_scored_tokens, empty.nll, empty.perplexity, empty.is_greedy) == (0, None, None, None)
    assert empty.error is not None
    assert corpus([one, empty, longer]).num_tokens == one.num_scored_tokens + longer.num_scored_tokens


def test_bos_is_read_as_context() -> None:
    """It is not masked from attention: the first token is predicted from it."""
    tokenizer = merging_tokenizer(front=True)
    table = uniform(tokenizer.num_ids).double()
    target = int(tokenizer.encode_batch(["abc"], add_special_tokens=False)[0][0])
    table[BOS] = 0.25 / (tokenizer.num_ids - 1)
    table[BOS, target] = 0.75
    (row,) = table_engine(table, tokenizer).score(["abc"])
    assert row.perplexity == pytest.approx(4 / 3, rel=1e-6)
    assert row.is_greedy is True


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
def test_strides_score_each_token_once(stride: int) -> None:
    engine = table_engine(cyclic(V, 0.9))
    counts: Counter[int] = Counter()
    ids = random.Random(stride).sample(range(V), 10)
    plain, cut = (engine.score([ids], window=window, stride=s)[0] for window, s in ((None, None), (4, stride)))
    assert cut.token_ids is not None
    counts.update(cut.token_ids.tolist())
    assert counts == Counter(ids[1:])
    assert (cut.sees_all, plain.sees_all) == (False, True)
    assert cut.nll == pytest.approx(plain.nll, rel=1e-6), "this model's context is one token"
    (flat,) = table_engine(uniform(V)).score([ids], window=4, stride=stride)
    assert flat.perplexity == pytest.approx(V, rel=1e-6)


def test_a_window_as_long_as_the_text_is_the_plain_value() -> None:
    engine = table_engine(cyclic(V, 0.9))
    ids = random.Random(0).choices(range(V), k=50)
    (plain,) = engine.score([ids])
    for window in (49, 50, 512):
        (row,) = engine.score([ids], window=window, stride=7)
        assert (row.nll, row.sees_all) == (plain.nll, True)


def test_long_texts_are_cut_at_the_context_of_the_model() -> None:
    engine = table_engine(uniform(V), max_model_len=16)
    rows = engine.score(["x" * 17, "x" * 18, "x" * 400])
    assert [row.num_scored_tokens for row in rows] == [16, 17, 399]
    assert [row.sees_all for row in rows] == [True, False, False]
    assert all(row.perplexity == pytest.approx(V, rel=1e-6) for row in rows)


@pytest.mark.parametrize("config", [EngineConfig(max_num_seqs=1), EngineConfig(max_batch_tokens=7), EngineConfig()])
def test_neighbours_and_ids_that_other_tools_pad_with_do_not_count(config: EngineConfig) -> None:
    """Documents of 3 and 40 tokens, one made of the padding id 0 and of the end-of-sequence id 2."""
    documents = [[9, 8, 7], [0, 2] * 20, [0, 0, 0]]
    engine = table_engine(cyclic(V, 0.9), config=config)
    alone = [engine.score([document])[0].nll for document in documents]
    assert [row.nll for row in engine.score(documents)] == alone
    assert [row.num_scored_tokens for row in engine.score(documents)] == [2, 39, 2]


def test_words_and_bytes() -> None:
    (row,) = table_engine(uniform(V)).score(["é one two"])
    assert (row.num_scored_bytes, row.num_scored_words) == (8, 2), "the first of the two bytes of é is not scored"
    total = corpus([row])
    nll = 9 * math.log(V)
    assert total.word_perplexity == pytest.approx(math.exp(nll / 2), rel=1e-6)
    assert total.byte_perplexity == pytest.approx(math.exp(nll / 8), rel=1e-6)
    assert total.bits_per_byte == pytest.approx(nll / 8 / math.log(2), rel=1e-6)


def test_figures_beyond_a_float_are_infinite_and_none_without_anything() -> None:
    row = RowScore(0, 1, 1, 1, nll=1000.0, is_greedy=False)
    assert row.perplexity == math.inf
    total = corpus([row])
    assert total.mean_of_row_perplexities == math.inf
    nothing = corpus([])
    assert (nothing.perplexity, nothing.mean_of_row_perplexities, nothing.bits_per_byte) == (None, None, None)


def test_a_mix_of_inputs_comes_back_in_order() -> None:
    engine: Engine = table_engine(uniform(V))
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
    rows = engine.score(["abcd", (b"a".decode(), "xyz"), [1, 2, 3], None, chat, ([1, 2], [3]), "ab"])
    assert [row.row_index for row in rows] == list(range(7))
    assert [row.num_scored_tokens for row in rows] == [3, 3, 2, 0, 2, 1, 1]
    assert engine.score([]) == []


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("text", "must be a list"),
        ((("a", "b")), "must be a list"),
        ([3], "input 0 must be a text"),
        (["x", ("a", [1])], "input 1 must be"),
        ([("a", "b", "c")], "input 0 must be"),
        ([["a", "b"]], "input 0 must be"),
    ],
)
def test_what_is_no_input_is_refused(inputs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table_engine(uniform(V)).score(inputs)
