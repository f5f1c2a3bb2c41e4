"""Writes that outlive a crash, and the places where one may come."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: The end of names of files that are not whole yet.
TEMPORARY = ".tmp"

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class OutputError(OSError):
    """The output cannot be written: disk full, folder gone, ... The message names the path."""

    @property
    def is_no_room(self) -> bool:
        """The disk, a quota or a limit on the size of files stopped it."""
        return isinstance(self.__cause__, OSError) and self.__cause__.errno in _NO_ROOM


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """What the system refuses becomes an OutputError that names `path`."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def durable_step(name: str) -> None:
    """Does nothing. Called after each step that a crash can come behind; tests put a crash in its place."""


def sync(path: Path) -> None:
    """Of a file, its bytes; of a folder, its names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    with suppress(OSError):  # some file systems cannot; the files themselves are safe
        sync(folder)


def rename(temporary: Path, path: Path, what: str) -> None:
    """Give a synced file its name, durably."""
    os.replace(temporary, path)
    durable_step(f"{what} renamed")
    sync_folder(path.parent)
    durable_step(f"{what} in its folder")


def write_whole(path: Path, data: bytes, what: str) -> None:
    """Replace a small file: after a crash it holds the old bytes or the new ones. Raises OutputError."""
    temporary = path.with_name(path.name + TEMPORARY)
    write_synced([data], temporary, path, what)
    with output_errors(path):
        rename(temporary, path, what)


def write_synced(pieces: Iterable[bytes], temporary: Path, path: Path, what: str) -> None:
    """Write a file that is to become `path`. Raises OutputError, and what `pieces` raises; it is removed then."""
    try:
        with output_errors(path):
            file = temporary.open("wb")
        with file:
            for piece in pieces:
                with output_errors(path):
                    file.write(piece)
            with output_errors(path):
                file.flush()
                durable_step(f"{what} written")
                os.fsync(file.fileno())
        durable_step(f"{what} synced")
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
