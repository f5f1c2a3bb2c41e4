"""One job: source -> prompts -> engine -> journal -> parts -> output. It can be killed at any instant and goes on.

run_job decides what is to be done: begin, go on, or nothing because it is done; job_run.py does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from batchinfer.config import EngineConfig
from batchinfer.errors import InputError
from batchinfer.job_input import (
    InputRows,
    ModelResolver,
    check_is_no_input,
    open_input,
    resolve_job,
    unreadable_is_input_error,
)
from batchinfer.metadata import model_digests, output_metadata
from batchinfer.params import ResolvedParams, logprob_columns
from batchinfer.progress import ProgressReporter, QuietProgress
from batchinfer.settings import JobSettings
from batchinfer.summary import EngineCounts, JobSummary, RowCounts, Tally
from batchinfer.types import Completion, Prompt

if TYPE_CHECKING:
    import pyarrow as pa

    from batchinfer.job_run import JobRun
    from batchinfer.models.source import ModelSource
    from batchinfer.output.manifest import Manifest
    from batchinfer.output.place import JobPlace
    from batchinfer.output.store import JobStore, ToLines


class EngineLike(Protocol):
    """What a job needs of an engine; see Engine.run_windows for the contract."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def dtype(self) -> Any: ...  # a torch.dtype

    @property
    def kv_dtype(self) -> Any: ...

    @property
    def device(self) -> Any: ...  # a torch.device

    @property
    def kernels(self) -> str: ...

    @property
    def device_note(self) -> str | None: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def stats(self) -> EngineCounts: ...

    def run(self, prompts: Sequence[Prompt], on_step: Callable[[Any], None] | None = None) -> Iterator[Completion]: ...

    def run_windows(
        self, windows: Iterable[Sequence[Prompt]], on_step: Callable[[Any], None] | None = None
    ) -> Iterator[Completion]: ...


EngineFactory = Callable[["ModelSource", EngineConfig], EngineLike]


def run_job(
    settings: JobSettings,
    progress: ProgressReporter | None = None,
    *,
    engine_factory: EngineFactory | None = None,
    resolve: ModelResolver | None = None,
    check_interrupt: Callable[[], None] = lambda: None,
    window_rows: int | None = None,
) -> JobSummary:
    """Run the job, or what earlier runs of it have left, and write its output; returns what it did.

    Everything that can be checked without the model's weights is checked before they are read, cheapest
    first. `check_interrupt` is called after every step. Whatever ends the job early, what was done is kept,
    and a note on the error says so and how to go on.

    Args:
        window_rows: over settings.window; a job that goes on keeps the windows it began with.

    Raises:
        InputError: the settings, the input, the output's place or the model are not usable, or the output is
            of another job (DiffersError) or being written by another process.
        JobError: rows could not be read after the job had begun.
        RowErrorsError: more rows failed than settings.max_row_errors.
        OutputError: the disk refuses.
    """
    from batchinfer.output.place import JobPlace
    from batchinfer.output.schema import output_schema

    assert settings.output is not None, "a run has an output"
    place = JobPlace.of(settings.output)
    job = _Job(settings, place, progress or QuietProgress(), Tally(), check_interrupt)
    with unreadable_is_input_error(f"cannot write output {settings.output}"):
        place.check(settings.overwrite)
        check_is_no_input(settings)
    with job.tally.timed("read"):
        rows = open_input(settings)
    sampling = settings.sampling
    has = logprob_columns({**sampling.config, **sampling.flags}, rows.row_fields)  # the model sets none of these
    schema = output_schema(rows.schema, prefix=settings.output_prefix, **asdict(has))  # refuses a clash of names
    try:
        return job.run(rows, schema, engine_factory or _load_engine, resolve, window_rows)
    except BaseException as error:
        if not isinstance(error, InputError) and not place.manifest.exists() and not hasattr(error, "__notes__"):
            error.add_note(f"nothing was written to {settings.output}")
        raise


