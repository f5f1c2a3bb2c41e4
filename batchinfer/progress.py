"""How a running job shows itself on stderr: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from batchinfer.summary import EngineCounts, Tally

Clock = Callable[[], float]

_RATE_WINDOW_S = 30.0
_FIRST_LINE_S = 2.0
_LINE_INTERVAL_S = 10.0
_LATE_LINE_INTERVAL_S = 60.0  # once a job has run for ten minutes, so that long logs stay short
_LATE_S = 600.0
_BAR_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class TokensLeft:
    """Tokens still to compute."""

    prompt: float
    output: float
    is_full_length: bool = False  # no row has ended yet: every output is taken to be as long as it may be


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where a job stands. Token counts are of the whole job so far."""

    num_rows: int | None  # None: not known in advance
    num_rows_done: int  # with all their samples
    num_rows_failed: int
    num_seqs_running: int
    num_prompt_tokens_computed: int
    num_prompt_tokens_reused: int
    num_output_tokens: int  # those of unfinished samples too
    kv_use: float  # 0 to 1
    left: TokensLeft | None  # None: not known

    @classmethod
    def take(cls, tally: Tally, stats: EngineCounts, num_rows: int | None) -> Snapshot:
        """From the finished windows (`tally`, which also counts this window's completions) and this one (`stats`)."""
        num_output = stats.num_output_tokens + stats.num_output_tokens_unfinished
        return cls(
            num_rows=num_rows,
            num_rows_done=tally.earlier.num_rows + tally.engine["num_rows"] + stats.num_rows_done,
            num_rows_failed=tally.earlier.num_rows_failed + tally.num_rows_failed,
            num_seqs_running=stats.num_seqs_running,
            num_prompt_tokens_computed=tally.engine["num_prompt_tokens_computed"] + stats.num_prompt_tokens_computed,
            num_prompt_tokens_reused=tally.engine["num_prompt_tokens_reused"] + stats.num_prompt_tokens_reused,
            num_output_tokens=tally.engine["num_output_tokens"] + num_output,
            kv_use=stats.num_kv_blocks_used / stats.num_kv_blocks if stats.num_kv_blocks else 0.0,
            left=_tokens_left(tally, stats, num_rows),
        )


def _tokens_left(tally: Tally, stats: EngineCounts, num_rows: int | None) -> TokensLeft | None:
    """Prompt tokens still to compute and output tokens still to draw, at the mean of finished samples.

    Rows say little about time: a row may be two tokens or two thousand. Rows that were not read yet are
    taken to be like those of this window.
    """
    if num_rows is None or stats.num_rows == 0:
        return None
    num_ended = tally.num_completions - tally.num_rows_failed
    num_seqs = stats.num_seqs_running + stats.num_seqs_waiting
    output = float(stats.max_output_tokens_left)
    if num_ended:
        # Short samples end first, so early on the tokens of all started samples are the better mean.
        drawn = tally.num_output_tokens + stats.num_output_tokens_unfinished
        mean = max(tally.num_output_tokens / num_ended, drawn / (num_ended + stats.num_seqs_running))
        output = min(output, max(0.0, mean * num_seqs - stats.num_output_tokens_unfinished))
    to_compute = stats.num_prompt_tokens - stats.num_prompt_tokens_shareable
    prompt = max(0.0, to_compute + stats.num_prompt_tokens_recomputed - stats.num_prompt_tokens_computed)
    num_left = num_rows - tally.earlier.num_rows - tally.engine["num_rows"] - stats.num_rows
    unread = max(0, num_left) / stats.num_rows  # in windows like this one
    output_here = stats.num_output_tokens + stats.num_output_tokens_unfinished + output
    return TokensLeft(prompt + unread * to_compute, output + unread * output_here, is_full_length=not num_ended)


class ProgressReporter(Protocol):
    """`stage` says what begins; `update` may be called every step and limits its own rate; `close` ends it."""

    def stage(self, text: str) -> None: ...
    def update(self, snapshot: Snapshot) -> None: ...
    def close(self) -> None: ...


