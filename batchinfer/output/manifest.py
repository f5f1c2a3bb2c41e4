"""The manifest of a job: which job it is, and which of its windows are written. It alone says what is done."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from batchinfer.errors import InputError
from batchinfer.output.durable import write_whole
from batchinfer.summary import RowCounts

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Part:
    """The written rows of one window."""

    file: str
    num_rows: int  # of the input
    num_output_rows: int  # one for each sample
    size_bytes: int
    counts: RowCounts


@dataclass(slots=True)
class Manifest:
    """Attributes:
    job: a random name, which the finished output carries too.
    created: when the job began, ISO 8601.
    identity: everything that its results depend on but the input's rows; see identity.py.
    input_stamp: of the files of the input as they were; None where it has none.
    num_rows: of the input; None where that is not known before its end.
    window_rows: rows of each window but the last.
    replaces: an output that was there may be replaced.
    engine: counts of the engine over all runs of the job, as far as they were noted.
    engine_settings: what the engine of the last run ran with.
    parts: by window.
    finished: when all rows were written, ISO 8601.
    size_bytes: of the finished output, where it is a file that does not say itself which job wrote it.
    """

    job: str
    created: str
    prompts: str
    model: str
    identity: dict[str, Any]
    input_stamp: str | None
    num_rows: int | None
    window_rows: int
    replaces: bool = False
    engine: dict[str, int] = field(default_factory=dict)
    engine_settings: dict[str, Any] = field(default_factory=dict)
    parts: dict[int, Part] = field(default_factory=dict)
    finished: str | None = None
    size_bytes: int | None = None

    def first_row(self, window: int) -> int:
        return window * self.window_rows

    def counts(self) -> RowCounts:
        """Of all parts."""
        return sum((part.counts for part in self.parts.values()), RowCounts())

    def save(self, path: Path) -> None:
        """Durably: after a crash the file is the old one or this. Raises OutputError."""
        values = {"format": _FORMAT, **asdict(self)}
        values["parts"] = {str(window): asdict(part) for window, part in sorted(self.parts.items())}
        values["crc32"] = _check_sum(values)
        write_whole(path, json.dumps(values, allow_nan=False, indent=1).encode(), "manifest")


def load_manifest(path: Path) -> Manifest | None:
    """None where there is none. Raises InputError for one that cannot be understood."""
    try:
        values = json.loads(path.read_bytes())
        if values["format"] != _FORMAT:
            raise InputError(f"{path} was written by another version of batchinfer: continue the job with that one")
        if values.pop("crc32") != _check_sum(values):  # a digit that changed is JSON still, and would cost rows
            raise ValueError("its check sum differs")
        parts = {
            int(window): Part(**{**part, "counts": RowCounts(**part["counts"])})
            for window, part in values.pop("parts").items()
        }
        del values["format"]
        return Manifest(**values, parts=parts)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged ({error}): start the job anew with --overwrite") from error


def _check_sum(values: dict[str, Any]) -> int:
    """CRC-32 of the values as JSON, which keeps their order."""
    return zlib.crc32(json.dumps(values, allow_nan=False).encode())
