"""What a comparison found. report.json is exactly this, made strict; report.html shows it.

Every difference is after - before. A number that does not exist is None, never NaN, and the field
beside it says why. The per-row figures are an Arrow table, which goes to rows.parquet and not into
report.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from batchinfer.evals.protocol import MetricSpec

if TYPE_CHECKING:
    import pyarrow as pa

#: Version of report.json's schema; see docs/eval.md.
SCHEMA_VERSION = 1

Cell = str | float | int | bool | None


class Verdict(StrEnum):
    """What the numbers allow to say of one metric."""

    BETTER = "better"
    WORSE = "worse"
    CHANGED = "changed"  # significant, and neither direction is the better one
    NO_CHANGE = "no change"  # not significant after correction, or within the noise floor
    NOT_TESTED = "not tested"  # derived, between the sides without a noise floor, or too few rows


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % interval. All None where there is no value; low and high alone where there is no interval."""

    mean: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class TestResult:
    """Attributes:
    name: "mcnemar", "wilcoxon", "sign-flip permutation".
    p_value: two-sided; None where the test is not defined, `note` says why.
    p_adjusted: after Holm over the metrics that were tested.
    detail: what the test rests on, such as McNemar's discordant counts.
    """

    __test__ = False  # not a test of pytest's

    name: str
    p_value: float | None
    p_adjusted: float | None = None
    detail: Mapping[str, float] = field(default_factory=dict)
    note: str | None = None


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """The same measurement of the same model against itself: differences up to `size` are the engine's own.

    Attributes:
        difference: of the self-comparison, with its interval.
        size: the larger distance from neutral of the interval's ends.
    """

    difference: Estimate
    size: float | None


@dataclass(frozen=True, slots=True)
class MetricResult:
    """One metric, over all pairs that have a value on both sides.

    Attributes:
        evaluator: name of the evaluator that measured it.
        spec: name, title, unit, kind, direction.
        before, after: None for figures between the sides (KL, similarity of before and after).
        difference: after - before; for figures between the sides, their mean itself, to be read
            against `spec.neutral`.
        n: pairs (or prompts, see spec.level) with a value on both sides, which the estimates are over.
        num_clusters: that were resampled for the intervals.
        num_null_before, num_null_after: by reason.
        tests: the first one decides the verdict, and is the one that Holm was applied to.
        wins, equal, losses: rows where after is better, equal, worse; with no better direction, wins are the
            rows where after is larger. Of figures between the sides: above, at, below neutral.
        min_detectable_effect: smallest true difference that would be found at 5 % in 80 of 100 such comparisons.
        reason: why there is no estimate or no verdict.
    """

    evaluator: str
    spec: MetricSpec
    before: Estimate | None
    after: Estimate | None
    difference: Estimate
    n: int
    num_clusters: int
    num_null_before: Mapping[str, int]
    num_null_after: Mapping[str, int]
    tests: tuple[TestResult, ...]
    wins: int
    equal: int
    losses: int
    min_detectable_effect: float | None
    noise_floor: NoiseFloor | None
    verdict: Verdict
    reason: str | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_paired(self) -> bool:
        return self.before is not None


