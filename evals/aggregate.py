"""Figures of rows -> estimates, intervals and tests: the same for every metric. The verdicts are in verdicts.py."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchinfer.evals.protocol import MetricScores, MetricSpec
from batchinfer.evals.result import Estimate, MetricResult, TestResult, Verdict
from batchinfer.evals.stats.bootstrap import Floats, Interval, Statistic, bca_intervals
from batchinfer.evals.stats.permutation import sign_flip_test
from batchinfer.evals.stats.proportions import FEW_EVENTS, bonett_price, wilson
from batchinfer.evals.stats.significance import (
    largest_unseen_share,
    mcnemar,
    min_detectable_effect,
    wilcoxon_signed_rank,
)
from batchinfer.evals.values import RowValues

LEVEL = 0.05
#: With fewer clusters no outcome of the sign-flip test is below LEVEL: 2 / 2^5 = 0.0625.
MIN_CLUSTERS_TO_TEST = 6

_MAX_REASONS = 20

Clusters = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ValidRows:
    """The rows of a metric that have a value on both sides, finite ones only. All arrays [n]."""

    index: npt.NDArray[np.int64]  # into the metric's rows
    cluster: Clusters  # 0 .. num_clusters - 1
    before: Floats  # of figures between the sides: their value
    after: Floats
    before_weights: Floats
    after_weights: Floats
    num_infinite: int

    @property
    def num_clusters(self) -> int:
        return int(self.cluster.max()) + 1 if len(self.cluster) else 0

    @property
    def are_independent(self) -> bool:
        return self.num_clusters == len(self.index)

    @property
    def are_weighted(self) -> bool:
        return not (np.all(self.before_weights == 1) and np.all(self.after_weights == 1))

    def sums(self) -> Floats:
        """[num_clusters, 4] Σ w·v and Σ w before, then after."""
        parts = (
            self.before_weights * self.before,
            self.before_weights,
            self.after_weights * self.after,
            self.after_weights,
        )
        return np.stack([np.bincount(self.cluster, part, self.num_clusters) for part in parts], axis=1)


def valid_rows(scores: MetricScores, cluster: Clusters, mask: npt.NDArray[np.bool_] | None = None) -> ValidRows:
    """`cluster` [rows of the metric]; `mask` leaves rows out."""
    before = scores.before or scores.between
    assert before is not None
    after = scores.after or before
    has_value = ~(np.isnan(before.values) | np.isnan(after.values))
    if mask is not None:
        has_value &= mask
    is_finite = np.isfinite(before.values) & np.isfinite(after.values)
    index = np.flatnonzero(has_value & is_finite)
    ones = np.ones(len(before))
    before_weights = ones if scores.before_weights is None else scores.before_weights
    after_weights = before_weights if scores.between else ones if scores.after_weights is None else scores.after_weights
    return ValidRows(
        index=index,
        cluster=np.unique(cluster[index], return_inverse=True)[1].astype(np.int64),
        before=before.values[index],
        after=after.values[index],
        before_weights=before_weights[index],
        after_weights=after_weights[index],
        num_infinite=int(np.sum(has_value & ~is_finite)),
    )


@dataclass(frozen=True, slots=True)
class Estimates:
    """Of one metric over some rows; `before` and `after` are None for figures between the sides."""

    before: Estimate | None
    after: Estimate | None
    difference: Estimate
    standard_error: float | None  # of the difference
    n: int
    num_clusters: int


def estimate(
    scores: MetricScores,
    rows: ValidRows,
    seed: int,
    *,
    are_outputs_same: bool = False,
    confidence: float = 0.95,
    num_resamples: int | None = None,
) -> Estimates:
    """Means and their intervals. `are_outputs_same`: every output is the same text before and after."""
    spec = scores.spec
    if not len(rows.index) or rows.num_infinite:
        none = Estimate(None)
        return Estimates(
            none if scores.is_paired else None, none if scores.is_paired else None, none, None, len(rows.index), 0
        )
    intervals = bca_intervals(
        rows.sums(),
        _means(spec, scores.is_paired),
        _rng(seed, spec.name),
        confidence=confidence,
        num_resamples=num_resamples,
    )
    is_plain = spec.summary == "mean" and scores.is_paired and not rows.are_weighted
    if spec.kind == "binary" and is_plain and rows.num_clusters > 1:
        intervals = _with_few_events(intervals, rows, confidence, are_outputs_same)
    elif spec.unit == "share" and is_plain and rows.num_clusters > 1 and not are_outputs_same:
        intervals = [*intervals[:2], _of_equal_shares(intervals[2], rows, confidence)]
    found = [_estimate(interval) for interval in intervals]
    error = intervals[-1].standard_error
    return Estimates(
        before=found[0] if scores.is_paired else None,
        after=found[1] if scores.is_paired else None,
        difference=found[-1],
        standard_error=error if np.isfinite(error) and error > 0 else None,
        n=len(rows.index),
        num_clusters=rows.num_clusters,
    )


def measure(
    evaluator: str,
    scores: MetricScores,
    cluster: Clusters,
    seed: int,
    *,
    are_outputs_same: bool = False,
    confidence: float = 0.95,
) -> MetricResult:
    """Everything about one metric but the verdict, which needs the others; see judge()."""
    rows = valid_rows(scores, cluster)
    found = estimate(scores, rows, seed, are_outputs_same=are_outputs_same, confidence=confidence)
    wins, equal, losses = _compare_rows(scores, rows)
    error = found.standard_error
    return MetricResult(
        evaluator=evaluator,
        spec=scores.spec,
        before=found.before,
        after=found.after,
        difference=found.difference,
        n=found.n,
        num_clusters=rows.num_clusters,
        num_null_before=_null_counts(scores.before or scores.between),
        num_null_after=_null_counts(scores.after or scores.between),
        tests=_tests(scores, rows, seed),
        wins=wins,
        equal=equal,
        losses=losses,
        min_detectable_effect=None if error is None else min_detectable_effect(error, level=LEVEL),
        noise_floor=None,
        verdict=Verdict.NOT_TESTED,
        reason=_reason(scores, rows, found, are_outputs_same),
    )


def _means(spec: MetricSpec, is_paired: bool) -> Statistic:
    def means(totals: Floats) -> Floats:
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            before = totals[..., 0] / totals[..., 1]
            after = totals[..., 2] / totals[..., 3]
            if spec.summary == "exp_mean":
                before, after = np.exp(before), np.exp(after)
            return np.stack([before, after, after - before] if is_paired else [before], axis=-1)

    return means


def _rng(seed: int, *names: str) -> np.random.Generator:
    """Of the metric's own, so that its numbers do not depend on which other metrics are looked at."""
    return np.random.default_rng([seed % 2**64, *(zlib.crc32(name.encode()) for name in names)])


