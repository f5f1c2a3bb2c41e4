"""length: tokens of the outputs, how they ended, and which are empty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from batchinfer.evals.protocol import EvalContext, EvalOptions, MetricScores, MetricSpec, Needs, Scores
from batchinfer.evals.result import Table
from batchinfer.evals.rows import PairedRows, Side
from batchinfer.evals.values import RowValues

_TOKENS = MetricSpec(
    "output_tokens",
    "Output tokens",
    "tokens",
    "continuous",
    None,
    "tokens sampled, the end-of-sequence token included",
)
_TRUNCATED = MetricSpec(
    "truncated", "Truncated outputs", "share", "binary", False, "1 where the output was cut at the length limit"
)
_EMPTY = MetricSpec("empty", "Empty outputs", "share", "binary", False, "1 where the output is empty or whitespace")
_FAILED = MetricSpec("failed", "Rows without output", "share", "binary", False, "1 where the row has an error")


class Length:
    """What a file does not tell, such as finish reasons of plain texts, is left out."""

    name = "length"
    title = "Length and ends of the outputs"
    needs = Needs()
    metric_names = ("output_tokens", "truncated", "empty", "failed")

    def __init__(self, options: EvalOptions) -> None:
        pass

    def why_not(self, pairs: PairedRows, context: EvalContext) -> str | None:
        return self.needs.why_not(pairs, context)

    def score(self, pairs: PairedRows, context: EvalContext) -> Scores:
        figures: list[tuple[MetricSpec, Callable[[Side, int], float | str]]] = [
            (_TOKENS, _num_tokens),
            (_TRUNCATED, _is_truncated),
            (_EMPTY, _is_empty),
            (_FAILED, _is_failed),
        ]
        metrics = []
        for spec, figure in figures:
            before, after = (
                RowValues.of([figure(side, row) for row in range(len(pairs))]) for side in (pairs.before, pairs.after)
            )
            if len(before.null_reasons) < len(pairs) and len(after.null_reasons) < len(pairs):
                metrics.append(MetricScores(spec, before=before, after=after))
        return Scores(tuple(metrics), tables=(_finish_reasons(pairs),))


def _num_tokens(side: Side, row: int) -> float | str:
    if side.texts[row] is None:
        return "no output"
    count = int(side.num_output_tokens[row])
    return float(count) if count >= 0 else "the file has no counts of tokens"


def _is_truncated(side: Side, row: int) -> float | str:
    if side.texts[row] is None:
        return "no output"
    reason = side.finish_reasons[row]
    return "the file has no finish reason" if reason is None else float(reason == "length")


def _is_empty(side: Side, row: int) -> float | str:
    text = side.texts[row]
    return "no output" if text is None else float(not text.strip())


def _is_failed(side: Side, row: int) -> float:
    return float(side.texts[row] is None)


def _finish_reasons(pairs: PairedRows) -> Table:
    counts = [Counter(side.finish_reasons) for side in (pairs.before, pairs.after)]
    names = sorted({*counts[0], *counts[1]}, key=lambda name: -counts[0][name] - counts[1][name])
    rows = [(name or "unknown", counts[0][name], counts[1][name]) for name in names]
    return Table("finish_reasons", "Finish reasons", ("reason", "before", "after"), tuple(rows), unit="rows")