class QuietProgress:
    def stage(self, text: str) -> None:
        pass

    def update(self, snapshot: Snapshot) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second over the last half minute."""

    prompt_computed: float
    prompt_reused: float
    output: float


class RateMeter:
    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int, int, int]] = deque([(clock(), 0, 0, 0)])

    def rates(self, snapshot: Snapshot) -> Rates:
        now = (
            self._clock(),
            snapshot.num_prompt_tokens_computed,
            snapshot.num_prompt_tokens_reused,
            snapshot.num_output_tokens,
        )
        self._samples.append(now)
        while len(self._samples) > 2 and now[0] - self._samples[1][0] >= _RATE_WINDOW_S:
            self._samples.popleft()
        first = self._samples[0]
        elapsed_s = max(now[0] - first[0], 1e-9)
        return Rates(*((b - a) / elapsed_s for a, b in zip(first[1:], now[1:], strict=True)))

    def restart(self) -> None:
        """Measure from now on: what came before (loading, say) was no work on tokens."""
        _, computed, reused, output = self._samples[-1]
        self._samples = deque([(self._clock(), computed, reused, output)])


def describe(snapshot: Snapshot, rates: Rates) -> str:
    """All but rows and time, e.g. "prompt 812 tok/s computed, 9,400 reused · output 310 tok/s · ..."."""
    parts = [
        f"prompt {rates.prompt_computed:,.0f} tok/s computed, {rates.prompt_reused:,.0f} reused",
        f"output {rates.output:,.0f} tok/s",
        f"{snapshot.num_seqs_running:,} running",
        f"KV {100 * snapshot.kv_use:.0f} %",
    ]
    if snapshot.num_rows_failed:
        parts.insert(0, f"{snapshot.num_rows_failed:,} failed")
    return " · ".join(parts)


def time_left(left: TokensLeft | None, rates: Rates) -> str:
    """At the present speed. An output token takes longer than a prompt token: with no prompt left, its alone counts."""
    rate = rates.output if left and not left.prompt and rates.output else rates.prompt_computed + rates.output
    if left is None or rate <= 0:
        return "time left unknown"
    text = f"{_duration((left.prompt + left.output) / rate)} left"
    return f"{text} if no row ends early" if left.is_full_length else text


class LineProgress:
    """One short line after two seconds, then every ten, then every minute. Never a carriage return."""

    def __init__(self, stream: TextIO, clock: Clock = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._meter = RateMeter(clock)
        self._start_s = clock()
        self._next_s = self._start_s + _FIRST_LINE_S

    def stage(self, text: str) -> None:
        self._print(text)
        self._meter.restart()

    def update(self, snapshot: Snapshot) -> None:
        now_s = self._clock()
        if now_s < self._next_s:
            return
        is_late = now_s - self._start_s > _LATE_S
        self._next_s = now_s + (_LATE_LINE_INTERVAL_S if is_late else _LINE_INTERVAL_S)
        rates = self._meter.rates(snapshot)
        self._print(f"{_rows(snapshot)} rows · {describe(snapshot, rates)} · {time_left(snapshot.left, rates)}")

    def close(self) -> None:
        pass

    def _print(self, text: str) -> None:
        print(f"batchinfer: {text}", file=self._stream, flush=True)


class BarProgress:
    """A bar with a line of figures under it. Colours follow NO_COLOR (rich)."""

    def __init__(self, stream: TextIO, clock: Clock = time.monotonic) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.text import Text

        self._clock = clock
        self._meter = RateMeter(clock)
        self._next_s = clock()
        self._console = Console(file=stream)
        self._bar = Progress(
            TextColumn("rows"),
            BarColumn(bar_width=24),  # leaves room for the time on 80 columns
            TextColumn("{task.fields[rows]}"),
            console=self._console,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("rows", total=None, rows="")
        self._figures = Text("")
        # No refresh thread: nothing else writes while the engine steps, and the engine wants the cores.
        self._live = Live(Group(self._bar, self._figures), console=self._console, auto_refresh=False, transient=True)
        self._is_live = False

    def stage(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False)
        self._meter.restart()

    def update(self, snapshot: Snapshot) -> None:
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _BAR_INTERVAL_S
        if not self._is_live:
            self._live.start()
            self._is_live = True
        rates = self._meter.rates(snapshot)
        rows = f"{_rows(snapshot)} · {time_left(snapshot.left, rates)}"
        self._bar.update(self._task, total=snapshot.num_rows, completed=snapshot.num_rows_done, rows=rows)
        self._figures.plain = describe(snapshot, rates)
        self._live.refresh()

    def close(self) -> None:
        if self._is_live:
            self._live.stop()
            self._is_live = False


def progress_for(stream: TextIO, *, quiet: bool) -> ProgressReporter:
    if quiet:
        return QuietProgress()
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    return BarProgress(stream) if is_terminal else LineProgress(stream)


def _rows(snapshot: Snapshot) -> str:
    total = "" if snapshot.num_rows is None else f"/{snapshot.num_rows:,}"
    return f"{snapshot.num_rows_done:,}{total}"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{whole % 60:02}s" if minutes else f"{whole}s"
