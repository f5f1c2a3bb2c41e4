"""SIGINT and SIGTERM as an exception, so that every clean-up on the way out runs."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class Interrupted(BaseException):
    """A signal asked the process to stop. Not an Exception: no handler of errors takes it for one."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


class InterruptSignals:
    """Within the block the first SIGINT or SIGTERM raises `Interrupted`; a second one kills the process.

    Python drops an exception that a signal handler raises while a finalizer runs; `check()`, called
    now and then by the work itself, raises it again. Outside the main thread it does nothing.
    """

    def __init__(self) -> None:
        self._pending: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)  # type: ignore[arg-type]

    def check(self) -> None:
        if self._pending is not None:
            raise Interrupted(self._pending)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._pending = signum
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        raise Interrupted(signum)