def _with_few_events(
    intervals: list[Interval], rows: ValidRows, confidence: float, are_outputs_same: bool
) -> list[Interval]:
    """Of clustered rows only where there is no event at all: then each cluster is as good as one row."""
    n = rows.num_clusters
    few = FEW_EVENTS if rows.are_independent else 1
    result = []
    for values, interval in zip((rows.before, rows.after), intervals[:2], strict=True):
        num_true = int(values.sum())
        if min(num_true, len(values) - num_true) < few:
            low, high = wilson(num_true if rows.are_independent else n * (num_true > 0), n, confidence)
            interval = Interval(interval.value, low, high, interval.standard_error)
        result.append(interval)
    difference = intervals[2]
    only_before = int(np.sum(rows.before > rows.after))
    only_after = int(np.sum(rows.after > rows.before))
    if only_before + only_after < few and not are_outputs_same:
        low, high = bonett_price(only_before, only_after, n, confidence)
        error = difference.standard_error or (high - low) / 4
        difference = Interval(difference.value, low, high, error)
    return [*result, difference]


def _of_equal_shares(interval: Interval, rows: ValidRows, confidence: float) -> Interval:
    """Where no row's share differs, such as pass@k: as wide as an accuracy's, a share being at most 1."""
    if not np.array_equal(rows.before, rows.after):
        return interval
    low, high = bonett_price(0, 0, rows.num_clusters, confidence)
    return Interval(interval.value, low, high, (high - low) / 4)


