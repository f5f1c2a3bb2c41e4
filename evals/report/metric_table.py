"""The table of all metrics, and how each of their numbers was made."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.evals.report.numbers import NONE, NumberFormat, count, p_value
from batchinfer.evals.report.verdicts import SIGNS
from batchinfer.evals.result import ComparisonResult, MetricResult


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One line, ready to be shown."""

    name: str
    title: str
    unit: str
    direction: str  # which way is better, as a sign
    description: str
    before: str
    before_interval: str
    after: str
    after_interval: str
    difference: str
    interval: str
    p_adjusted: str
    tests: tuple[str, ...]  # each with its p-value before Holm
    n: str
    clusters: str
    num_nulls: int
    wins: str
    equal: str
    losses: str
    missed: str
    noise: str
    verdict: str
    sign: str
    is_derived: bool


@dataclass(frozen=True, slots=True)
class NullCount:
    """Rows of one metric that have no value, for one reason. Of figures between the sides `after` is 0."""

    title: str
    reason: str
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class MetricTable:
    rows: list[MetricRow]
    derived: list[MetricRow]
    nulls: list[NullCount]
    has_noise: bool


def metric_table(result: ComparisonResult) -> MetricTable:
    rows = [_row(metric) for metric in result.metrics]
    return MetricTable(
        rows=[row for row in rows if not row.is_derived],
        derived=[row for row in rows if row.is_derived],
        nulls=[null for metric in result.metrics if not metric.spec.is_derived for null in _nulls(metric)],
        has_noise=any(metric.noise_floor is not None for metric in result.metrics),
    )


def _row(metric: MetricResult) -> MetricRow:
    form = NumberFormat.of_metric(metric)
    before, after, is_paired = metric.before, metric.after, metric.is_paired
    adjusted = metric.tests[0].p_adjusted if metric.tests else None
    spec = metric.spec
    rows = "prompt" if spec.level == "prompt" else "row"
    return MetricRow(
        name=metric.name,
        title=spec.title,
        unit=form.unit,
        direction={True: "↑", False: "↓", None: ""}[spec.higher_is_better],
        description=spec.description,
        before=form.value(before.mean) if before else "",
        before_interval=form.interval(before, is_signed=False) if before else "",
        after=form.value(after.mean) if after else "",
        after_interval=form.interval(after, is_signed=False) if after else "",
        difference=form.signed(metric.difference.mean) if is_paired else form.value(metric.difference.mean),
        interval=form.interval(metric.difference, is_signed=is_paired),
        p_adjusted=p_value(adjusted),
        tests=tuple(_test(test.name, test.p_value, test.note) for test in metric.tests),
        n=count(metric.n, rows),
        clusters="" if metric.num_clusters == metric.n else count(metric.num_clusters, "cluster"),
        num_nulls=sum(null.before + null.after for null in _nulls(metric)),
        wins=f"{metric.wins:,}",
        equal=f"{metric.equal:,}",
        losses=f"{metric.losses:,}",
        missed=form.value(metric.min_detectable_effect),
        noise=form.value(metric.noise_floor.size) if metric.noise_floor else NONE,
        verdict=str(metric.verdict),
        sign=SIGNS[metric.verdict],
        is_derived=spec.is_derived,
    )


def _test(name: str, value: float | None, note: str | None) -> str:
    name = name.removeprefix("sign-flip ").removesuffix(" signed-rank")
    return f"{name}: {note}" if value is None and note else f"{name} {p_value(value)}"


def _nulls(metric: MetricResult) -> list[NullCount]:
    before = metric.num_null_before
    after = metric.num_null_after if metric.is_paired else {}
    return [
        NullCount(metric.spec.title, reason, before.get(reason, 0), after.get(reason, 0))
        for reason in dict.fromkeys([*before, *after])
    ]
