"""Windows that are read, tokenized and planned in the background while the one before them runs."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")

#: How much the background thread gives way to the threads of the kernels.
NICENESS = 10
#: The thread may be deep in a read that nothing interrupts; it ends by itself afterwards.
CLOSE_S = 1.0


class Feed(Generic[T, U]):
    """`prepare(item)` of each item, one item ahead of the taker, in a thread of its own.

    The thread begins at once and starts on the next item when the one before is taken: at most two are
    in memory besides those that the taker holds. What `items` or `prepare` raise is raised by `take`,
    in its turn. `items` is closed, if it can be, when the thread ends.

    Args:
        lower_priority: lower the thread's priority behind the first item, which everybody waits for.
    """

    def __init__(self, items: Iterable[T], prepare: Callable[[T], U], *, lower_priority: bool = True) -> None:
        self._items = items
        self._prepare = prepare
        self._lower_priority = lower_priority
        self._ready: queue.SimpleQueue[U | _End] = queue.SimpleQueue()
        self._wanted = threading.Semaphore(1)
        self._is_closed = False
        self._end: _End | None = None
        self._thread = threading.Thread(target=self._work, name="batchinfer-feed", daemon=True)
        self._thread.start()

    def take(self, *, wait: bool) -> U | None:
        """The next prepared item; None at the end, or with `wait` False if it is not ready yet."""
        if self._end is None:
            try:
                found = self._ready.get(block=wait)
            except queue.Empty:
                return None
            if not isinstance(found, _End):
                self._wanted.release()
                return found
            self._end = found
        if self._end.error is not None:
            error, self._end = self._end.error, _End(None)
            raise error
        return None

    @property
    def is_at_end(self) -> bool:
        """There is nothing more; known once `take` has met the end."""
        return self._end is not None

    def close(self) -> None:
        """Stop the thread, behind what it is doing."""
        self._is_closed = True
        self._wanted.release()
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        iterator = iter(self._items)
        try:
            self._fill(iterator)
            end = _End(None)
        except BaseException as error:  # the taker's thread decides what it means
            end = _End(error)
        finally:
            with suppress(Exception):
                getattr(iterator, "close", lambda: None)()
        self._ready.put(end)

    def _fill(self, iterator: Iterator[T]) -> None:
        is_first = True
        while True:
            self._wanted.acquire()
            if self._is_closed:
                return
            try:
                item = next(iterator)
            except StopIteration:
                return
            self._ready.put(self._prepare(item))
            del item
            if is_first and self._lower_priority:
                _give_way()
            is_first = False


class Prepared(Generic[T, U]):
    """A Feed without a thread: what little there is is prepared when it is taken."""

    def __init__(self, items: Iterable[T], prepare: Callable[[T], U]) -> None:
        self._items = iter(items)
        self._prepare = prepare
        self.is_at_end = False

    def take(self, *, wait: bool) -> U | None:
        for item in self._items:
            return self._prepare(item)
        self.is_at_end = True
        return None

    def close(self) -> None:
        self.is_at_end = True


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def _give_way() -> None:
    """On Linux a priority is a thread's own."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
