"""What a job has on the disk: its lock, its manifest, a journal for each open window, its parts.

A window is committed in this order: the part under a temporary name, synced, renamed, its folder
synced; then the manifest that names it; then the journal goes. So at any instant each row is in a part
that the manifest names, or in a journal, or still to be run.
"""

from __future__ import annotations

import filecmp
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from batchinfer.errors import InputError
from batchinfer.identity import differences
from batchinfer.output.durable import TEMPORARY, durable_step, output_errors, rename, sync_folder, write_synced
from batchinfer.output.journal import Journal, JournalWriter, journal_schema, read_journal
from batchinfer.output.journaled import JournaledResults
from batchinfer.output.lock import JobLock
from batchinfer.output.manifest import Manifest, Part, load_manifest
from batchinfer.output.part import join_parts, read_parts, write_part
from batchinfer.output.place import JobPlace, finished_run, part_name, part_width
from batchinfer.output.reconcile import TORN, Say, reconcile
from batchinfer.summary import RowCounts

ToLines = Callable[[Iterable[pa.Table]], Iterable[bytes]]


class DiffersError(InputError):
    """The output holds a job, or the result of one, of another identity."""


class JobStore:
    """The job's state, locked for this process from its making on.

    Attributes:
        manifest: what is done; of a finished job `finished` is set.
        journals: what earlier runs journaled of windows that have no part yet.
        is_new: no earlier run left anything.

    Args:
        schema: of the output, from output_schema().
        num_input_columns: the first columns of `schema`.
        say: told what was set aside.
    Raises:
        InputError: another process works on the output.
        DiffersError: what is there is of another job.
        OutputError: the disk refuses.
    """

    def __init__(
        self,
        place: JobPlace,
        wanted: Manifest,
        schema: pa.Schema,
        num_input_columns: int,
        *,
        overwrite: bool = False,
        say: Say = lambda text: None,
    ) -> None:
        self.place = place
        self._schema = schema
        self._result_fields = list(schema)[num_input_columns:]
        self._made_folders = [path for path in (place.target, place.state) if not path.exists()]
        self._writers: dict[int, JournalWriter] = {}
        self.journals: dict[int, Journal] = {}
        with output_errors(place.output):
            place.state.mkdir(parents=True, exist_ok=True)
            durable_step("folder made")
            self._lock = JobLock(place.lock, place.output)
        try:
            if not self._lock.is_supported:
                say(f"the file system of {place.output} has no locks: see to it that no other process writes there")
            self.is_new = self._open(wanted, overwrite, say)
        except BaseException:
            self.close()
            raise

    def _open(self, wanted: Manifest, overwrite: bool, say: Say) -> bool:
        """Whether the job is new. Sets `manifest`."""
        found = None if overwrite else load_manifest(self.place.manifest)
        if found is not None and found.finished and self.place.kind == "file":
            found = self._of_finished_file(found)
        if found is None:
            self._begin(wanted, say)
            return True
        found_differences = differences(found.identity, wanted.identity)
        if found_differences:
            what = "the output of another job" if found.finished else "another job, which is not finished"
            raise DiffersError(
                f"output {self.place.output} holds {what}: {'; '.join(found_differences)}. Run it as it was, choose "
                "another name, or start anew with --overwrite, which removes it"
            )
        self.manifest = found
        if found.finished and self.place.kind == "file":
            with output_errors(self.place.output):
                self._remove_all()
        else:
            self.journals = reconcile(self.place, found, self._schema_of, say)
        return False

    def _of_finished_file(self, found: Manifest) -> Manifest | None:
        """`found` if the file that it speaks of is there, None if no file is."""
        target, output = self.place.target, self.place.output
        if not target.exists():
            return None
        if target.stat().st_size != found.size_bytes:
            raise InputError(
                f"output {output} exists and is not what a job wrote there: choose another name or give --overwrite"
            )
        return found

    def _begin(self, wanted: Manifest, say: Say) -> None:
        """Durably a job with nothing done."""
        self.manifest = wanted
        with output_errors(self.place.output):
            if self.place.manifest.exists():
                self.place.manifest.unlink()
                sync_folder(self.place.state)
                durable_step("old manifest removed")
            self._remove_all()
        wanted.save(self.place.manifest)
        sync_folder(self.place.parts.parent)
        durable_step("job begun")

    def _remove_all(self) -> None:
        """All but the lock: of a job that nobody wants, or that was never begun."""
        for pattern in ("journal-*.bin", f"*{TEMPORARY}", f"*{TORN}"):
            for path in self.place.state.glob(pattern):
                path.unlink()
        for path in self.place.parts.glob("part-*.parquet"):
            path.unlink()

    # windows

    def _schema_of(self, window: int, **more: str) -> pa.Schema:
        about = {"job": self.manifest.job, "window": window, "first_row": self.manifest.first_row(window)}
        return journal_schema(self._result_fields, {**about, **more})

    def journal(self, window: int, rows_digest: str) -> JournalWriter:
        """The open window's journal, behind what it holds already. `rows_digest` tells whether a later run has the
        same rows."""
        writer = self._writers.get(window)
        if writer is None:
            earlier = self.journals.get(window)
            num_bytes = 0 if earlier is None else earlier.num_bytes
            writer = JournalWriter(self.place.journal(window), self._schema_of(window, rows=rows_digest), num_bytes)
            self._writers[window] = writer
        return writer

    def commit(
        self,
        window: int,
        tables: Iterable[pa.Table],
        num_rows: int,
        metadata: Callable[[RowCounts], Mapping[str, str]],
        engine: Mapping[str, int],
    ) -> None:
        """Write the part of a window all of whose completions are journaled.

        Args:
            tables: its input rows, all columns.
            metadata: of the part, told what is in it.
            engine: counts over all runs of the job so far.
        Raises:
            OutputError: the disk refuses; the journal is left.
        """
        results = JournaledResults(read_journal(self.place.journal(window)).batches)
        counts = results.counts()
        assert counts.num_rows == num_rows, f"window {window} has {num_rows} rows, {counts.num_rows} of them are done"
        width = part_width(self.manifest.num_rows, self.manifest.window_rows)
        path = self.place.parts / part_name(window, width)
        temporary = self.place.state / (path.name + TEMPORARY)
        first_row = self.manifest.first_row(window)
        num_output_rows = write_part(path, temporary, self._schema, tables, first_row, results, metadata(counts))
        self.manifest.parts[window] = Part(path.name, num_rows, num_output_rows, path.stat().st_size, counts)
        self.manifest.engine = dict(engine)
        self.manifest.save(self.place.manifest)
        writer = self._writers.pop(window, None)
        if writer is not None:
            writer.close()
        self.journals.pop(window, None)
        with output_errors(self.place.output):
            self.place.journal(window).unlink()
        durable_step("journal removed")

    def note(self, engine: Mapping[str, int]) -> None:
        """Counts of the engine, when a run ends before the job does."""
        self.manifest.engine = dict(engine)
        self.manifest.save(self.place.manifest)

    # the end

    def part_paths(self) -> list[Path]:
        """Of all parts, in the order of the rows."""
        return [self.place.parts / part.file for _, part in sorted(self.manifest.parts.items())]

    def finish(self, metadata: Mapping[str, str], to_lines: ToLines | None = None) -> None:
        """All windows are committed: make the output whole.

        Args:
            metadata: of an output that is one Parquet file.
            to_lines: makes the bytes of a file of another format of the tables of the parts. Such a file does not say
                which job wrote it, so the manifest stays.
        Raises:
            InputError: a file appeared at the output's name that the job may not replace; the work is kept.
            OutputError: the disk refuses; the job can be continued.
        """
        place, manifest = self.place, self.manifest
        if place.kind == "folder":
            manifest.finished = _now()
            manifest.save(place.manifest)
            with output_errors(place.output):
                self._remove_leftovers()
            return
        if to_lines is not None:
            self._finish_lines(to_lines(read_parts(self.part_paths())))
            return
        if place.target.exists() and not manifest.replaces and not self.is_output_there():
            raise self._appeared()
        if not self.is_output_there():
            temporary = place.state / (place.target.name + TEMPORARY)
            join_parts(self.part_paths(), place.target, temporary, self._schema, metadata)
        durable_step("output finished")
        with output_errors(place.output):
            self.remove()

    def _finish_lines(self, lines: Iterable[bytes]) -> None:
        place, manifest = self.place, self.manifest
        temporary = place.state / (place.target.name + TEMPORARY)
        write_synced(lines, temporary, place.output, "output")
        # A crash may have come between the file's name and the manifest: then the file is this one.
        is_there = place.target.exists() and filecmp.cmp(temporary, place.target, shallow=False)
        if place.target.exists() and not is_there and not manifest.replaces:
            temporary.unlink()
            raise self._appeared()
        manifest.size_bytes = temporary.stat().st_size
        with output_errors(place.output):
            rename(temporary, place.target, "output")
        manifest.finished = _now()
        manifest.save(place.manifest)
        durable_step("output finished")
        with output_errors(place.output):
            self._remove_all()

    def _appeared(self) -> InputError:
        place = self.place
        return InputError(
            f"output {place.output} appeared meanwhile and is left alone: move it away and run the same command "
            f"again; this run's rows are in {place.shown_state}"
        )

    def is_output_there(self) -> bool:
        """Whether this job's output has its name already, so that only its working folder is left to remove."""
        said = finished_run(self.place.target)
        return said is not None and said.get("job") == self.manifest.job

    def remove(self) -> None:
        """Remove the state of a job that is one file, and of one that never began."""
        if self.place.manifest.exists():
            self.place.manifest.unlink()
            durable_step("manifest removed")
        self._remove_all()
        if self.place.kind == "file":
            shutil.rmtree(self.place.state)
            sync_folder(self.place.state.parent)
            durable_step("working folder removed")

    def _remove_leftovers(self) -> None:
        for pattern in ("journal-*.bin", f"*{TORN}"):
            for path in self.place.state.glob(pattern):
                path.unlink()

    def abandon(self) -> None:
        """Nothing was done: leave no trace of a job that began with this run."""
        self.place.manifest.unlink(missing_ok=True)
        self._remove_all()
        self.place.lock.unlink(missing_ok=True)
        for folder in reversed(self._made_folders):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def close(self) -> None:
        """Give the lock back."""
        for writer in self._writers.values():
            writer.close()
        self._lock.release()

    def __enter__(self) -> JobStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def remove_leftover(place: JobPlace) -> None:
    """Of a job whose file is finished: a kill came before its folder was gone. Raises InputError while it is going."""
    if place.state.exists():
        with output_errors(place.output), JobLock(place.lock, place.output):
            shutil.rmtree(place.state)


def new_manifest(
    *,
    prompts: str,
    model: str,
    identity: dict[str, Any],
    input_stamp: str | None,
    num_rows: int | None,
    window_rows: int,
    replaces: bool,
) -> Manifest:
    return Manifest(
        job=secrets.token_hex(8),
        created=_now(),
        prompts=prompts,
        model=model,
        identity=identity,
        input_stamp=input_stamp,
        num_rows=num_rows,
        window_rows=window_rows,
        replaces=replaces,
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
