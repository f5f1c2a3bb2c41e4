"""The running part of a job: completions into journals, complete windows into parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from batchinfer.job_input import InputRows, JobError, prompt_windows
from batchinfer.job_windows import OpenWindow, OpenWindows
from batchinfer.params import ResolvedParams
from batchinfer.progress import ProgressReporter, Snapshot
from batchinfer.settings import JobSettings
from batchinfer.summary import EngineCounts, RowCounts, Tally
from batchinfer.types import Completion

if TYPE_CHECKING:
    from batchinfer.job import EngineLike
    from batchinfer.models.source import ModelSource
    from batchinfer.output.store import JobStore

T = TypeVar("T")


class RowErrorsError(JobError):
    """More rows failed than --max-row-errors allows."""


class JobRun:
    """Runs the windows that have no part yet, and commits each when its last row is complete.

    Several windows can be open at once. A completion is in memory until the next flush, and the prompts of a
    window until the engine has run them, so memory does not grow with the number of rows.

    Args:
        describe: metadata of a file that holds the rows counted.
        clock: seconds.
    """

    def __init__(
        self,
        settings: JobSettings,
        rows: InputRows,
        store: JobStore,
        tally: Tally,
        progress: ProgressReporter,
        check_interrupt: Callable[[], None],
        describe: Callable[[RowCounts], Mapping[str, str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._rows = rows
        self._store = store
        self._tally = tally
        self._progress = progress
        self._check_interrupt = check_interrupt
        self._describe = describe
        self._clock = clock
        self._num_pending = 0
        self._num_complete = 0  # rows, by this run
        self._num_safe = 0  # of which are durable
        self._flushed_s = clock()
        self._earlier_engine = dict(store.manifest.engine)
        self._engine: EngineLike | None = None
        self._waited_s: float | None = None  # for the first window

    @property
    def num_rows_kept(self) -> int:
        """Complete rows that a kill would not lose now."""
        return self._tally.earlier.num_rows + self._num_safe

    @property
    def is_all_written(self) -> bool:
        manifest = self._store.manifest
        return self._num_rows() == sum(part.num_rows for part in manifest.parts.values())

    def run(self, engine: EngineLike, model: ModelSource, params: ResolvedParams) -> None:
        """Raises what the engine, the input and the disk raise; what had come in is flushed before."""
        self._engine = engine
        manifest, tally = self._store.manifest, self._tally
        source = partial(
            prompt_windows,
            self._rows,
            model.tokenizer,
            params.params,
            self._settings.system,
            model.spec.vocab_size,
            window_rows=manifest.window_rows,
        )
        self._windows = OpenWindows(
            lambda start: source(start=start), manifest.window_rows, self._num_rows(), self._store.journals
        )
        began = time.perf_counter()
        others = {stage: tally.seconds[stage] for stage in ("journal", "write")}
        read_s = tally.seconds["read"]
        self._read_before_s = read_s
        prompts = _Timed(self._windows.prompts(list(manifest.parts)), tally)
        try:
            with closing(engine.run_windows(prompts, self._on_step)) as finished:  # type: ignore[type-var]
                for completion in finished:
                    self._take(completion)
            self._commit_complete()
            self._check_all_written()
        except BaseException as error:
            self._save(error)
            raise
        spent_s = sum(tally.seconds[stage] - before for stage, before in others.items())
        tally.seconds["run"] += max(0.0, time.perf_counter() - began - spent_s - (self._waited_s or 0.0))
        tally.add_engine(engine.stats)
        self._store.note(self._engine_counts())

    def _save(self, error: BaseException) -> None:
        """Flush before the run ends with `error`, which the disk's own troubles do not replace."""
        try:
            self._flush()
            self._store.note(self._engine_counts())
        except OSError as failed:
            if failed is not error and str(failed) != str(error):
                error.add_note(str(failed))

    def check_row_errors(self) -> None:
        """Raises RowErrorsError."""
        allowed = self._settings.max_row_errors
        counts = self._tally.earlier.failed_by_code | {}
        for code, count in self._tally.failed_by_code.items():
            counts[code] = counts.get(code, 0) + count
        num_failed = sum(counts.values())
        if allowed is not None and num_failed > allowed:
            codes = ", ".join(f"{code}: {count:,}" for code, count in sorted(counts.items()))
            raise RowErrorsError(f"{num_failed:,} rows failed ({codes}), --max-row-errors allows {allowed:,}")

    def _take(self, completion: Completion) -> None:
        window = self._windows.of(completion)
        self._tally.add_completion(completion)
        self._num_complete += window.take(completion)
        self._num_pending += 1
        if not window.num_rows_left:
            self._commit(window)
        elif self._num_pending >= self._settings.flush_rows:
            self._flush()
        if completion.error is not None:
            self.check_row_errors()

    def _on_step(self, stats: EngineCounts) -> None:
        if self._waited_s is None:
            self._waited_s = self._tally.seconds["read"] - self._read_before_s + stats.planning_s
        self._check_interrupt()
        if self._clock() - self._flushed_s >= self._settings.flush_seconds:
            self._flush()
        self._commit_complete()
        self._progress.update(Snapshot.take(self._tally, stats, self._rows.source.num_rows))

    def _flush(self) -> None:
        """Make what has come in durable."""
        from batchinfer.output.journal import to_batch

        with self._tally.timed("journal"):
            for window in self._windows:
                if window.pending:
                    journal = self._store.journal(window.index, window.digest)
                    journal.append(to_batch(window.pending, window.pending_num_samples(), journal.schema))
                    window.pending = []
        self._num_pending = 0
        self._num_safe = self._num_complete
        self._flushed_s = self._clock()

    def _commit_complete(self) -> None:
        """Windows that an earlier run completed."""
        while self._windows.complete:
            self._commit(self._windows.complete[0])
            self._windows.complete.popleft()

    def _commit(self, window: OpenWindow) -> None:
        self._flush()
        with self._tally.timed("write"):
            self._store.commit(
                window.index, window.full(), window.num_rows, self._metadata_of_part, self._engine_counts()
            )
        self._windows.close(window)
        self._tally.forget(window.first_row, window.num_rows)

    def _metadata_of_part(self, counted: RowCounts) -> Mapping[str, str]:
        return self._describe(counted) if self._store.place.kind == "folder" else {}

    def _engine_counts(self) -> dict[str, int]:
        """Over all runs of the job."""
        now = Tally()
        if self._engine is not None:
            now.add_engine(self._engine.stats)
        return {name: self._earlier_engine.get(name, 0) + count for name, count in now.engine_counts().items()}

    def _num_rows(self) -> int | None:
        """Of the input: a stream's are known when its last window, which is shorter, is written."""
        manifest = self._store.manifest
        if manifest.num_rows is None and manifest.parts:
            last, part = max(manifest.parts.items())
            if part.num_rows < manifest.window_rows:
                return manifest.first_row(last) + part.num_rows
        return manifest.num_rows

    def _check_all_written(self) -> None:
        for window in self._windows:
            places = [place for place in range(window.num_rows) if window.samples_left[place]]
            raise JobError(
                f"row {window.first_row + places[0]} and {len(places) - 1:,} more of its window were begun by an "
                "earlier run and are refused now: continue with the --kv-memory that the job began with"
            )


class _Timed(Generic[T]):
    """Counts the time that it takes to get each item as reading. Holds none of them."""

    def __init__(self, items: Iterator[T], tally: Tally) -> None:
        self._items = items
        self._tally = tally

    def __iter__(self) -> _Timed[T]:
        return self

    def __next__(self) -> T:
        with self._tally.timed("read"):
            return next(self._items)

    def close(self) -> None:
        close: Callable[[], Any] = getattr(self._items, "close", lambda: None)
        close()


def earlier_counts(store: JobStore) -> RowCounts:
    """What earlier runs have done, parts and journals."""
    from batchinfer.output.journaled import JournaledResults

    journaled = (JournaledResults(journal.batches).counts() for journal in store.journals.values())
    return sum(journaled, store.manifest.counts())
