"""Two runs in, everything that can be said about their difference out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from batchinfer.config import EngineConfig
from batchinfer.errors import InputError
from batchinfer.evals.aggregate import measure
from batchinfer.evals.compatibility import Compatibility, check_compatibility
from batchinfer.evals.examples import worst_and_best
from batchinfer.evals.gates import parse_gates
from batchinfer.evals.pairing import pair_rows
from batchinfer.evals.protocol import EvalContext, EvalOptions, Evaluator, MetricScores
from batchinfer.evals.registry import in_order, make_evaluators
from batchinfer.evals.result import (
    ComparisonResult,
    Curve,
    MetricResult,
    NoiseFloor,
    Notice,
    Pairing,
    SkippedEvaluator,
    Table,
)
from batchinfer.evals.row_table import row_table
from batchinfer.evals.rows import PairedRows
from batchinfer.evals.run_output import RunOutput, load_run_output
from batchinfer.evals.slices import check_slice_columns, slice_metrics
from batchinfer.evals.verdicts import judge, noise_floor
from batchinfer.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa


def compare(
    before: str | Path | pa.Table,
    after: str | Path | pa.Table,
    *,
    metrics: Sequence[str | Evaluator] | None = None,
    reference_column: str | None = None,
    cluster_column: str | None = None,
    id_column: str | None = None,
    output_column: str | None = None,
    slice_by: Sequence[str] = (),
    noise_run: str | Path | pa.Table | None = None,
    gates: Sequence[str] = (),
    options: EvalOptions | None = None,
    before_model: str | None = None,
    after_model: str | None = None,
    engine: EngineConfig | None = None,
    progress: Callable[[str], None] = lambda text: None,
    check_interrupt: Callable[[], None] = lambda: None,
) -> ComparisonResult:
    """Pair the rows of two runs, measure both, and say what changed. Deterministic in its arguments.

    Args:
        before, after: files that `batchinfer run` wrote, other files with a column of texts, or tables.
        metrics: names of evaluators, or evaluators; None: all that the inputs allow.
        reference_column, cluster_column: see pair_rows().
        id_column, output_column: see load_run_output().
        slice_by: input columns to look at the metrics by.
        noise_run: a second run of `before`'s model under another seed or batch order: what differs between
            the two is the noise floor.
        gates: "METRIC>=NUMBER" or "METRIC<=NUMBER", on the difference's interval.
        options: of the evaluators; its seed is that of everything random here.
        before_model, after_model, engine: for evaluators that run the models.
    Raises InputError for what is the user's to fix, before anything is measured where that can be known. No
    pairs at all are no error: the result has none, and no metric.
    """
    options = options or EvalOptions()
    evaluators = choose_evaluators(metrics, options)
    wanted_gates = parse_gates(gates, [name for one in evaluators for name in one.metric_names])
    named = {"before": before, "after": after} | ({} if noise_run is None else {"noise run": noise_run})
    runs = {
        name: load_run_output(source, name=name, output_column=output_column, id_column=id_column)
        for name, source in named.items()
    }
    columns = {"reference_column": reference_column, "cluster_column": cluster_column}
    pairing = check_compatibility(pair_rows(runs["before"], runs["after"], **columns))
    noise = None if noise_run is None else _pair_noise(runs["before"], runs["noise run"], **columns)
    pairs = pairing.pairs
    check_slice_columns(pairs, slice_by)
    context = EvalContext(
        options=options,
        before_model=before_model,
        after_model=after_model,
        engine=engine or EngineConfig(),
        progress=progress,
        check_interrupt=check_interrupt,
    )
    found = _score(evaluators, pairing, context, must_run=metrics is not None)
    floors: dict[str, NoiseFloor] = {}
    if noise is not None:
        context = replace(context, after_model=before_model, progress=lambda text: progress(f"noise floor: {text}"))
        floors = _noise_floors(noise, evaluators, context)
    results = judge(found.measured(pairs, options.seed), floors)
    slices, slice_notices = slice_metrics(found.metrics, pairs, slice_by, options.seed)
    examples = {one.spec.name: worst_and_best(one, pairs) for one in found.metrics if not one.spec.is_derived}
    return ComparisonResult(
        version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        before=pairs.before.run,
        after=pairs.after.run,
        pairing=_pairing(runs["before"], runs["after"], pairs),
        refusals=pairing.refusals,
        warnings=(*pairing.warnings, *found.warnings, *slice_notices),
        metrics=tuple(results),
        skipped=tuple(found.skipped),
        slices=tuple(slices),
        worst={name: worst for name, (worst, _) in examples.items()},
        best={name: best for name, (_, best) in examples.items()},
        tables=tuple(found.tables),
        curves=tuple(found.curves),
        gates=tuple(gate.check(results, found.skipped) for gate in wanted_gates),
        seed=options.seed,
        rows=row_table(found.metrics, pairs, slice_by),
    )


def choose_evaluators(metrics: Sequence[str | Evaluator] | None, options: EvalOptions) -> list[Evaluator]:
    """Names are looked up, evaluators taken as they are. Raises InputError as make_evaluators()."""
    if metrics is None:
        return make_evaluators(None, options)
    if not metrics:
        raise InputError("--metrics names no evaluator")
    chosen: list[Evaluator] = []
    for one in metrics:
        chosen += make_evaluators([one], options) if isinstance(one, str) else [one]
    return in_order(chosen)


@dataclass(slots=True)
class _Found:
    """What the evaluators gave, one after the other."""

    metrics: list[MetricScores] = field(default_factory=list)
    evaluator_of: dict[str, str] = field(default_factory=dict)  # metric -> evaluator
    tables: list[Table] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    warnings: list[Notice] = field(default_factory=list)
    skipped: list[SkippedEvaluator] = field(default_factory=list)

    def measured(self, pairs: PairedRows, seed: int) -> list[MetricResult]:
        are_same = list(pairs.before.texts) == list(pairs.after.texts)
        cluster = {"sample": pairs.cluster_index, "prompt": pairs.cluster_of_prompt}
        return [
            measure(self.evaluator_of[one.spec.name], one, cluster[one.spec.level], seed, are_outputs_same=are_same)
            for one in self.metrics
        ]


def _score(evaluators: Sequence[Evaluator], pairing: Compatibility, context: EvalContext, *, must_run: bool) -> _Found:
    """`must_run`: an evaluator that cannot run is the user's error, not just left out."""
    pairs = pairing.pairs
    found = _Found()
    for evaluator in evaluators:
        context = replace(context, scored=tuple(found.metrics))
        reason = pairing.refused(evaluator.name) or ("no pairs" if not len(pairs) else None)
        why_not = None if reason else evaluator.why_not(pairs, context)
        if why_not and must_run:
            raise InputError(f"--metrics {evaluator.name}: {why_not}")
        if reason or why_not:
            found.skipped.append(SkippedEvaluator(evaluator.name, reason or why_not or ""))
            continue
        context.progress(f"measuring: {evaluator.title}")
        context.check_interrupt()
        scores = evaluator.score(pairs, context)
        for one in scores.metrics:
            _check(one, evaluator.name, pairs, found.evaluator_of)
            refusal = pairing.refused(one.spec.name)
            if refusal:
                found.skipped.append(SkippedEvaluator(one.spec.name, refusal))
                continue
            found.evaluator_of[one.spec.name] = evaluator.name
            found.metrics.append(one)
        found.tables += scores.tables
        found.curves += scores.curves
        found.warnings += [Notice("evaluator", text, (evaluator.name,)) for text in scores.warnings]
    return found