class _Job:
    """What is to be done for one output, and doing it."""

    def __init__(
        self,
        settings: JobSettings,
        place: JobPlace,
        progress: ProgressReporter,
        tally: Tally,
        check_interrupt: Callable[[], None],
    ) -> None:
        self.settings = settings
        self.place = place
        self.progress = progress
        self.tally = tally
        self.check_interrupt = check_interrupt
        self.running: JobRun | None = None

    def run(
        self,
        rows: InputRows,
        schema: pa.Schema,
        load_engine: EngineFactory,
        resolve: ModelResolver | None,
        window_rows: int | None,
    ) -> JobSummary:
        from batchinfer.output.store import JobStore, remove_leftover

        settings, tally = self.settings, self.tally
        with tally.timed("load"):
            model, params = resolve_job(settings, rows, resolve)
            with unreadable_is_input_error(f"cannot read model {settings.model}"):
                digests = model_digests(model)
            wanted = self._manifest(rows, model, params, digests, window_rows)
        with tally.timed("read"):
            finished = self._finished_file(wanted, rows, schema)
        if finished is not None:
            remove_leftover(self.place)
            return self._is_done(finished, params)
        with JobStore(
            self.place, wanted, schema, len(rows.schema), overwrite=settings.overwrite, say=self.progress.stage
        ) as store:
            try:
                return self._continue(store, wanted, rows, schema, model, params, digests, load_engine)
            except BaseException as error:
                self._leave(store, rows, error)
                raise

    def _continue(
        self,
        store: JobStore,
        wanted: Manifest,
        rows: InputRows,
        schema: pa.Schema,
        model: ModelSource,
        params: ResolvedParams,
        digests: dict[str, str | None],
        load_engine: EngineFactory,
    ) -> JobSummary:
        from batchinfer.job_run import JobRun, earlier_counts

        settings, tally, manifest = self.settings, self.tally, store.manifest
        if not store.is_new:
            with tally.timed("read"):
                self._check_input(store, wanted, rows, schema)
            if manifest.finished:
                return self._is_done(manifest.counts(), params)
            tally.earlier = earlier_counts(store)
            self._say_where(store, rows)

        def describe(counted: RowCounts) -> dict[str, str]:
            """What the output says of the run."""
            job = {"job": manifest.job, "identity": manifest.identity, "input_stamp": manifest.input_stamp}
            return output_metadata(
                settings, rows, model, digests, params, manifest.engine_settings, counted, manifest.engine, job
            )

        run = self.running = JobRun(settings, rows, store, tally, self.progress, self.check_interrupt, describe)
        run.check_row_errors()
        if not run.is_all_written:
            with tally.timed("load"):
                self.progress.stage(f"loading {settings.model}")
                engine = load_engine(model, settings.engine)
                if engine.device_note:
                    self.progress.stage(engine.device_note)
                manifest.engine_settings = engine_settings(engine)
            self.progress.stage(f"running {settings.prompts}")
            run.run(engine, model, params)
        with tally.timed("write"):
            to_lines = _openai_lines(rows, model, manifest) if self.place.is_lines else None
            store.finish(describe(manifest.counts()), to_lines)
        return tally.summary(self.place.output, params.to_dict(), manifest.counts())

    def _manifest(
        self,
        rows: InputRows,
        model: ModelSource,
        params: ResolvedParams,
        digests: dict[str, str | None],
        window_rows: int | None,
    ) -> Manifest:
        """Of the job as it would begin now."""
        from batchinfer.dataset.source import WINDOW_ROWS
        from batchinfer.identity import input_stamp, run_identity
        from batchinfer.output.store import new_manifest

        settings = self.settings
        return new_manifest(
            prompts=settings.prompts,
            model=settings.model,
            identity=run_identity(settings, rows, model, params, digests),
            input_stamp=input_stamp(settings.prompts),
            num_rows=rows.source.num_rows,
            window_rows=window_rows or settings.window or WINDOW_ROWS,
            replaces=settings.overwrite,
        )

    def _finished_file(self, wanted: Manifest, rows: InputRows, schema: pa.Schema) -> RowCounts | None:
        """What is in the output if it is there and of this very job. Raises DiffersError if it is of another."""
        from batchinfer.identity import differences
        from batchinfer.output.place import counts_of, finished_run
        from batchinfer.output.same_rows import hold_rows
        from batchinfer.output.store import DiffersError

        place = self.place
        if self.settings.overwrite or place.kind == "folder" or place.manifest.exists():
            return None
        said = finished_run(place.target)
        if said is None:
            return None
        found = differences(said["identity"], wanted.identity)
        is_same = not found and wanted.input_stamp is not None and said.get("input_stamp") == wanted.input_stamp
        if not found and not is_same:
            tables = rows.source.read_rows(0)
            if not hold_rows([place.target], schema, len(rows.schema), tables):
                found = ["the input's rows are not those it was made of"]
        if found:
            raise DiffersError(
                f"output {place.output} exists and differs from what this run would write: {'; '.join(found)}. Choose "
                "another name, or replace it with --overwrite"
            )
        return counts_of(said)

    def _check_input(self, store: JobStore, wanted: Manifest, rows: InputRows, schema: pa.Schema) -> None:
        """Raises DiffersError if rows whose part is written are others now. Files nobody touched are not read."""
        from batchinfer.output.same_rows import hold_rows
        from batchinfer.output.store import DiffersError

        manifest = store.manifest
        if wanted.input_stamp is not None and wanted.input_stamp == manifest.input_stamp:
            return
        if manifest.finished and self.place.is_lines:  # its parts are gone
            raise DiffersError(
                f"output {self.place.output} is there, and it cannot be told whether the input is still what it was "
                "made of: choose another name, or replace it with --overwrite"
            )
        if manifest.parts:
            self.progress.stage("comparing the input with the rows that are written: its files changed")
        for window, part in sorted(manifest.parts.items()):
            first = manifest.first_row(window)
            path = self.place.parts / part.file
            if not hold_rows([path], schema, len(rows.schema), rows.source.read_rows(first, part.num_rows)):
                last = first + part.num_rows - 1
                raise DiffersError(
                    f"output {self.place.output}: rows {first} to {last} of the input are not those that this job "
                    "began with: bring them back, or start anew with --overwrite"
                )
        manifest.input_stamp = wanted.input_stamp

    def _is_done(self, counted: RowCounts, params: ResolvedParams) -> JobSummary:
        self.tally.earlier = counted
        self.progress.stage(f"{self.place.output} is done: nothing is left to run")
        return self.tally.summary(self.place.output, params.to_dict(), counted)

    def _say_where(self, store: JobStore, rows: InputRows) -> None:
        manifest, total = store.manifest, rows.source.num_rows
        of_all = "" if total is None else f" of {total:,}"
        text = f"continuing {self.place.output}: {self.tally.earlier.num_rows:,}{of_all} rows are done"
        if self.settings.window not in (None, manifest.window_rows):
            text += f"; windows stay {manifest.window_rows:,} rows long, as the job began"
        self.progress.stage(text)

    def _leave(self, store: JobStore, rows: InputRows, error: BaseException) -> None:
        """Keep what there is and say how to go on; if there is nothing, leave no trace."""
        from batchinfer.job_run import RowErrorsError
        from batchinfer.output.store import DiffersError

        if isinstance(error, DiffersError):  # whose message says what to do
            return
        kept = self.tally.earlier.num_rows if self.running is None else self.running.num_rows_kept
        if store.is_new and not kept and not store.manifest.parts:
            with suppress(OSError):
                store.abandon()
            return
        total = rows.source.num_rows
        of_all = "" if total is None else f" of {total:,}"
        again = "run the same command again" + (" without --overwrite" if self.settings.overwrite else "")
        if isinstance(error, RowErrorsError):  # which the same number would raise at once
            again += f"{' and' if self.settings.overwrite else ''} with a higher --max-row-errors"
        error.add_note(f"{kept:,}{of_all} rows are kept in {self.place.shown_state}: to continue, {again}")


def _openai_lines(rows: InputRows, model: ModelSource, manifest: Manifest) -> ToLines:
    """What the job's tables become: the same bytes however often the job was stopped."""
    from batchinfer.output.openai import openai_lines

    created = int(datetime.fromisoformat(manifest.created).timestamp())
    return partial(openai_lines, columns=rows.columns, tokenizer=model.tokenizer, model=manifest.model, created=created)


def engine_settings(engine: EngineLike) -> dict[str, Any]:
    """What the engine runs with: its configuration, "auto" and "as the model says" replaced by what they came to."""
    return {
        **asdict(engine.config),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "kv_dtype": str(engine.kv_dtype).removeprefix("torch."),
        "device": str(engine.device),
        "kernels": engine.kernels,
        "max_model_len": engine.max_model_len,
    }


def _load_engine(model: ModelSource, config: EngineConfig) -> EngineLike:
    from batchinfer.engine.engine import Engine

    return Engine(model, config)
