"""Progress on a terminal and off it, with a clock of the test's own."""

from __future__ import annotations

import io

import pytest
from fakes import FakeEngineStats

from batchinfer.progress import BarProgress, LineProgress, QuietProgress, RateMeter, Snapshot, describe, progress_for
from batchinfer.summary import Tally
from batchinfer.types import Completion, FinishReason


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def snapshot(**values: object) -> Snapshot:
    standard = {
        "num_rows": 100,
        "num_rows_done": 10,
        "num_rows_failed": 0,
        "num_seqs_running": 8,
        "num_prompt_tokens_computed": 0,
        "num_prompt_tokens_reused": 0,
        "num_output_tokens": 0,
        "kv_use": 0.5,
        "num_tokens_left": None,
    }
    return Snapshot(**{**standard, **values})  # type: ignore[arg-type]


def test_lines_come_after_2_s_then_every_10_s_then_every_minute() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = LineProgress(stream, clock)
    progress.stage("running p.parquet")
    at_s = []
    for _ in range(100 * 60 * 2):  # steps of half a second for 100 minutes
        clock.now_s += 0.5
        before = stream.tell()
        progress.update(snapshot())
        if stream.tell() > before:
            at_s.append(clock.now_s - 1000)
    assert at_s[:4] == [2.0, 12.0, 22.0, 32.0]
    assert at_s[-1] - at_s[-2] == 60.0
    assert len(at_s) < 160
    assert "\r" not in stream.getvalue()
    assert stream.getvalue().startswith("batchinfer: running p.parquet\nbatchinfer: 10/100 rows · prompt 0 tok/s")


def test_a_line_says_everything() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = LineProgress(stream, clock)
    clock.now_s += 10
    progress.update(
        snapshot(
            num_rows_failed=3,
            num_prompt_tokens_computed=5000,
            num_prompt_tokens_reused=20_000,
            num_output_tokens=1000,
            num_tokens_left=60_000.0,
        )
    )
    assert stream.getvalue() == (
        "batchinfer: 10/100 rows · 3 failed · prompt 500 tok/s computed, 2,000 reused · output 100 tok/s"
        " · 8 running · KV 50 % · 1m40s left\n"
    )


def test_rates_are_of_the_last_half_minute() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    for _ in range(100):  # 100 s of nothing
        clock.now_s += 1
        meter.rates(snapshot())
    for second in range(1, 31):
        clock.now_s += 1
        rates = meter.rates(snapshot(num_output_tokens=90 * second))
    assert rates.output == pytest.approx(90.0)


def test_a_stage_is_not_part_of_the_rate() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = LineProgress(stream, clock)
    clock.now_s += 1000  # loading
    progress.stage("running")
    clock.now_s += 10
    progress.update(snapshot(num_output_tokens=1000))
    assert "output 100 tok/s" in stream.getvalue()


def test_time_left_counts_tokens_not_rows() -> None:
    """9 of 10 rows are done, but the tenth prompt is as long as all the others together."""
    tally = Tally()
    for row in range(9):
        tally.add_completion(Completion(row, token_ids=[1] * 10, text="x", finish_reason=FinishReason.STOP))
    stats = FakeEngineStats(
        num_rows=10,
        num_rows_done=9,
        num_seqs_running=1,
        num_prompt_tokens=2000,
        num_prompt_tokens_shareable=200,
        num_prompt_tokens_computed=900,
        num_prompt_tokens_reused=100,
        num_output_tokens=90,
        num_kv_blocks=4,
        num_kv_blocks_used=1,
    )
    taken = Snapshot.take(tally, stats, 10)
    assert taken.num_tokens_left == (2000 - 200 - 900) + (10 * 10 - 90)
    assert (taken.num_rows_done, taken.kv_use) == (9, 0.25)


def test_rows_of_later_windows_are_taken_to_be_like_these() -> None:
    tally = Tally()
    tally.add_completion(Completion(0, token_ids=[1] * 10, text="x", finish_reason=FinishReason.STOP))
    stats = FakeEngineStats(
        num_rows=1, num_rows_done=1, num_prompt_tokens=50, num_prompt_tokens_computed=50, num_output_tokens=10
    )
    assert Snapshot.take(tally, stats, 4).num_tokens_left == 3 * (50 + 10)
    tally.end_window(stats)
    tally.add_completion(Completion(1, token_ids=[1] * 10, text="x", finish_reason=FinishReason.STOP))
    later = Snapshot.take(tally, stats, 4)
    assert later.num_tokens_left == 2 * (50 + 10)
    assert (later.num_prompt_tokens_computed, later.num_output_tokens) == (100, 20)


def test_time_left_is_unknown_before_the_first_row_and_without_a_row_count() -> None:
    stats = FakeEngineStats(num_rows=10, num_prompt_tokens=100)
    assert Snapshot.take(Tally(), stats, 10).num_tokens_left is None
    tally = Tally()
    tally.add_completion(Completion(0, token_ids=[1], text="x", finish_reason=FinishReason.STOP))
    assert Snapshot.take(tally, stats, None).num_tokens_left is None
    meter = RateMeter(Clock())
    assert "time left unknown" in describe(snapshot(), meter.rates(snapshot()))


def test_choice_by_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(progress_for(io.StringIO(), quiet=False), LineProgress)
    assert isinstance(progress_for(Terminal(), quiet=False), BarProgress)
    assert isinstance(progress_for(Terminal(), quiet=True), QuietProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress_for(Terminal(), quiet=False), LineProgress)


@pytest.mark.parametrize("no_color", [True, False])
def test_the_bar_shows_rows_and_figures_and_obeys_no_color(monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    clock, stream = Clock(), Terminal()
    progress = BarProgress(stream, clock)
    progress.stage("loading [bold]x")
    clock.now_s += 10
    progress.update(snapshot(num_output_tokens=1000))
    progress.close()
    text = stream.getvalue()
    assert "loading [bold]x" in text
    assert "10/100" in text
    assert "output 100 tok/s · 8 running · KV 50 %" in text
    has_colour = "\x1b[38;5;" in text or "\x1b[35" in text
    assert has_colour != no_color