@dataclass(frozen=True, slots=True)
class SliceResult:
    """One metric over the rows with one value of a `--slice-by` column. Not tested: slices are for looking."""

    column: str
    value: str
    metric: str
    n: int
    before: Estimate | None
    after: Estimate | None
    difference: Estimate


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Which run a file of outputs comes from.

    Attributes:
        path: the file, or a name for what came from memory.
        model: name as the run was given it; None for files that no run wrote.
        params: sampling parameters, name -> {value, origin}.
        metadata: all that the file says of its run (see batchinfer/metadata.py); empty if nothing.
    """

    path: str
    num_rows: int
    model: str | None = None
    version: str | None = None
    created: str | None = None
    digests: Mapping[str, str | None] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pairing:
    """How the rows of the two runs were brought together."""

    num_before: int
    num_after: int
    num_pairs: int
    num_prompts: int
    num_clusters: int
    num_unpaired_before: int
    num_unpaired_after: int
    paired_by: str  # "column 'id'", "row number", ...
    clustered_by: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Notice:
    """Something to know before reading the numbers. A refusal is one that left metrics out.

    Attributes:
        code: stable, for programs: "params_differ", "template_differs", "input_differs", "retokenized", ...
        metrics: names of the evaluators or metrics concerned; empty: all.
    """

    code: str
    message: str
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SkippedEvaluator:
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class RowExample:
    """A row worth reading: among the worst regressions or best gains of `metric`."""

    metric: str
    id: Cell
    sample_index: int
    before: float | None
    after: float | None
    difference: float
    prompt: str | None
    reference: str | None
    before_text: str | None
    after_text: str | None


@dataclass(frozen=True, slots=True)
class Table:
    """A table of an evaluator's own, shown as it is: `rows` are lists of cells under `columns`.

    The 2 x 2 perplexity is the table named "perplexity_2x2": first column the texts' origin, then one column
    for each scoring model.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str | None = None
    unit: str | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a curve: y over x, with a 95 % band where low and high are given. None breaks the line."""

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...] | None = None
    high: tuple[float | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """A plot of an evaluator's own, such as the KL along the position in the output."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    note: str | None = None


@dataclass(frozen=True, slots=True)
class GateResult:
    """A condition on a metric's difference, judged at the interval's unfavourable end.

    `metric>=x` holds if the low end is at least x, `metric<=x` if the high end is at most x.
    """

    text: str
    metric: str
    passed: bool
    bound: float | None  # the interval's end that was compared
    reason: str | None = None  # why it failed without a bound


@dataclass(frozen=True)
class ComparisonResult:
    """Everything found, in the order it should be read.

    Attributes:
        refusals: what was left out because comparing it would be meaningless.
        warnings: what may make the numbers mean something else than they seem to.
        worst, best: by metric, at most 20 each.
        rows: one line per pair: id, sample_index, then for each metric its columns
            `NAME.before`, `NAME.after`, `NAME.difference` (or `NAME` alone for figures between the sides)
            and `NAME.null_reason`; then before_text, after_text, reference, and the slice columns.
            Metrics of level "prompt" stand on the line of the prompt's first sample, null on the others.
    """

    version: str
    created: str
    before: RunIdentity
    after: RunIdentity
    pairing: Pairing
    refusals: tuple[Notice, ...]
    warnings: tuple[Notice, ...]
    metrics: tuple[MetricResult, ...]
    skipped: tuple[SkippedEvaluator, ...]
    slices: tuple[SliceResult, ...]
    worst: Mapping[str, tuple[RowExample, ...]]
    best: Mapping[str, tuple[RowExample, ...]]
    tables: tuple[Table, ...]
    curves: tuple[Curve, ...]
    gates: tuple[GateResult, ...] = ()
    seed: int = 0
    confidence: float = 0.95
    rows: pa.Table = field(default=None, repr=False)

    def metric(self, name: str) -> MetricResult:
        """Raises KeyError naming what there is."""
        for metric in self.metrics:
            if metric.name == name:
                return metric
        raise KeyError(f"no metric {name!r}; there are {', '.join(m.name for m in self.metrics) or 'none'}")

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON values. NaN and infinity become null; `non_finite` lists where they stood and what they were."""
        non_finite: list[dict[str, str]] = []
        body = {f.name: _strict(getattr(self, f.name), f.name, non_finite) for f in fields(self) if f.name != "rows"}
        return {"schema_version": SCHEMA_VERSION, **body, "non_finite": non_finite}


def _strict(value: Any, path: str, non_finite: list[dict[str, str]]) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _strict(getattr(value, f.name), f"{path}.{f.name}", non_finite) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _strict(item, f"{path}.{key}", non_finite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item, f"{path}[{i}]", non_finite) for i, item in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        non_finite.append({"path": path, "value": str(value)})
        return None
    if value is None or isinstance(value, (str, bool, int, float)):
        return str(value) if isinstance(value, StrEnum) else value
    return str(value)  # dates, decimals and whatever else an id or slice column holds