def _estimate(interval: Interval) -> Estimate:
    numbers = (float(x) if np.isfinite(x) else None for x in (interval.value, interval.low, interval.high))
    return Estimate(*numbers)


def _compare_rows(scores: MetricScores, rows: ValidRows) -> tuple[int, int, int]:
    """Rows better, equal, worse."""
    if scores.is_paired:
        difference = rows.after - rows.before
        sign = -1.0 if scores.spec.higher_is_better is False else 1.0
    else:
        difference = rows.before - scores.spec.neutral
        sign = 1.0
    scale = np.maximum(1.0, np.maximum(np.abs(rows.before), np.abs(rows.after)))
    is_equal = np.abs(difference) <= 1e-9 * scale
    wins = int(np.sum((difference * sign > 0) & ~is_equal))
    equal = int(np.sum(is_equal))
    return wins, equal, len(difference) - wins - equal


def _null_counts(values: RowValues | None) -> dict[str, int]:
    """The most frequent reasons; a user's function may give each row one of its own."""
    assert values is not None
    counts = Counter(values.null_reasons.values()).most_common()
    shown = dict(counts[:_MAX_REASONS])
    if len(counts) > _MAX_REASONS:
        shown["other reasons"] = sum(count for _, count in counts[_MAX_REASONS:])
    return shown


def _tests(scores: MetricScores, rows: ValidRows, seed: int) -> tuple[TestResult, ...]:
    spec = scores.spec
    if not scores.is_paired or spec.is_derived or rows.num_infinite or rows.num_clusters < MIN_CLUSTERS_TO_TEST:
        return ()
    if spec.kind == "binary" and rows.are_independent:
        found = mcnemar(rows.before, rows.after)
        counts = {"only_before": float(found.num_only_before), "only_after": float(found.num_only_after)}
        name = "McNemar, exact" if found.is_exact else "McNemar, chi-squared"
        return (TestResult(name, found.p_value, detail=counts),)
    statistic = _means(spec, is_paired=True)
    sums = rows.sums()
    p_value = sign_flip_test(
        sums[:, :2], sums[:, 2:], lambda totals: statistic(totals)[..., 2:], _rng(seed, spec.name, "flips")
    )
    tests = [
        TestResult("sign-flip permutation", p_value)
        if np.isfinite(p_value)
        else TestResult("sign-flip permutation", None, note="a side's mean is not defined")
    ]
    if rows.are_independent and not rows.are_weighted:
        tests.append(TestResult("Wilcoxon signed-rank", wilcoxon_signed_rank(rows.after - rows.before)))
    return tuple(tests)


def _reason(scores: MetricScores, rows: ValidRows, found: Estimates, are_outputs_same: bool) -> str | None:
    rows_name = "prompts" if scores.spec.level == "prompt" else "rows"
    if rows.num_infinite:
        return f"{rows.num_infinite} {rows_name} have an infinite value, so there is no mean"
    if not len(rows.index):
        return f"no {rows_name[:-1]} has a value on both sides"
    if found.difference.mean is None:
        return "one side has no mean: none of its rows has any weight"
    if found.difference.low is None:
        return "one cluster alone has no interval"
    if not scores.is_paired or found.difference.low != found.difference.high:
        return None
    share = f"{100 * largest_unseen_share(rows.num_clusters):.2g} %"
    same = "all outputs are the same" if are_outputs_same else "the difference is the same in all of them"
    return (
        f"{same}, so the interval is a point; it speaks of these {len(rows.index)} {rows_name}, "
        f"of others up to {share} could differ"
    )
