"""`--gate 'accuracy>=-0.01'`: conditions on differences, for CI."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from batchinfer.errors import InputError
from batchinfer.evals.result import GateResult, MetricResult, SkippedEvaluator

_GATE = re.compile(r"\s*([\w.@-]+?)\s*(>=|<=)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


@dataclass(frozen=True, slots=True)
class Gate:
    """Holds if the whole interval of `metric`'s difference is on the right side of `limit`."""

    text: str
    metric: str
    is_at_least: bool
    limit: float

    @classmethod
    def parse(cls, text: str) -> Gate:
        match = _GATE.fullmatch(text)
        if match is None or not math.isfinite(float(match[3])):
            raise InputError(
                f"--gate {text!r}: write METRIC>=NUMBER or METRIC<=NUMBER, for example 'accuracy>=-0.01' "
                "(the difference after - before must not be below -0.01) or 'kl<=0.05'"
            )
        return cls(text.strip(), match[1], match[2] == ">=", float(match[3]))

    def check(self, metrics: Iterable[MetricResult], skipped: Sequence[SkippedEvaluator]) -> GateResult:
        """A gate whose metric was not measured, or has no interval, fails: nothing shows that it holds."""
        found = next((metric for metric in metrics if metric.name == self.metric), None)
        if found is None:
            reasons = [f"{one.name}: {one.reason}" for one in skipped]
            why = f"; left out: {'; '.join(reasons)}" if reasons else ""
            return GateResult(self.text, self.metric, False, None, f"{self.metric} was not measured{why}")
        bound = found.difference.low if self.is_at_least else found.difference.high
        if bound is None:
            return GateResult(self.text, self.metric, False, None, found.reason or "there is no interval")
        passed = bound >= self.limit if self.is_at_least else bound <= self.limit
        return GateResult(self.text, self.metric, passed, bound)


def parse_gates(texts: Sequence[str], known_metrics: Sequence[str]) -> list[Gate]:
    """`known_metrics` are glob patterns. Raises InputError for a gate that cannot be read or names none of them."""
    gates = [Gate.parse(text) for text in texts]
    for gate in gates:
        if not any(fnmatchcase(gate.metric, pattern) for pattern in known_metrics):
            raise InputError(
                f"--gate {gate.text!r}: no chosen evaluator gives a metric {gate.metric!r}; "
                f"there are {', '.join(known_metrics)}"
            )
    return gates
