"""Runs that are kept in a folder, and used again when nothing that they depend on has changed.

A run's file is named after its identity (identity.py), which it also holds. Whether
the input rows are the same is seen by comparing them with those that the file kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.errors import InputError
from batchinfer.identity import digest_of, run_identity
from batchinfer.job import EngineFactory, run_job
from batchinfer.job_input import InputRows, JobError, ModelResolver, open_input, resolve_job, unreadable_is_input_error
from batchinfer.metadata import model_digests
from batchinfer.progress import ProgressReporter, QuietProgress
from batchinfer.settings import JobSettings
from batchinfer.summary import JobSummary

if TYPE_CHECKING:
    from batchinfer.models.source import ModelSource
    from batchinfer.params import ResolvedParams


@dataclass(frozen=True, slots=True)
class KeptRun:
    """Attributes:
    summary: of the run; None if an earlier one was used again.
    """

    path: Path
    summary: JobSummary | None

    @property
    def is_reused(self) -> bool:
        return self.summary is None


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A run of which all is known that can be known without weights."""

    settings: JobSettings
    rows: InputRows
    model: ModelSource
    params: ResolvedParams


def check_run(settings: JobSettings, resolve: ModelResolver | None = None) -> CheckedRun:
    """Open the input and understand the model. Raises InputError as run_job does before it loads weights."""
    rows = open_input(settings)
    model, params = resolve_job(settings, rows, resolve)
    return CheckedRun(settings, rows, model, params)


def run_or_reuse(
    run: CheckedRun,
    folder: Path,
    role: str,
    progress: ProgressReporter | None = None,
    *,
    engine_factory: EngineFactory | None = None,
    resolve: ModelResolver | None = None,
    check_interrupt: Callable[[], None] = lambda: None,
) -> KeptRun:
    """Run the job into `folder`/`role`-IDENTITY.parquet, unless that file is there and holds these rows.

    Raises what run_job raises, and JobError if no row succeeded.
    """
    from batchinfer.output.store import DiffersError

    progress = progress or QuietProgress()
    progress.stage(f"{role}: reading {run.settings.model} to see whether it has run already")
    with unreadable_is_input_error(f"cannot read model {run.settings.model}"):
        digests = model_digests(run.model)
    identity = run_identity(run.settings, run.rows, run.model, run.params, digests)
    path = folder / f"{role}-{digest_of(identity)[:12]}.parquet"
    if _holds(path, identity, run):
        progress.stage(f"{role}: using {path} again")
        return KeptRun(path, None)
    settings = replace(run.settings, output=path, overwrite=path.exists(), output_prefix="")
    progress.stage(f"{role}: running {run.settings.model}")
    job = partial(
        run_job,
        progress=progress,
        engine_factory=engine_factory,
        resolve=resolve,
        check_interrupt=check_interrupt,
    )
    try:
        summary = job(settings)  # goes on where an evaluation that was stopped left it
    except DiffersError:  # left over from other rows
        summary = job(replace(settings, overwrite=True))
    if summary.num_rows_ok == 0:
        raise JobError(f"no row succeeded with {run.settings.model}: see the column error in {path}")
    return KeptRun(path, summary)


def _holds(path: Path, identity: dict[str, Any], run: CheckedRun) -> bool:
    """Whether `path` is a whole file of this run over these input rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from batchinfer.output.place import finished_run
    from batchinfer.output.same_rows import hold_rows

    said = finished_run(path)
    if said is None or said["identity"] != identity:
        return False
    try:
        tables = run.rows.source.read_rows(0)
        return hold_rows([path], pq.read_schema(path), len(run.rows.schema), tables)
    except (OSError, pa.ArrowException):
        return False  # damaged: it is made anew


def check_columns(run: CheckedRun, options: Sequence[tuple[str, str | None]]) -> None:
    """(option, column that it names, if any). Raises InputError for one that the input lacks."""
    for option, name in options:
        if name is not None and name not in run.rows.schema.names:
            columns = ", ".join(run.rows.schema.names)
            raise InputError(f"{option} {name}: {run.settings.prompts} has no such column. Columns: {columns}")
