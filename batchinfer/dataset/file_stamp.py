"""Whether a file is still the one that was opened: what is read twice must be the same both times."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchinfer.errors import InputError


@dataclass(frozen=True, slots=True)
class FileStamp:
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """Raises OSError."""
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns)

    def check(self, path: Path) -> None:
        """Raises InputError if `path` has changed since, or is gone."""
        try:
            now = FileStamp.of(path)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        if now != self:
            raise InputError(f"{path} changed since it was opened: start again when nothing writes to it")
