"""Means of rows: weighted, exponentiated, of prompts, of rows without a value."""

from __future__ import annotations

import math

import numpy as np
import pytest

from batchinfer.evals.aggregate import measure
from batchinfer.evals.protocol import MetricScores, MetricSpec
from batchinfer.evals.result import Verdict
from batchinfer.evals.values import RowValues
from batchinfer.evals.verdicts import judge


def values(*numbers: float | str) -> RowValues:
    return RowValues.of(numbers)


def spec(**changes) -> MetricSpec:
    return MetricSpec(
        **({"name": "m", "title": "M", "unit": "", "kind": "continuous", "higher_is_better": True} | changes)
    )


def measured(scores: MetricScores, cluster: list[int] | None = None, **options):
    clusters = np.arange(len(scores)) if cluster is None else np.array(cluster)
    return judge([measure("e", scores, clusters, 0, **options)])[0]


def test_corpus_perplexity_weighs_documents_by_their_tokens() -> None:
    """Document A: one token, nll ln 2. B: nine tokens, nll ln 8 each. Not 5 = mean of perplexities, nor 4."""
    tokens = np.array([1.0, 9.0])
    nll = values(math.log(2), math.log(8))
    perplexity = spec(summary="exp_mean", higher_is_better=False)
    result = measured(MetricScores(perplexity, nll, nll, before_weights=tokens, after_weights=tokens))
    assert result.before.mean == pytest.approx(6.964, abs=0.001)
    assert result.difference.mean == 0.0


def test_sides_may_weigh_rows_differently() -> None:
    a, b = np.array([1.0, 1.0, 2.0]), np.array([3.0, 1.0, 0.0])
    result = measured(MetricScores(spec(), values(1, 2, 3), values(1, 2, 3), before_weights=a, after_weights=b))
    assert result.before.mean == pytest.approx(9 / 4)
    assert result.after.mean == pytest.approx(5 / 4)
    assert result.difference.mean == pytest.approx(-1.0)


def test_no_weight_at_all_is_no_mean() -> None:
    zeros = np.zeros(8)
    scores = MetricScores(spec(), values(*range(8)), values(*range(8)), before_weights=zeros, after_weights=np.ones(8))
    result = measured(scores)
    assert result.before.mean is None
    assert result.after.mean == pytest.approx(3.5)
    assert result.difference.mean is None
    assert "none of its rows has any weight" in result.reason
    assert result.verdict is Verdict.NOT_TESTED


def test_only_rows_with_a_value_on_both_sides_count() -> None:
    result = measured(MetricScores(spec(), values(1, "why", 3, 4), values(1, 2, "because", 8)))
    assert (result.n, result.num_clusters) == (2, 2)
    assert (result.before.mean, result.after.mean) == (2.5, 4.5)
    assert (result.num_null_before, result.num_null_after) == ({"why": 1}, {"because": 1})


def test_no_row_with_a_value_says_so() -> None:
    result = measured(MetricScores(spec(), values("a", "b"), values(1, 2)))
    assert (result.n, result.difference.mean, result.tests) == (0, None, ())
    assert result.reason.endswith("no row has a value on both sides")


def test_shares_of_all_or_none_have_an_interval() -> None:
    """Nothing wrong in 40 rows: a bootstrap would say exactly 100 %."""
    binary = spec(kind="binary")
    ones = values(*[1] * 40)
    result = measured(MetricScores(binary, ones, ones))
    assert result.before.mean == 1.0
    assert 0.90 < result.before.low < 0.93
    assert result.difference.low == pytest.approx(-result.difference.high)
    assert result.difference.high > 0.03
    same = measured(MetricScores(binary, ones, ones), are_outputs_same=True)
    assert (same.difference.low, same.difference.high) == (0.0, 0.0)


def test_equal_differences_are_a_point_with_a_note() -> None:
    numbers = np.random.default_rng(0).normal(size=30)
    result = measured(MetricScores(spec(), RowValues(numbers, {}), RowValues(numbers + 0.5, {})))
    assert result.difference.low == result.difference.high == pytest.approx(0.5)
    assert "so the interval is a point" in result.reason
    assert result.min_detectable_effect is None
    assert result.verdict is Verdict.BETTER


def test_too_few_clusters_are_not_tested_whatever_the_rows_say() -> None:
    """Five swaps have 32 outcomes: no p-value below 0.0625."""
    before, after = values(*[0.0] * 50), values(*[1.0] * 50)
    few = measured(MetricScores(spec(), before, after), cluster=[i % 5 for i in range(50)])
    assert few.verdict is Verdict.NOT_TESTED
    assert "5 clusters are too few to test: at least 6 are needed" in few.reason
    enough = measured(MetricScores(spec(), before, after), cluster=[i % 6 for i in range(50)])
    assert enough.verdict is Verdict.BETTER
    assert enough.tests[0].p_value == pytest.approx(2 / 2**6)


def test_metrics_that_cannot_differ_do_not_cost_the_others_power() -> None:
    """p = 0.03 alone is significant; three metrics without any difference must not triple it."""
    rng = np.random.default_rng(0)
    constant = values(*[0.0] * 12)
    results = [measure("e", MetricScores(spec(name=f"c{i}"), constant, constant), np.arange(12), 0) for i in range(3)]
    shifted = RowValues(np.array([1.0] * 6 + [0.0] * 6), {})
    one = measure("e", MetricScores(spec(name="x"), constant, shifted), np.arange(12), 0)
    assert one.tests[0].p_value == pytest.approx(2 / 2**6)
    judged = judge([*results, one])
    assert judged[-1].verdict is Verdict.BETTER
    assert judged[-1].tests[0].p_adjusted == pytest.approx(2 / 2**6)
    assert [result.tests[0].p_adjusted for result in judged[:3]] == [1.0, 1.0, 1.0]
    noisy = MetricScores(spec(name="n"), constant, RowValues(rng.normal(size=12), {}))
    assert judge([one, measure("e", noisy, np.arange(12), 0)])[0].verdict is Verdict.NO_CHANGE  # two tests count


def test_a_lower_figure_may_be_the_better_one() -> None:
    lower = spec(higher_is_better=False)
    rng = np.random.default_rng(0)
    before = RowValues(rng.normal(1.0, 0.1, size=50), {})
    after = RowValues(rng.normal(0.5, 0.1, size=50), {})
    result = measured(MetricScores(lower, before, after))
    assert result.verdict is Verdict.BETTER
    assert result.wins > 45
    assert result.difference.mean < 0
