"""rows.parquet: every figure of every pair, with the texts it is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from batchinfer.evals.protocol import MetricScores
from batchinfer.evals.rows import PairedRows
from batchinfer.evals.values import RowValues

if TYPE_CHECKING:
    import pyarrow as pa


def row_table(scores: Sequence[MetricScores], pairs: PairedRows, more_columns: Sequence[str] = ()) -> pa.Table:
    """One line per pair; see ComparisonResult.rows for the columns. Infinite figures stay what they are."""
    import pyarrow as pa

    columns: dict[str, pa.Array | pa.ChunkedArray] = {
        "id": _id_array(pairs),
        "sample_index": pa.array(pairs.sample_index, pa.int32()),
    }
    for one in scores:
        columns.update(_metric_columns(one, pairs))
    columns["before_text"] = pa.array(pairs.before.texts, pa.string())
    columns["after_text"] = pa.array(pairs.after.texts, pa.string())
    if pairs.references is not None:
        columns["reference"] = pa.array(pairs.references, pa.string())
    for name in more_columns:
        columns.setdefault(name, pairs.inputs.column(name))
    return pa.table(columns)


def _id_array(pairs: PairedRows) -> pa.Array | pa.ChunkedArray:
    import pyarrow as pa

    if pairs.id_column is not None:
        return pairs.inputs.column(pairs.id_column)
    return pa.array(pairs.ids)


def _metric_columns(scores: MetricScores, pairs: PairedRows) -> dict[str, pa.Array]:
    import pyarrow as pa

    name = scores.spec.name
    lines = pairs.first_pair_of_prompt if scores.spec.level == "prompt" else np.arange(len(pairs))

    def spread(values: np.ndarray) -> pa.Array:
        """NaN is null, as are the lines of a prompt's other samples."""
        numbers = np.full(len(pairs), np.nan)
        numbers[lines] = values
        return pa.array(numbers, pa.float64(), mask=np.isnan(numbers))

    reasons: list[str | None] = [None] * len(pairs)
    if scores.between is not None:
        for row, reason in scores.between.null_reasons.items():
            reasons[lines[row]] = reason
        figures = {name: spread(scores.between.values)}
    else:
        before, after = scores.sides
        for row in sorted({*before.null_reasons, *after.null_reasons}):
            reasons[lines[row]] = _both_reasons(before, after, row)
        with np.errstate(invalid="ignore"):  # of infinite values
            difference = after.values - before.values
        figures = {
            f"{name}.before": spread(before.values),
            f"{name}.after": spread(after.values),
            f"{name}.difference": spread(difference),
        }
    return {**figures, f"{name}.null_reason": pa.array(reasons, pa.string())}


def _both_reasons(before: RowValues, after: RowValues, row: int) -> str:
    mine, theirs = before.reason(row), after.reason(row)
    if mine == theirs:
        return f"{mine} (before and after)"
    return "; ".join(f"{side}: {reason}" for side, reason in (("before", mine), ("after", theirs)) if reason)
