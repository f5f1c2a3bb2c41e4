"""A file that is whole at its name or not there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from batchinfer.output.writer import OutputError, check_output


@contextmanager
def whole_file(path: Path, overwrite: bool = False) -> Iterator[Callable[[bytes], None]]:
    """Gives a function that appends to a temporary file beside `path`, which gets that name at the end, durably.

    Raises InputError as check_output, and OutputError where a write fails. After any error what was written is
    removed and `path` is as it was.
    """
    check_output(path, overwrite)
    target = path.resolve()  # of a link, so that the link stays
    temporary = target.parent / f".batchinfer-{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        with _output_errors(path):
            file = temporary.open("xb")
        with file:

            def append(data: bytes) -> None:
                with _output_errors(path):
                    file.write(data)

            yield append
            with _output_errors(path):
                file.flush()
                os.fsync(file.fileno())
        with _output_errors(path):
            os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # some file systems cannot sync a folder; the file itself is safe
        _sync(target.parent)


@contextmanager
def _output_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
