"""What the numbers say, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchinfer.evals.report.numbers import NumberFormat, count, p_value
from batchinfer.evals.result import ComparisonResult, MetricResult, Verdict

#: Signs beside the words, so that colour is never alone.
SIGNS = {
    Verdict.WORSE: "▼",
    Verdict.BETTER: "▲",
    Verdict.CHANGED: "◆",
    Verdict.NO_CHANGE: "○",
    Verdict.NOT_TESTED: "–",
}
_HEADINGS = {
    Verdict.WORSE: "Worse",
    Verdict.BETTER: "Better",
    Verdict.CHANGED: "Changed, neither for better nor worse",
    Verdict.NO_CHANGE: "No change found",
    Verdict.NOT_TESTED: "Not tested",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One metric's sentence; `title` is what it begins with, `reason` what it ends with."""

    name: str
    title: str
    text: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class FindingGroup:
    verdict: Verdict
    sign: str
    heading: str
    blocks: list[FindingBlock]


@dataclass(frozen=True, slots=True)
class FindingBlock:
    """Findings with one and the same reason, which is said once, below them; most often one, or none has a reason."""

    findings: list[Finding]
    reason: str | None


def headline(result: ComparisonResult) -> str:
    """The whole result in one sentence."""
    if not result.pairing.num_pairs:
        return "Nothing to compare: no row of one run has a counterpart in the other"
    metrics = main_metrics(result)
    if not metrics:
        return "Nothing was measured"
    num = {verdict: sum(metric.verdict is verdict for metric in metrics) for verdict in Verdict}
    parts = []
    if num[Verdict.WORSE]:
        parts.append(f"{count(num[Verdict.WORSE], 'metric')} worse")
    if num[Verdict.BETTER]:
        parts.append(f"{num[Verdict.BETTER]} better" if parts else f"{count(num[Verdict.BETTER], 'metric')} better")
    if num[Verdict.CHANGED]:
        parts.append(f"{num[Verdict.CHANGED]} changed" if parts else f"{count(num[Verdict.CHANGED], 'metric')} changed")
    if not parts:
        if not num[Verdict.NO_CHANGE]:
            return "No metric could be tested"
        return f"No change found in {count(num[Verdict.NO_CHANGE], 'metric')}"
    if num[Verdict.NO_CHANGE]:
        parts.append(f"{num[Verdict.NO_CHANGE]} without a change")
    if num[Verdict.NOT_TESTED]:
        parts.append(f"{num[Verdict.NOT_TESTED]} not tested")
    return ", ".join(parts)


def main_metrics(result: ComparisonResult) -> list[MetricResult]:
    """Without those that are made from others."""
    return [metric for metric in result.metrics if not metric.spec.is_derived]


def finding_groups(metrics: Sequence[MetricResult]) -> list[FindingGroup]:
    """In the order they matter; empty groups are left out."""
    groups = []
    for verdict, heading in _HEADINGS.items():
        found = [_finding(metric) for metric in metrics if metric.verdict is verdict]
        if found:
            by_reason: dict[str | None, list[Finding]] = {}
            for one in found:
                by_reason.setdefault(one.reason, []).append(one)
            blocks = [FindingBlock(same, reason) for reason, same in by_reason.items()]
            groups.append(FindingGroup(verdict, SIGNS[verdict], heading, blocks))
    return groups


def _finding(metric: MetricResult) -> Finding:
    sentence = {
        Verdict.NO_CHANGE: _no_change,
        Verdict.NOT_TESTED: _not_tested,
    }.get(metric.verdict, _changed)
    is_beyond_noise = metric.verdict is Verdict.CHANGED and not metric.is_paired
    reason = metric.reason or ("beyond the noise floor" if is_beyond_noise else None)
    return Finding(metric.name, metric.spec.title, sentence(metric), reason)


def _changed(metric: MetricResult) -> str:
    form = NumberFormat.of_metric(metric)
    p = _p_text(metric)
    if metric.before is None or metric.after is None:
        return _between(metric, form)
    write = form.with_unit if form.unit == "%" else form.value
    return f"{write(metric.before.mean)} before, {write(metric.after.mean)} after: {_difference(metric, form)}{p}"


def _no_change(metric: MetricResult) -> str:
    form = NumberFormat.of_metric(metric)
    if metric.before is None:
        return _between(metric, form)
    if not metric.wins + metric.losses:
        return "no row differs"
    text = f"{_difference(metric, form)}{_p_text(metric)}"
    if metric.min_detectable_effect and not metric.reason:
        missed = form.with_unit(metric.min_detectable_effect, is_difference=True)
        text += f"; a change below {missed} may have been missed"
    return text


def _not_tested(metric: MetricResult) -> str:
    form = NumberFormat.of_metric(metric)
    if metric.difference.mean is None:
        return "no value"
    return _between(metric, form) if metric.before is None else _difference(metric, form)


def _difference(metric: MetricResult, form: NumberFormat) -> str:
    """ "−4.1 [−6.2, −2.3] points" """
    parts = (
        form.signed(metric.difference.mean),
        form.interval(metric.difference, is_signed=True),
        "" if form.difference_unit in metric.spec.title.lower() else form.difference_unit,
    )
    return " ".join(filter(None, parts))


def _between(metric: MetricResult, form: NumberFormat) -> str:
    interval = form.interval(metric.difference, is_signed=False)
    neutral = f"{metric.spec.neutral * form.factor:g}"
    parts = (form.value(metric.difference.mean), interval, form.unit)
    return f"{' '.join(filter(None, parts))}, where two equal sides give {neutral}"


def _p_text(metric: MetricResult) -> str:
    adjusted = metric.tests[0].p_adjusted if metric.tests else None
    if adjusted is None:
        return ""
    text = p_value(adjusted)
    return f", p\u00a0{text}" if text.startswith("<") else f", p\u00a0=\u00a0{text}"