def _check(scores: MetricScores, evaluator: str, pairs: PairedRows, taken: dict[str, str]) -> None:
    """Evaluators come from other packages too."""
    name = scores.spec.name
    if name in taken:
        raise InputError(
            f"evaluators {taken[name]!r} and {evaluator!r} both give a metric {name!r}: choose one of them"
        )
    expected = pairs.num_prompts if scores.spec.level == "prompt" else len(pairs)
    if len(scores) != expected:
        raise ValueError(
            f"evaluator {evaluator!r} gave {len(scores)} values of {name!r} for {expected} {scores.spec.level}s"
        )


def _pair_noise(before: RunOutput, noise: RunOutput, **columns: str | None) -> Compatibility:
    digests = before.identity.digests, noise.identity.digests
    if all(digests) and dict(digests[0]) != dict(digests[1]):
        raise InputError(f"{noise.identity.path} is a run of another model than {before.identity.path}: no noise floor")
    pairing = check_compatibility(pair_rows(before, noise, **columns))
    if not len(pairing.pairs):
        raise InputError(f"{noise.identity.path} and {before.identity.path} have no row in common: no noise floor")
    return pairing


def _noise_floors(
    pairing: Compatibility, evaluators: Sequence[Evaluator], context: EvalContext
) -> dict[str, NoiseFloor]:
    """By metric: what the same evaluators find between two runs of the same model."""
    found = _score(evaluators, pairing, context, must_run=False)
    return {result.name: noise_floor(result) for result in found.measured(pairing.pairs, context.options.seed)}


def _pairing(before: RunOutput, after: RunOutput, pairs: PairedRows) -> Pairing:
    return Pairing(
        num_before=before.table.num_rows,
        num_after=after.table.num_rows,
        num_pairs=len(pairs),
        num_prompts=pairs.num_prompts,
        num_clusters=pairs.num_clusters,
        num_unpaired_before=pairs.num_unpaired_before,
        num_unpaired_after=pairs.num_unpaired_after,
        paired_by=pairs.paired_by,
        clustered_by=f"column {pairs.cluster_column!r}" if pairs.cluster_column else "prompt",
        notes=tuple(pairs.notes),
    )
