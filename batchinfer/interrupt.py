"""SIGINT and SIGTERM as an exception, so that every clean-up on the way out runs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal asked the process to stop. Not an Exception: no handler of errors takes it for one."""

    def __init__(self, signum: int) -> None:
        super().__init__(_name(signum))
        self.exit_code = 128 + signum


class InterruptSignals:
    """Within the block the first SIGINT or SIGTERM raises `Interrupted`; a second one ends the process at once.

    Python drops an exception that a signal handler raises while a finalizer runs; `check()`, called
    now and then by the work itself, raises it again. Outside the main thread it does nothing.

    Args:
        deadline_s: a handler cannot run while a kernel computes. If the block has not been left so long after
            the first signal, the process ends as it is. None: it takes as long as it takes. Only for work that a
            kill does not harm.
        last_words: said then, behind the signal's name.
    """

    def __init__(self, deadline_s: float | None = None, last_words: str = "") -> None:
        self._pending: int | None = None
        self._previous: dict[int, object] = {}
        self._watchdog = None if deadline_s is None else _Watchdog(deadline_s, last_words)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            if self._watchdog is not None:
                self._watchdog.start()
            for signum in _SIGNALS:
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)  # type: ignore[arg-type]
        if self._watchdog is not None and self._previous:
            self._watchdog.stop()

    def check(self) -> None:
        if self._pending is not None:
            raise Interrupted(self._pending)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._pending = signum
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        raise Interrupted(signum)


class _Watchdog:
    """Hears of signals at once, in a thread: the interpreter writes their numbers to a pipe."""

    def __init__(self, deadline_s: float, last_words: str) -> None:
        self._deadline_s = deadline_s
        self._last_words = last_words
        self._is_over = threading.Event()

    def start(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="batchinfer-signals", daemon=True).start()

    def stop(self) -> None:
        self._is_over.set()
        signal.set_wakeup_fd(self._previous)
        os.close(self._writer)  # ends the thread

    def _listen(self) -> None:
        num_heard = 0
        while numbers := os.read(self._reader, 64):
            for signum in numbers:
                if signum not in _SIGNALS:
                    continue
                num_heard += 1
                if num_heard == 1:
                    threading.Thread(target=self._wait, args=(signum,), daemon=True).start()
                elif not self._is_over.is_set():
                    os._exit(128 + signum)
        os.close(self._reader)

    def _wait(self, signum: int) -> None:
        if self._is_over.wait(self._deadline_s):
            return
        show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # which a progress bar hides
        os.write(2, f"{show_cursor}\nerror: {_name(signum)}; {self._last_words}\n".encode())
        os._exit(128 + signum)


def _name(signum: int) -> str:
    return f"interrupted by {signal.Signals(signum).name}"
