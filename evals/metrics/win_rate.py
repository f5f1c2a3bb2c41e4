"""win_rate: of each metric with a better direction, how many rows got better, stayed, got worse."""

from __future__ import annotations

import numpy as np

from batchinfer.evals.protocol import EvalContext, EvalOptions, MetricScores, MetricSpec, Needs, Scores
from batchinfer.evals.result import Table
from batchinfer.evals.rows import PairedRows
from batchinfer.evals.values import RowValues


class WinRate:
    name = "win_rate"
    title = "Win rates"
    needs = Needs(other_metrics=True)
    metric_names = ("win_rate.*",)

    def __init__(self, options: EvalOptions) -> None:
        pass

    def why_not(self, pairs: PairedRows, context: EvalContext) -> str | None:
        if not any(_has_direction(one) for one in context.scored):
            return "no other metric says which direction is better"
        return self.needs.why_not(pairs, context)

    def score(self, pairs: PairedRows, context: EvalContext) -> Scores:
        metrics = tuple(_wins(one) for one in context.scored if _has_direction(one))
        return Scores(metrics, tables=(_table(metrics),))


def _has_direction(scores: MetricScores) -> bool:
    return scores.is_paired and scores.spec.higher_is_better is not None


def _wins(scores: MetricScores) -> MetricScores:
    """1 where after is better, 0.5 where equal, 0 where worse: its mean is the win rate, ties counted half."""
    base = scores.spec
    before, after = scores.sides
    sign = 1 if base.higher_is_better else -1
    with np.errstate(invalid="ignore"):
        values = 0.5 + 0.5 * sign * np.sign(after.values - before.values)
    nulls = np.flatnonzero(np.isnan(values)).tolist()
    reasons = {row: before.reason(row) or after.reason(row) or "infinite on both sides" for row in nulls}
    spec = MetricSpec(
        f"win_rate.{base.name}",
        f"Win rate by {base.title}",
        "share",
        "continuous",
        higher_is_better=True,
        description=f"1 where {base.name} is better after, 0.5 where equal, 0 where worse",
        level=base.level,
        neutral=0.5,
        is_derived=True,
    )
    return MetricScores(spec, between=RowValues(values, reasons))


def _table(metrics: tuple[MetricScores, ...]) -> Table:
    rows = []
    for one in metrics:
        assert one.between is not None
        found = one.between.values[~np.isnan(one.between.values)]
        shares = [float(np.mean(found == value)) if len(found) else None for value in (1.0, 0.5, 0.0)]
        rows.append((one.spec.name.removeprefix("win_rate."), len(found), *shares))
    return Table(
        "win_rates", "Rows better, equal and worse", ("metric", "rows", "better", "equal", "worse"), tuple(rows)
    )
