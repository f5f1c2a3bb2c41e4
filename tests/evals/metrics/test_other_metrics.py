"""length, diversity and win_rate against counting by hand."""

from __future__ import annotations

import math

import pytest

from batchinfer.evals import EvalOptions, compare
from batchinfer.evals.metrics.diversity import distinct_n, entropy, repetition, self_bleu


def test_repetition_counts_four_grams_seen_before() -> None:
    assert repetition("a b c d e") == 0.0
    assert repetition("a a a a a a") == pytest.approx(2 / 3)  # 3 of the same
    assert repetition("a b c") is None
    assert repetition("") is None


def test_distinct_n_is_over_all_samples_together() -> None:
    assert distinct_n(["a b", "a c"], 1) == pytest.approx(3 / 4)
    assert distinct_n(["a b", "a b"], 2) == pytest.approx(1 / 2)
    assert distinct_n(["a", "b"], 2) is None


def test_self_bleu_is_sacrebleus_against_the_other_samples() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    texts = ["the cat sat on the mat", "the cat lay on the mat", "dogs bark at night all the time"]
    expected = [
        sacrebleu.sentence_bleu(text, [t for t in texts if t != text], use_effective_order=True).score for text in texts
    ]
    assert self_bleu(texts) == pytest.approx(sum(expected) / 3)
    assert self_bleu(["same words here now"] * 4) == pytest.approx(100)
    assert self_bleu(["a", " "]) is None


def test_entropy_in_nats() -> None:
    assert entropy(["a", "a", "a"]) == 0.0
    assert entropy(["a", "b", "c", None]) == pytest.approx(math.log(4))
    assert entropy(["a", "a", "b"]) == pytest.approx(-(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3))


def test_diversity_of_samples(make_run) -> None:
    before = make_run([["the same words again", "the same words again"], ["yes", "no"]])
    after = make_run([["the same words again", "quite other ones now"], ["yes", "yes"]])
    result = compare(before, after, metrics=["diversity"])
    values = {metric.name: (metric.before.mean, metric.after.mean) for metric in result.metrics}
    assert values["answer_entropy"] == (pytest.approx(math.log(2) / 2), pytest.approx(math.log(2) / 2))
    assert values["distinct_1"] == (pytest.approx((4 / 8 + 1) / 2), pytest.approx((8 / 8 + 1 / 2) / 2))
    assert values["self_bleu"][0] > values["self_bleu"][1] * 0.9
    (table,) = result.tables
    assert table.rows[-2:] == (("different outputs", 3, 3), ("outputs", 4, 4))


def test_answers_are_what_the_match_finds(make_run) -> None:
    samples = [["so it is 7", "7.0 I think", "8"]]
    run = make_run(samples)
    result = compare(run, run, metrics=["diversity"], options=EvalOptions(match="numeric"))
    assert result.metric("answer_entropy").before.mean == pytest.approx(entropy(["7", "7", "8"]))


def test_one_sample_has_no_diversity_among_samples(make_run) -> None:
    run = make_run(["a b c d e"] * 3)
    names = [metric.name for metric in compare(run, run, metrics=["diversity"]).metrics]
    assert names == ["repetition", "distinct_1", "distinct_2"]


def test_length_and_ends(make_run) -> None:
    before = make_run(["abc", "", "  ", None], finish_reasons=["stop", "stop", "length", "error"])
    after = make_run(["abcde", "x", "  ", "y"], finish_reasons=["length", "stop", "length", "stop"])
    result = compare(before, after, metrics=["length"])
    values = {m.name: (m.before.mean, m.after.mean, m.n) for m in result.metrics}
    assert values["output_tokens"] == (pytest.approx(5 / 3), pytest.approx(8 / 3), 3)
    assert values["truncated"] == (pytest.approx(1 / 3), pytest.approx(2 / 3), 3)
    assert values["empty"] == (pytest.approx(2 / 3), pytest.approx(1 / 3), 3)
    assert values["failed"] == (0.25, 0.0, 4)
    (table,) = result.tables
    assert {name: (b, a) for name, b, a in table.rows} == {"stop": (2, 2), "length": (1, 2), "error": (1, 0)}


def test_plain_texts_have_no_tokens_or_finish_reasons(make_run) -> None:
    import pyarrow as pa

    table = pa.table({"id": [1, 2], "output": ["a", ""]})
    assert [m.name for m in compare(table, table, metrics=["length"]).metrics] == ["empty", "failed"]


def test_win_rates_count_ties_as_half(make_run) -> None:
    inputs = {"id": list(range(5)), "reference": ["a"] * 5}
    before = make_run(["a", "b", "b", "b", "a"], inputs)
    after = make_run(["b", "a", "a", "a", "a"], inputs)
    result = compare(before, after, metrics=["accuracy", "win_rate"])
    wins = result.metric("win_rate.accuracy")
    assert wins.difference.mean == pytest.approx((3 + 0.5) / 5)
    assert (wins.wins, wins.equal, wins.losses) == (3, 1, 1)
    assert wins.tests == ()  # accuracy is tested, once
    (table,) = result.tables
    assert table.rows == (("accuracy", 5, pytest.approx(0.6), pytest.approx(0.2), pytest.approx(0.2)),)


def test_fewer_truncated_outputs_are_wins(make_run) -> None:
    before = make_run(["x", "y"], finish_reasons=["length", "length"])
    after = make_run(["x", "y"], finish_reasons=["stop", "length"])
    result = compare(before, after, metrics=["length", "win_rate"])
    assert result.metric("win_rate.truncated").difference.mean == pytest.approx(0.75)
    assert result.metric("truncated").wins == 1
