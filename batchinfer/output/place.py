"""Where a job keeps what it has, beside or inside its output."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from batchinfer.errors import InputError
from batchinfer.output.schema import METADATA_KEY
from batchinfer.output.writer import check_output
from batchinfer.summary import RowCounts

#: Readers of Parquet folders skip names that begin with "_" or ".".
STATE_FOLDER = "_batchinfer"
_FILE_ENDINGS = (".parquet", ".jsonl")

Kind = Literal["file", "folder"]


@dataclass(frozen=True, slots=True)
class JobPlace:
    """The paths of one job.

    A folder holds the parts, and the rest of the job's state in a folder below it. A file is put
    together from parts, which are kept with that state in a hidden folder beside it until then.

    Attributes:
        output: as the user named it.
        target: the same with links resolved: where the bytes go.
        parts: folder of the parts.
        state: folder of manifest, lock and journals.
    """

    output: Path
    kind: Kind
    target: Path
    parts: Path
    state: Path

    @classmethod
    def of(cls, output: Path) -> JobPlace:
        """A file if the name ends in .parquet or .jsonl, else a folder."""
        target = output.resolve()
        if output.suffix.lower() in _FILE_ENDINGS:
            working = target.parent / f".{target.name}.batchinfer"
            return cls(output, "file", target, working, working)
        return cls(output, "folder", target, target, target / STATE_FOLDER)

    @property
    def is_lines(self) -> bool:
        """Whether the output is a file of the OpenAI Batch format, which does not say which job wrote it."""
        return self.kind == "file" and self.output.suffix.lower() == ".jsonl"

    @property
    def manifest(self) -> Path:
        return self.state / "manifest.json"

    @property
    def lock(self) -> Path:
        return self.state / "lock"

    def journal(self, window: int) -> Path:
        return self.state / f"journal-{window:05d}.bin"

    @property
    def shown_state(self) -> Path:
        """Where what is kept lies, in words of the user's own path."""
        return self.output if self.kind == "folder" else self.output.parent / self.state.name

    def check(self, overwrite: bool) -> None:
        """Refuse a place that could not be written at the end, or that holds something else. Raises InputError."""
        if self.kind == "file":
            is_ours = self.manifest.exists() or finished_run(self.target) is not None
            check_output(self.output, overwrite or is_ours)
            return
        if self.target.exists() and not self.target.is_dir():
            raise InputError(f"output {self.output} is a file: end its name in .parquet, or name a folder")
        if not self.target.exists():
            _check_folder(self.target.parent, self.output)
            return
        _check_folder(self.target, self.output)
        if not self.state.exists():
            others = sorted(path.name for path in self.target.iterdir())
            if others:
                raise InputError(
                    f"output folder {self.output} holds {others[0]}, which no job wrote: "
                    "name a new folder, or a file that ends in .parquet"
                )


def finished_run(path: Path) -> dict[str, Any] | None:
    """What a finished file says of the job that made it; None if no job made it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        said = json.loads((pq.read_schema(path).metadata or {})[METADATA_KEY])
        return said if "identity" in said else None
    except (OSError, KeyError, ValueError, TypeError, pa.ArrowException):
        return None


def counts_of(said: dict[str, Any]) -> RowCounts:
    """The rows of a file, from what it says of its run."""
    counts = said["counts"]
    return RowCounts(
        num_rows=said["input"]["num_rows"],
        num_rows_truncated=counts["num_rows_truncated"],
        num_completions=counts["num_completions"],
        num_output_tokens=counts["num_output_tokens"],
        failed_by_code=said["failed_by_code"],
    )


def part_name(window: int, width: int) -> str:
    return f"part-{window:0{width}d}.parquet"


def part_width(num_rows: int | None, window_rows: int) -> int:
    """Digits, so that parts in the order of their names are in the order of their rows."""
    if num_rows is None:
        return 7
    return max(5, len(str((num_rows - 1) // window_rows)))


def _check_folder(folder: Path, output: Path) -> None:
    if not folder.exists():
        raise InputError(f"folder {folder} of output {output} does not exist: make it first")
    if not folder.is_dir():
        raise InputError(f"output {output}: {folder} is not a folder")
    probe = folder / f".batchinfer-{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        probe.unlink()
    except OSError as error:
        raise InputError(f"cannot write to folder {folder} of output {output}: {error.strerror}") from error
