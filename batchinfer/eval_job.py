"""One evaluation: two files of outputs, or two models that are run first; then the comparison, and its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.errors import InputError
from batchinfer.progress import ProgressReporter, QuietProgress
from batchinfer.settings import JobSettings

if TYPE_CHECKING:
    from batchinfer.evals.protocol import EvalOptions, Evaluator
    from batchinfer.evals.result import ComparisonResult
    from batchinfer.job import EngineFactory
    from batchinfer.job_input import ModelResolver

#: Nothing could be compared; a gate failed. 0 to 3 and signals as for other commands.
EXIT_NO_PAIRS = 4
EXIT_GATE_FAILED = 5


@dataclass(frozen=True)
class EvalSettings:
    """What to compare and how; see evals.compare() for the fields it takes.

    Attributes:
        files: (before, after), files of outputs; None if models are run.
        before, after: jobs of the two models, without an output; for files the models that made them, of which
            only `model` and `engine` count, or None.
        noise_floor: run `before` again under another seed and batch order.
        noise_run: a file of such a run.
        output: folder of the report, and of the runs; None: nothing is written, only possible for files.
    """

    options: EvalOptions
    files: tuple[str, str] | None = None
    before: JobSettings | None = None
    after: JobSettings | None = None
    metrics: Sequence[str] | None = None
    reference_column: str | None = None
    cluster_column: str | None = None
    id_column: str | None = None
    output_column: str | None = None
    slice_by: Sequence[str] = ()
    gates: Sequence[str] = ()
    noise_floor: bool = False
    noise_run: str | None = None
    output: Path | None = None


@dataclass(frozen=True)
class EvalOutcome:
    result: ComparisonResult
    written: list[Path] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """4: no pairs; 5: a gate failed; else 0."""
        if not self.result.pairing.num_pairs:
            return EXIT_NO_PAIRS
        return 0 if all(gate.passed for gate in self.result.gates) else EXIT_GATE_FAILED


def run_eval(
    settings: EvalSettings,
    make_progress: Callable[[], ProgressReporter] = QuietProgress,
    *,
    engine_factory: EngineFactory | None = None,
    resolve: ModelResolver | None = None,
    check_interrupt: Callable[[], None] = lambda: None,
) -> EvalOutcome:
    """Run what is to be run, compare, write. Whatever can be checked before the runs is checked before them.

    Each run, and the comparison, has a progress reporter of its own.

    Raises:
        InputError: settings, files, columns, models or the output folder are not usable.
        JobError: a run failed after it had begun.
    """
    from batchinfer.evals.comparison import choose_evaluators
    from batchinfer.evals.gates import parse_gates
    from batchinfer.evals.output import check_folder, write_comparison

    evaluators = choose_evaluators(settings.metrics, settings.options)
    parse_gates(settings.gates, [name for one in evaluators for name in one.metric_names])
    if settings.output is not None:
        check_folder(settings.output)
    models: dict[str, Any] = {}
    noise_run = settings.noise_run
    if settings.files is not None:
        before, after = settings.files
        _check_models(settings, resolve)
    else:
        paths = _run_models(settings, evaluators, make_progress, engine_factory, resolve, check_interrupt)
        before, after, noise_run = str(paths[0]), str(paths[1]), str(paths[2]) if paths[2] else noise_run
    if settings.before is not None and settings.after is not None:
        models = {
            "before_model": settings.before.model,
            "after_model": settings.after.model,
            "engine": settings.before.engine,
        }
    with closing(make_progress()) as progress:
        result = compare_files(settings, before, after, noise_run, progress, check_interrupt, models)
    written = write_comparison(result, settings.output) if settings.output is not None else []
    return EvalOutcome(result, written)


def _check_models(settings: EvalSettings, resolve: ModelResolver | None) -> None:
    """Of files: a model that cannot be used is known before anything is measured. Raises InputError."""
    from batchinfer.job_input import find_model

    if settings.before is not None and settings.after is not None:
        for job in (settings.before, on_base(settings.after, settings.before.model)):
            find_model(job.model, job.adapter, resolve)


def compare_files(
    settings: EvalSettings,
    before: str,
    after: str,
    noise_run: str | None,
    progress: ProgressReporter,
    check_interrupt: Callable[[], None],
    models: dict[str, Any],
) -> ComparisonResult:
    from batchinfer.evals.comparison import compare

    return compare(
        before,
        after,
        metrics=settings.metrics,
        reference_column=settings.reference_column,
        cluster_column=settings.cluster_column,
        id_column=settings.id_column,
        output_column=settings.output_column,
        slice_by=settings.slice_by,
        noise_run=noise_run,
        gates=settings.gates,
        options=settings.options,
        progress=progress.stage,
        check_interrupt=check_interrupt,
        **models,
    )


def _run_models(
    settings: EvalSettings,
    evaluators: Sequence[Evaluator],
    make_progress: Callable[[], ProgressReporter],
    engine_factory: EngineFactory | None,
    resolve: ModelResolver | None,
    check_interrupt: Callable[[], None],
) -> tuple[Path, Path, Path | None]:
    """Files of before, after and the noise run. All are checked before the first one starts."""
    from batchinfer.kept_run import check_columns, check_run, run_or_reuse

    assert settings.before is not None
    assert settings.after is not None
    assert settings.output is not None, "the runs are kept in the output folder"
    jobs = {"before": settings.before, "after": on_base(settings.after, settings.before.model)}
    if settings.noise_floor:
        jobs["noise"] = noise_job(settings.before)
    runs = {role: check_run(job, resolve) for role, job in jobs.items()}
    check_columns(
        runs["before"],
        [
            ("--reference-column", settings.reference_column),
            ("--cluster-column", settings.cluster_column),
            *(("--slice-by", name) for name in settings.slice_by),
        ],
    )
    if settings.metrics is not None:
        _check_needs(settings, evaluators, runs["before"].rows.schema.names)
    folder = settings.output / "runs"
    folder.mkdir(exist_ok=True)
    paths = {}
    for role, run in runs.items():
        with closing(make_progress()) as progress:
            kept = run_or_reuse(
                run,
                folder,
                role,
                progress,
                engine_factory=engine_factory,
                resolve=resolve,
                check_interrupt=check_interrupt,
            )
        paths[role] = kept.path
    return paths["before"], paths["after"], paths.get("noise")


def _check_needs(settings: EvalSettings, evaluators: Sequence[Evaluator], columns: Sequence[str]) -> None:
    """Evaluators that were asked for and will find no reference: better known before the runs than after them."""
    from batchinfer.evals.pairing import REFERENCE_NAME

    if settings.reference_column is not None or REFERENCE_NAME in columns:
        return
    for one in evaluators:
        if one.needs.reference or (one.needs.texts_or_reference and settings.options.texts is None):
            raise InputError(f"--metrics {one.name}: it needs right answers: name their column with --reference-column")


def on_base(after: JobSettings, base: str) -> JobSettings:
    """`after`, or `base` with it merged in where it is an adapter that does not say what it belongs to."""
    from batchinfer.models.lora import is_adapter, read_adapter

    folder = Path(after.model).expanduser()
    if not is_adapter(folder) or (folder / "config.json").is_file() or read_adapter(folder).base is not None:
        return after
    return replace(after, model=base, adapter=after.model)


def noise_job(before: JobSettings) -> JobSettings:
    """The same model, another seed, and other batches: what differs then is not the model's doing."""
    layers = before.sampling
    seed = {**layers.config, **layers.flags}.get("seed", 0) + 1
    return replace(
        before,
        sampling=replace(layers, flags={**layers.flags, "seed": seed}),
        engine=replace(
            before.engine,
            policy="fcfs",
            max_num_seqs=before.engine.max_num_seqs // 2 + 1,
            max_batch_tokens=before.engine.max_batch_tokens // 2 + 1,
        ),
    )


def check_eval(settings: EvalSettings) -> None:
    """What contradicts itself whatever the files hold. Raises InputError."""
    if settings.files is None and settings.output is None:
        raise InputError("--output FOLDER is missing: the runs and the report are kept there")
    if settings.files is not None and settings.noise_floor:
        raise InputError(
            "--noise-floor runs the model of before again, which files are not: "
            "give a second run of it, under another seed, with --noise-run"
        )
