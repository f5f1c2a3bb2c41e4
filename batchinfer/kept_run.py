"""Runs that are kept in a folder, and used again when nothing that they depend on has changed.

A run's file is named after its identity: model, tokenizer and template by digest, every sampling
parameter, the input's columns, the engine's dtype, device and kernels, the package's version.
Whether the input rows are the same is seen by comparing them with those that the file kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.errors import InputError
from batchinfer.job import EngineFactory, run_job
from batchinfer.job_input import InputRows, JobError, ModelResolver, open_input, resolve_job, unreadable_is_input_error
from batchinfer.metadata import METADATA_KEY, model_digests
from batchinfer.progress import ProgressReporter, QuietProgress
from batchinfer.settings import JobSettings
from batchinfer.summary import JobSummary
from batchinfer.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa

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
    progress = progress or QuietProgress()
    progress.stage(f"{role}: reading {run.settings.model} to see whether it has run already")
    with unreadable_is_input_error(f"cannot read model {run.settings.model}"):
        identity = run_identity(run)
    path = folder / f"{role}-{_digest(identity)[:12]}.parquet"
    if _holds(path, identity, run):
        progress.stage(f"{role}: using {path} again")
        return KeptRun(path, None)
    settings = replace(run.settings, output=path, overwrite=True, output_prefix="")
    progress.stage(f"{role}: running {run.settings.model}")
    summary = run_job(
        settings, progress, engine_factory=engine_factory, resolve=resolve, check_interrupt=check_interrupt
    )
    if summary.num_rows_ok == 0:
        raise JobError(f"no row succeeded with {run.settings.model}: see the column error in {path}")
    return KeptRun(path, summary)


def run_identity(run: CheckedRun) -> dict[str, Any]:
    """Everything that tokens and logprobs depend on but the input rows, as JSON values. Reads every weight file."""
    from batchinfer.engine.machine import choose_device, choose_dtype
    from batchinfer.kernels.choice import choose_kernels
    from batchinfer.models.spec import choose_max_model_len

    settings, spec = run.settings, run.model.spec
    device = choose_device(settings.engine.device)
    dtype = choose_dtype(settings.engine.dtype, spec.dtype, device)
    identity = {
        "version": __version__,
        "digests": model_digests(run.model),
        "params": run.params.to_dict(),
        "engine": {
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device),
            "kernels": choose_kernels(spec, dtype, device, deterministic=settings.engine.deterministic).name,
            "max_model_len": choose_max_model_len(settings.engine.max_model_len, spec, settings.model),
        },
        "input": {
            "columns": {name: column for name, column in asdict(run.rows.columns).items() if column is not None},
            "system": settings.system,
        },
    }
    return json.loads(json.dumps(identity))  # as it comes back from a file


def _digest(identity: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _holds(path: Path, identity: dict[str, Any], run: CheckedRun) -> bool:
    """Whether `path` is a whole file of this run over these input rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        return False
    try:
        said = json.loads((pq.read_schema(path).metadata or {})[METADATA_KEY.encode()])
        return _agrees(said, identity) and _has_rows(path, run)
    except (OSError, KeyError, ValueError, pa.ArrowException):
        return False  # damaged, or of something else: it is made anew


def _agrees(said: Any, identity: Any) -> bool:
    """Whether what is in `identity` is also said; the file says more."""
    if isinstance(identity, dict):
        return isinstance(said, dict) and all(_agrees(said.get(key), value) for key, value in identity.items())
    return bool(said == identity)


def _has_rows(path: Path, run: CheckedRun) -> bool:
    """Compares the input columns of each row's first sample with the input, a window at a time."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    names = run.rows.schema.names
    stored = pq.read_table(path, columns=[*names, "sample_index"])
    stored = stored.filter(pc.equal(stored.column("sample_index"), 0)).select(names)
    start = 0
    for window in open_input(run.settings).windows:
        part = stored.slice(start, window.num_rows)
        start += window.num_rows
        if not _are_equal(part, pa.Table.from_arrays(window.columns, names=window.column_names)):
            return False
    return start == int(stored.num_rows)


def _are_equal(stored: pa.Table, window: pa.Table) -> bool:
    from batchinfer.output.storage import storage_schema

    return bool(stored.cast(storage_schema(window.schema)).equals(window.cast(storage_schema(window.schema))))


def check_columns(run: CheckedRun, options: Sequence[tuple[str, str | None]]) -> None:
    """(option, column that it names, if any). Raises InputError for one that the input lacks."""
    for option, name in options:
        if name is not None and name not in run.rows.schema.names:
            columns = ", ".join(run.rows.schema.names)
            raise InputError(f"{option} {name}: {run.settings.prompts} has no such column. Columns: {columns}")
