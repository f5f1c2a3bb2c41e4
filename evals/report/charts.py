"""Which plots a result has, and what stands beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from batchinfer.evals.report.grid import grid
from batchinfer.evals.report.numbers import NumberFormat
from batchinfer.evals.report.plots import ForestRow, curve, distribution, forest
from batchinfer.evals.report.verdicts import main_metrics
from batchinfer.evals.result import ComparisonResult, Estimate, MetricResult, SliceResult, Table, Verdict

Floats = npt.NDArray[np.float64]

#: More slices than this in one plot are unreadable; the table has all.
MAX_SLICE_ROWS = 20
_MAX_SLICE_METRICS = 4


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot with its words."""

    title: str
    svg: Markup
    note: str = ""


@dataclass(frozen=True, slots=True)
class Crosstab:
    """A binary metric's pairs: how many are true before and after, only before, only after, never."""

    name: str
    title: str
    both: int
    only_before: int
    only_after: int
    neither: int


def forest_panels(result: ComparisonResult) -> list[Panel]:
    """Metrics of one unit share an axis. Figures between the two sides have their own, with their neutral value."""
    by_axis: dict[tuple[str, float | None], list[MetricResult]] = {}
    for metric in main_metrics(result):
        if metric.difference.mean is not None:
            neutral = None if metric.is_paired else metric.spec.neutral
            by_axis.setdefault((NumberFormat.of_metric(metric).unit, neutral), []).append(metric)
    panels = []
    for number, ((_, neutral), metrics) in enumerate(by_axis.items()):
        form = NumberFormat.of_metric(metrics[0])
        if neutral is None:
            unit = "percentage points" if form.unit == "%" else form.unit
            title, label = f"In {unit}", f"after − before, {unit}"
        else:
            equal = f"two equal sides give {neutral * form.factor:g}"
            title, label = f"Between the sides, in {form.unit}", f"{form.unit}; {equal}"
        rows = [_forest_row(metric) for metric in metrics]
        panels.append(Panel(title, forest(rows, label, f"f{number}", neutral=(neutral or 0.0) * form.factor)))
    return panels


def _forest_row(metric: MetricResult) -> ForestRow:
    form = NumberFormat.of_metric(metric)
    floor = metric.noise_floor.size if metric.noise_floor else None
    return ForestRow(
        label=metric.spec.title,
        text=_estimate_text(metric.difference, form, is_signed=metric.is_paired),
        mean=(metric.difference.mean or 0.0) * form.factor,
        low=_scaled(metric.difference.low, form),
        high=_scaled(metric.difference.high, form),
        verdict=metric.verdict,
        missed=_scaled(metric.min_detectable_effect, form) if metric.is_paired else None,
        noise=_scaled(floor, form),
    )


def _estimate_text(estimate: Estimate, form: NumberFormat, *, is_signed: bool) -> str:
    mean = form.signed(estimate.mean) if is_signed else form.value(estimate.mean)
    return f"{mean} {form.interval(estimate, is_signed=is_signed)}".rstrip()


def _scaled(number: float | None, form: NumberFormat) -> float | None:
    return None if number is None else number * form.factor


@dataclass(frozen=True, slots=True)
class Distributions:
    """Attributes:
    same: titles of metrics with one and the same value in all rows on both sides.
    """

    panels: list[Panel]
    crosstabs: list[Crosstab]
    same: list[str]


def distributions(result: ComparisonResult) -> Distributions:
    found = Distributions([], [], [])
    if result.rows is None:
        return found
    for number, metric in enumerate(main_metrics(result)):
        before, after = _row_values(result, metric)
        if not len(after):
            continue
        sides = after if before is None else np.concatenate([before, after])
        if np.ptp(sides) == 0:
            found.same.append(metric.spec.title)
        elif metric.spec.kind == "binary" and before is not None:
            found.crosstabs.append(_crosstab(metric, before, after))
        else:
            found.panels.append(_distribution(metric, before, after, f"d{number}"))
    return found


def _row_values(result: ComparisonResult, metric: MetricResult) -> tuple[Floats | None, Floats]:
    """Both sides' values in the rows where both are finite; (None, values) for figures between the sides."""

    def column(name: str) -> Floats:
        return np.asarray(result.rows.column(name).to_numpy(), dtype=np.float64)

    if not metric.is_paired:
        values = column(metric.name)
        return None, values[np.isfinite(values)]
    before, after = column(f"{metric.name}.before"), column(f"{metric.name}.after")
    is_finite = np.isfinite(before) & np.isfinite(after)
    return before[is_finite], after[is_finite]


