"""A comparison as text: a table of the metrics, what to know before reading it, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO

from batchinfer.evals.result import ComparisonResult, Estimate, MetricResult, Verdict

#: More than any line of the table needs.
_LOG_WIDTH = 200
_STYLES = {Verdict.BETTER: "green", Verdict.WORSE: "red", Verdict.CHANGED: "yellow"}


def render(result: ComparisonResult, *, is_terminal: bool, width: int | None = None) -> str:
    """Plain text off a terminal, as it goes to logs: one line for each metric, as wide as it has to be."""
    from rich.console import Console

    buffer = StringIO()
    console = Console(
        file=buffer,
        force_terminal=is_terminal,
        no_color=not is_terminal,
        width=width or (None if is_terminal else _LOG_WIDTH),
        highlight=False,
        emoji=False,
        markup=False,
    )
    for line in _header(result):
        console.print(line, soft_wrap=True)
    if result.metrics:
        console.print(_table(result))
    for line in _footer(result):
        console.print(line, soft_wrap=True)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def _header(result: ComparisonResult) -> Iterator[str]:
    for name, run in (("before", result.before), ("after", result.after)):
        model = f" ({run.model})" if run.model else ""
        yield f"{name:<9} {run.path}{model}, {run.num_rows:,} rows"
    pairing = result.pairing
    yield (
        f"pairs     {pairing.num_pairs:,} by {pairing.paired_by}, {pairing.num_clusters:,} clusters by "
        f"{pairing.clustered_by}; without a pair: {pairing.num_unpaired_before:,} before, "
        f"{pairing.num_unpaired_after:,} after"
    )
    for notice in result.refusals:
        yield f"refused   {notice.message}"
    for notice in result.warnings:
        yield f"warning   {notice.message}"
    if not pairing.num_pairs:
        yield "no pairs: nothing can be compared"


def _table(result: ComparisonResult) -> object:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("metric", "before", "after", "difference [95 %]", "p adj.", "better/equal/worse", "n", "verdict"):
        table.add_column(name, justify="left" if name in ("metric", "verdict") else "right")
    for metric in result.metrics:
        if metric.spec.is_derived:
            continue
        verdict = Text(str(metric.verdict), style=_STYLES.get(metric.verdict, ""))
        table.add_row(*_cells(metric), verdict)
    return table


def _cells(metric: MetricResult) -> list[str]:
    p_adjusted = metric.tests[0].p_adjusted if metric.tests else None
    return [
        metric.name,
        _number(metric.before.mean if metric.before else None),
        _number(metric.after.mean if metric.after else None),
        _interval(metric.difference, is_signed=metric.is_paired),
        "-" if p_adjusted is None else "<0.0001" if p_adjusted < 0.0001 else f"{p_adjusted:.4f}",
        f"{metric.wins:,}/{metric.equal:,}/{metric.losses:,}" if metric.is_paired else f"-/{metric.equal:,}/-",
        f"{metric.n:,}",
    ]


def _footer(result: ComparisonResult) -> Iterator[str]:
    metrics_of: dict[str, list[str]] = {}
    for metric in result.metrics:
        if metric.reason and not metric.spec.is_derived:
            metrics_of.setdefault(metric.reason, []).append(metric.name)
    for reason, names in metrics_of.items():
        yield f"{', '.join(names)}: {reason}"
    for skipped in result.skipped:
        yield f"left out  {skipped.name}: {skipped.reason}"
    for gate in result.gates:
        bound = "" if gate.bound is None else f" (bound {_number(gate.bound)})"
        yield f"gate      {gate.text}: {'passed' if gate.passed else 'FAILED'}{bound}{_because(gate.reason)}"


def _because(reason: str | None) -> str:
    return f": {reason}" if reason else ""


def _interval(estimate: Estimate, *, is_signed: bool) -> str:
    mean = _number(estimate.mean, is_signed)
    if estimate.low is None or estimate.high is None:
        return mean
    return f"{mean} [{_number(estimate.low, is_signed)}, {_number(estimate.high, is_signed)}]"


def _number(value: float | None, is_signed: bool = False) -> str:
    if value is None:
        return "-"
    sign = "+" if is_signed else ""
    return f"{value:{sign},.4f}" if abs(value) < 100 else f"{value:{sign},.1f}"
