"""What lies on the disk of a job, running, stopped or finished. Only looks; changes nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchinfer.errors import InputError
from batchinfer.summary import RowCounts

if TYPE_CHECKING:
    from batchinfer.output.lock import Holder
    from batchinfer.output.manifest import Manifest
    from batchinfer.output.place import JobPlace

State = Literal["running", "stopped", "finished"]


@dataclass(frozen=True, slots=True)
class WindowStatus:
    """A window that is written, or of which something is journaled."""

    window: int
    first_row: int
    num_rows: int | None  # None: not known until it is written
    num_rows_done: int
    num_completions: int  # of rows that are not done too
    is_written: bool


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Attributes:
    num_rows: of the input; None where that is not known.
    counts: of the rows that are done.
    holder: the process that is running it.
    created, finished: ISO 8601; `created` None where the finished file does not say.
    """

    output: str
    state: State
    prompts: str
    model: str
    num_rows: int | None
    counts: RowCounts
    identity: dict[str, Any]
    windows: list[WindowStatus]
    window_rows: int | None
    holder: Holder | None = None
    created: str | None = None
    finished: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON values."""
        return {
            "output": self.output,
            "state": self.state,
            "process": asdict(self.holder) if self.holder else None,
            "prompts": self.prompts,
            "model": self.model,
            "num_rows": self.num_rows,
            "num_rows_done": self.counts.num_rows,
            **self.counts.counts(),
            "failed_by_code": self.counts.failed_by_code,
            "window_rows": self.window_rows,
            "windows": [asdict(window) for window in self.windows],
            "created": self.created,
            "finished": self.finished,
            "identity": self.identity,
        }

    def to_text(self) -> str:
        """The same for people, one fact a line."""
        counts = self.counts
        failed = f"{counts.num_rows_failed:,}"
        if counts.failed_by_code:
            failed += " (" + ", ".join(f"{code}: {count:,}" for code, count in counts.failed_by_code.items()) + ")"
        state = f"running: {self.holder}" if self.holder else self.state
        if self.state == "stopped":
            state += ": the command that began it continues it"
        done = f"{counts.num_rows:,}" + (f" of {self.num_rows:,}" if self.num_rows is not None else "")
        if self.num_rows:
            done += f" ({100 * counts.num_rows / self.num_rows:.1f} %)"
        lines = [
            ("state", state),
            ("rows", f"{done} · truncated: {counts.num_rows_truncated:,} · failed: {failed}"),
            ("output tokens", f"{counts.num_output_tokens:,} in {counts.num_completions:,} completions"),
            ("windows", self._windows_text()),
            ("input", self.prompts),
            ("model", self.model),
            ("began", self.created or "unknown"),
            ("output", self.output),
        ]
        if self.finished:
            lines.insert(-1, ("finished", self.finished))
        lines += [("identity", f"{name}: {value}") for name, value in self._identity_items()]
        return "\n".join(f"{name:<14} {text}" for name, text in lines)

    def _windows_text(self) -> str:
        if self.window_rows is None:
            return "one file"
        num_written = sum(window.is_written for window in self.windows)
        total = "" if self.num_rows is None else f" of {-(-self.num_rows // self.window_rows):,}"
        parts = [f"{num_written:,}{total} written, of {self.window_rows:,} rows each"]
        parts += [
            f"window {window.window}: {window.num_rows_done:,} rows journaled"
            for window in self.windows
            if not window.is_written
        ]
        return " · ".join(parts)

    def _identity_items(self) -> list[tuple[str, Any]]:
        from batchinfer.identity import flat

        return [(name, value) for name, value in flat(self.identity) if value not in (None, [], "")]


def job_status(output: Path) -> JobStatus:
    """Raises InputError if there is no job, and none whose output it is."""
    from batchinfer.output.lock import holder_of
    from batchinfer.output.manifest import load_manifest
    from batchinfer.output.place import JobPlace, finished_run

    place = JobPlace.of(output)
    manifest = load_manifest(place.manifest)
    if manifest is None:
        said = finished_run(place.target) if place.kind == "file" and place.target.is_file() else None
        if said is None:
            raise InputError(f"{output}: there is no job with this output, nor a file that one wrote")
        return _of_file(output, said)
    holder = holder_of(place.lock)
    windows, counts = _windows(place, manifest)
    state: State = "running" if holder else "finished" if manifest.finished else "stopped"
    return JobStatus(
        output=str(output),
        state=state,
        prompts=manifest.prompts,
        model=manifest.model,
        num_rows=manifest.num_rows,
        counts=counts,
        identity=manifest.identity,
        windows=windows,
        window_rows=manifest.window_rows,
        holder=holder,
        created=manifest.created,
        finished=manifest.finished,
    )


def _of_file(output: Path, said: dict[str, Any]) -> JobStatus:
    from batchinfer.output.place import counts_of

    counts = counts_of(said)
    return JobStatus(
        output=str(output),
        state="finished",
        prompts=said["input"]["prompts"],
        model=said["model"]["name"],
        num_rows=counts.num_rows,
        counts=counts,
        identity=said["identity"],
        windows=[],
        window_rows=None,
        finished=said["created"],
    )


def _windows(place: JobPlace, manifest: Manifest) -> tuple[list[WindowStatus], RowCounts]:
    from batchinfer.output.durable import OutputError
    from batchinfer.output.journal import read_journal
    from batchinfer.output.journaled import JournaledResults

    counts = manifest.counts()
    windows = {
        window: WindowStatus(
            window, manifest.first_row(window), part.num_rows, part.num_rows, part.counts.num_completions, True
        )
        for window, part in manifest.parts.items()
    }
    for path in place.state.glob("journal-*.bin"):
        window = int(path.stem.removeprefix("journal-"))
        if window in windows:
            continue
        try:
            results = JournaledResults(read_journal(path).batches)
        except OutputError:  # the job has just written the part
            continue
        of_window = results.counts()
        counts += of_window
        windows[window] = WindowStatus(
            window, manifest.first_row(window), None, of_window.num_rows, len(results), False
        )
    return [windows[window] for window in sorted(windows)], counts