def _distribution(metric: MetricResult, before: Floats | None, after: Floats, prefix: str) -> Panel:
    form = NumberFormat.of_rows(metric)
    spec = metric.spec
    means = [_row_mean(estimate, metric) for estimate in _sides(metric)]
    svg = distribution(
        None if before is None else before * form.factor,
        after * form.factor,
        form.unit or spec.title.lower(),
        prefix,
        means=[_scaled(mean, form) for mean in means],
        neutral=spec.neutral * form.factor,
    )
    rows = "prompts" if spec.level == "prompt" else "rows"
    is_weighted = means[-1] is not None and not math.isclose(means[-1], after.mean(), rel_tol=1e-6, abs_tol=1e-9)
    notes = [f"{len(after):,} {rows}", "weighted means" if is_weighted else ""]
    notes += ["the table has exp of them"] if spec.summary == "exp_mean" else []
    return Panel(spec.title, svg, "; ".join(filter(None, notes)))


def _sides(metric: MetricResult) -> list[Estimate | None]:
    return [metric.before, metric.after] if metric.is_paired else [metric.difference]


def _row_mean(estimate: Estimate | None, metric: MetricResult) -> float | None:
    """In the unit of the rows."""
    if estimate is None or estimate.mean is None or metric.spec.summary == "mean":
        return None if estimate is None else estimate.mean
    return math.log(estimate.mean) if estimate.mean > 0 else None


def _crosstab(metric: MetricResult, before: Floats, after: Floats) -> Crosstab:
    def num(is_before: bool, is_after: bool) -> int:
        return int(np.sum(((before == 1) == is_before) & ((after == 1) == is_after)))

    return Crosstab(
        metric.name, metric.spec.title, num(True, True), num(True, False), num(False, True), num(False, False)
    )


def grid_panels(tables: Sequence[Table]) -> list[Panel]:
    """Tables of one quantity over two kinds of things, such as texts by models."""
    return [Panel(table.title, grid(table, f"g{number}"), table.note or "") for number, table in enumerate(tables)]


def curve_panels(result: ComparisonResult) -> list[Panel]:
    drawable = [found for found in result.curves if any(y is not None for series in found.series for y in series.y)]
    return [
        Panel(found.title, curve(found, f"c{number}"), ". ".join(filter(None, (found.y_label, found.note))))
        for number, found in enumerate(drawable)
    ]


def slice_panels(slices: Sequence[SliceResult], metrics: Sequence[MetricResult], column_number: int) -> Iterator[Panel]:
    """Of the metrics that changed, else of those with a row that differs; not too many, the values below each other."""
    by_metric: dict[str, list[SliceResult]] = {}
    for one in slices:
        if one.difference.mean is not None:
            by_metric.setdefault(one.metric, []).append(one)
    order = (Verdict.WORSE, Verdict.BETTER, Verdict.CHANGED)
    known = [metric for metric in metrics if metric.name in by_metric and not metric.spec.is_derived]
    flagged = [metric for metric in known if metric.verdict in order]
    moved = [metric for metric in known if metric.wins + metric.losses]
    shown = sorted(flagged, key=lambda metric: order.index(metric.verdict)) or moved or known
    for number, metric in enumerate(shown[:_MAX_SLICE_METRICS]):
        found = by_metric[metric.name][:MAX_SLICE_ROWS]
        form = NumberFormat.of_metric(metric)
        neutral = 0.0 if metric.is_paired else metric.spec.neutral * form.factor
        rows = [
            ForestRow(
                label=f"{one.value} (n = {one.n:,})",
                text=_estimate_text(one.difference, form, is_signed=metric.is_paired),
                mean=(one.difference.mean or 0.0) * form.factor,
                low=_scaled(one.difference.low, form),
                high=_scaled(one.difference.high, form),
            )
            for one in found
        ]
        unit = "percentage points" if form.difference_unit == "points" else form.difference_unit
        label = f"after − before, {unit}" if metric.is_paired else form.unit
        yield Panel(metric.spec.title, forest(rows, label, f"s{column_number}-{number}", neutral=neutral))
