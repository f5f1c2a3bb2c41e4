"""Metrics by the values of a column: a line for each value, a column for each metric."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.evals.report.charts import MAX_SLICE_ROWS, Panel, slice_panels
from batchinfer.evals.report.numbers import NumberFormat
from batchinfer.evals.report.text import one_line
from batchinfer.evals.report.verdicts import main_metrics
from batchinfer.evals.result import ComparisonResult, MetricResult, SliceResult


@dataclass(frozen=True, slots=True)
class SliceCell:
    """Attributes:
    sign: which side of equality the whole interval lies on, "" if on both.
    """

    difference: str
    interval: str
    sign: str


@dataclass(frozen=True, slots=True)
class SliceLine:
    value: str
    n: int
    cells: list[SliceCell | None]  # one for each metric


@dataclass(frozen=True, slots=True)
class SliceColumn:
    """One `--slice-by` column. `heads` are (title, unit) of the metrics."""

    column: str
    heads: list[tuple[str, str]]
    lines: list[SliceLine]
    panels: list[Panel]
    num_in_panels: int


def slice_columns(result: ComparisonResult) -> list[SliceColumn]:
    metrics = main_metrics(result)
    by_column: dict[str, list[SliceResult]] = {}
    for one in result.slices:
        by_column.setdefault(one.column, []).append(one)
    return [_column(name, found, metrics, number) for number, (name, found) in enumerate(by_column.items())]


def _column(column: str, slices: list[SliceResult], metrics: list[MetricResult], number: int) -> SliceColumn:
    has_value = {one.metric for one in slices if one.difference.mean is not None}
    metrics = [metric for metric in metrics if metric.name in has_value]
    by_value: dict[str, dict[str, SliceResult]] = {}
    for one in slices:
        by_value.setdefault(one.value, {})[one.metric] = one
    lines = [
        SliceLine(
            one_line(value),
            max(one.n for one in found.values()),
            [_cell(found.get(metric.name), metric) for metric in metrics],
        )
        for value, found in by_value.items()
    ]
    return SliceColumn(
        column=column,
        heads=[_head(metric) for metric in metrics],
        lines=lines,
        panels=list(slice_panels(slices, metrics, number)),
        num_in_panels=min(len(lines), MAX_SLICE_ROWS),
    )


def _head(metric: MetricResult) -> tuple[str, str]:
    form = NumberFormat.of_metric(metric)
    return metric.spec.title, form.difference_unit if metric.is_paired else form.unit


def _cell(one: SliceResult | None, metric: MetricResult) -> SliceCell | None:
    if one is None or one.difference.mean is None:
        return None
    form = NumberFormat.of_metric(metric)
    found = one.difference
    return SliceCell(
        form.signed(found.mean) if metric.is_paired else form.value(found.mean),
        form.interval(found, is_signed=metric.is_paired),
        _sign(metric, found.low, found.high) if metric.is_paired else "",
    )


def _sign(metric: MetricResult, low: float | None, high: float | None) -> str:
    if low is None or high is None or low <= 0 <= high:
        return ""
    if metric.spec.higher_is_better is None:
        return "◆"
    return "▲" if (low > 0) == metric.spec.higher_is_better else "▼"
