"""The windows of a running job: which rows still want completions, and when a window is complete.

Reading, tokenizing and opening windows goes on in the engine's background thread; all else in the
thread that takes the completions.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from batchinfer.types import Completion, ErrorCode, Prompt, SamplingParams

if TYPE_CHECKING:
    import pyarrow as pa

    from batchinfer.dataset.windows import InputWindow
    from batchinfer.output.journal import Journal


@dataclass(slots=True)
class OpenWindow:
    """A window that is running or about to.

    Attributes:
        full: its input rows, all columns.
        digest: of what its completions depend on.
        num_samples: [num_rows] completions that each row gets in all.
        samples_left: [num_rows] of which are still to come.
        num_rows_left: rows with samples to come.
        pending: completions that are not in the journal yet.
    """

    index: int
    first_row: int
    full: Callable[[], Iterator[pa.Table]]
    digest: str
    num_samples: npt.NDArray[np.int32]
    samples_left: npt.NDArray[np.int32]
    num_rows_left: int
    pending: list[Completion] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.num_samples)

    def take(self, completion: Completion) -> bool:
        """Whether its row is complete now."""
        place = completion.row_index - self.first_row
        if is_refusal(completion):  # before it is pending: an interrupt may come in between
            self.num_samples[place] = self.samples_left[place] = 1
        self.pending.append(completion)
        self.samples_left[place] -= 1
        is_complete = not self.samples_left[place]
        self.num_rows_left -= is_complete
        return is_complete

    def pending_num_samples(self) -> list[int]:
        return [int(self.num_samples[completion.row_index - self.first_row]) for completion in self.pending]


class OpenWindows:
    """Opens windows as the engine asks for them.

    Args:
        source: a row to start at -> its window and the following ones, with their prompts.
        window_rows: of each window but the last.
        num_rows: of the input, where it is known.
        journals: of earlier runs, by window.
    """

    def __init__(
        self,
        source: Callable[[int], Iterator[tuple[InputWindow, list[Prompt]]]],
        window_rows: int,
        num_rows: int | None,
        journals: dict[int, Journal],
    ) -> None:
        self._source = source
        self._window_rows = window_rows
        self._num_rows = num_rows
        self._journals = journals
        self._open: dict[int, OpenWindow] = {}
        #: Windows of which nothing is left to run: an earlier run ended before it could commit them.
        self.complete: deque[OpenWindow] = deque()

    def prompts(self, done: Iterable[int]) -> Iterator[list[Prompt]]:
        """Those of each window that is not done. Rows of which nothing is left to run are among them, as the plan
        of a window is made of all its rows; see Prompt.done_samples."""
        for start, count in self._gaps(sorted(done)):
            # No name here holds a window that was handed out.
            yield from filter(None, map(self._begin, islice(self._source(start * self._window_rows), count)))

    def of(self, completion: Completion) -> OpenWindow:
        return self._open[completion.row_index // self._window_rows]

    def close(self, window: OpenWindow) -> None:
        self._open.pop(window.index, None)

    def __iter__(self) -> Iterator[OpenWindow]:
        return iter(list(self._open.values()))

    def _gaps(self, done: Sequence[int]) -> Iterator[tuple[int, int | None]]:
        """(first window, how many) of the runs of windows that are not done; the last may have no known end."""
        first = 0
        for window in done:
            if window > first:
                yield first, window - first
            first = window + 1
        if self._num_rows is None:
            yield first, None
        elif first * self._window_rows < self._num_rows:
            yield first, -(-self._num_rows // self._window_rows) - first

    def _begin(self, pair: tuple[InputWindow, list[Prompt]]) -> list[Prompt]:
        """Its prompts; empty if nothing is left to run."""
        window, prompts = pair
        num_samples = np.array([1 if p.error else p.params.n for p in prompts], dtype=np.int32)
        first = window.first_row_index
        opened = OpenWindow(
            first // self._window_rows,
            first,
            window.full,
            prompts_digest(prompts),
            num_samples,
            num_samples.copy(),
            len(prompts),
        )
        journal = self._journals.get(opened.index)
        if journal is not None:
            _take_journal(opened, journal, prompts)
        self._open[opened.index] = opened
        if opened.num_rows_left:
            return prompts
        self.complete.append(opened)
        return []


def _take_journal(window: OpenWindow, journal: Journal, prompts: list[Prompt]) -> None:
    """Count what an earlier run has done of the window. Raises DiffersError if it was of other rows."""
    from batchinfer.output.journaled import JournaledResults
    from batchinfer.output.store import DiffersError

    if journal.about["rows"] != window.digest:
        last = window.first_row + window.num_rows - 1
        raise DiffersError(
            f"rows {window.first_row} to {last} of the input are not those that this job began with: bring them back, "
            "or start anew with --overwrite"
        )
    results = JournaledResults(journal.batches)
    places = results.rows - window.first_row
    window.num_samples[places] = results.num_samples
    window.samples_left[:] = window.num_samples - np.bincount(places, minlength=window.num_rows)
    window.num_rows_left = int(np.count_nonzero(window.samples_left))
    done: dict[int, set[int]] = {}
    for place, sample in zip(places.tolist(), results.samples.tolist(), strict=True):
        done.setdefault(place, set()).add(sample)
    for place, samples in done.items():
        # A row that was refused has one completion, whatever its n.
        is_complete = not window.samples_left[place]
        prompts[place].done_samples = frozenset(range(prompts[place].params.n) if is_complete else samples)


def is_refusal(completion: Completion) -> bool:
    """Whether it is the only one of its row: the row did not run at all."""
    return completion.error is not None and completion.error.code is not ErrorCode.NON_FINITE_LOGITS


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """Of everything that their completions depend on beside the model."""
    digest = hashlib.blake2b(digest_size=16)
    params: dict[int, tuple[SamplingParams, bytes]] = {}
    for prompt in prompts:
        said = params.get(id(prompt.params))
        if said is None:
            said = params[id(prompt.params)] = (prompt.params, repr(prompt.params).encode("utf-8", "surrogatepass"))
        digest.update(prompt.key.to_bytes(8, "little"))
        digest.update(len(prompt.token_ids).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(prompt.token_ids, dtype="<i4").data)
        digest.update(said[1])
        digest.update(prompt.error.code.value.encode() if prompt.error else b"")
    return digest.hexdigest()
