"""One process at a time works on an output.

The lock is flock's: the kernel drops it with the process that holds it, however that ends, so a dead
holder keeps nobody out. NFS turns it into a lock at the server (Linux, since 2.6.12), which the
server drops when it learns that the client is gone. A file system without locks is told about once.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from batchinfer.errors import InputError

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}
#: A look at the state of a job takes the lock for an instant.
_TRIES = 5
_WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that works on an output."""

    pid: int
    host: str
    since: str  # ISO 8601

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class JobLock:
    """Held from its making on.

    Raises InputError if another process holds it.
    """

    def __init__(self, path: Path, output: Path) -> None:
        self.is_supported = True
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(path, output)
            holder = Holder(os.getpid(), socket.gethostname(), datetime.now(UTC).isoformat(timespec="seconds"))
            os.ftruncate(self._file, 0)
            os.pwrite(
                self._file, json.dumps({"pid": holder.pid, "host": holder.host, "since": holder.since}).encode(), 0
            )
        except BaseException:
            self.release()
            raise

    def _take(self, path: Path, output: Path) -> None:
        assert self._file is not None
        for left in reversed(range(_TRIES)):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not left:
                    raise InputError(_refusal(path, output)) from None
                time.sleep(_WAIT_S)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                self.is_supported = False
                return
        if not path.exists() or not os.path.samestat(os.fstat(self._file), path.stat()):
            raise InputError(f"another process has just finished {output}: start again to see what it made")

    def release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __enter__(self) -> JobLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def holder_of(path: Path) -> Holder | None:
    """Who holds the lock now; None if nobody does."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _read_holder(path)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    finally:
        os.close(file)


def _read_holder(path: Path) -> Holder:
    try:
        return Holder(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return Holder(0, "an unknown host", "an unknown time")  # it is just being written


def _refusal(path: Path, output: Path) -> str:
    return (
        f"output {output} is being written by {_read_holder(path)}: wait for it, stop it, or choose another name. "
        f"`batchinfer status {output}` shows how far it is"
    )
