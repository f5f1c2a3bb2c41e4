"""Progress on a terminal and off it, with a clock of the test's own."""

from __future__ import annotations

import io

import numpy as np
import pytest
from fakes import FakeEngineStats

from batchinfer.progress import (
    BarProgress,
    LineProgress,
    QuietProgress,
    RateMeter,
    Rates,
    Snapshot,
    TokensLeft,
    progress_for,
    time_left,
)
from batchinfer.summary import Tally
from batchinfer.types import Completion, ErrorCode, FinishReason, Prompt, RowError, SamplingParams, failed


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
        "left": None,
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
            left=TokensLeft(prompt=50_000.0, output=10_000.0),
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
        max_output_tokens_left=1000,
        num_kv_blocks=4,
        num_kv_blocks_used=1,
    )
    taken = Snapshot.take(tally, stats, 10)
    assert taken.left == TokensLeft(prompt=2000 - 200 - 900, output=10 * 10 - 90)
    assert (taken.num_rows_done, taken.kv_use) == (9, 0.25)


def test_rows_of_later_windows_are_taken_to_be_like_these() -> None:
    tally = Tally()
    tally.add_completion(Completion(0, token_ids=[1] * 10, text="x", finish_reason=FinishReason.STOP))
    stats = FakeEngineStats(
        num_rows=1, num_rows_done=1, num_prompt_tokens=50, num_prompt_tokens_computed=50, num_output_tokens=10
    )
    assert Snapshot.take(tally, stats, 4).left == TokensLeft(prompt=3 * 50, output=3 * 10)
    tally.end_window(stats)
    tally.add_completion(Completion(1, token_ids=[1] * 10, text="x", finish_reason=FinishReason.STOP))
    later = Snapshot.take(tally, stats, 4)
    assert later.left == TokensLeft(prompt=2 * 50, output=2 * 10)
    assert (later.num_prompt_tokens_computed, later.num_output_tokens) == (100, 20)


def test_before_a_row_has_ended_every_row_is_taken_to_be_as_long_as_it_may_be() -> None:
    stats = FakeEngineStats(
        num_rows=10,
        num_seqs_running=10,
        num_prompt_tokens=100,
        num_prompt_tokens_computed=60,
        num_output_tokens_unfinished=30,
        max_output_tokens_left=270,
    )
    tally = Tally()
    tally.add_completion(
        failed(Prompt(0, np.zeros(0, np.int32), SamplingParams()), RowError(ErrorCode.PROMPT_NULL, ""))
    )
    taken = Snapshot.take(tally, stats, 20)
    assert taken.left == TokensLeft(prompt=40 + 100, output=270 + 300, is_full_length=True)
    assert taken.num_output_tokens == 30
    assert time_left(taken.left, Rates(60, 0, 11)) == "10s left if no row ends early"


def test_a_row_is_done_with_its_last_sample_and_the_mean_is_of_samples() -> None:
    tally = Tally()
    for row in range(4):  # one of three samples each
        tally.add_completion(Completion(row, token_ids=[1] * 10, text="x", finish_reason=FinishReason.STOP))
    stats = FakeEngineStats(
        num_rows=4,
        num_seqs_running=6,
        num_seqs_waiting=2,
        num_output_tokens=40,
        num_output_tokens_unfinished=30,
        max_output_tokens_left=500,
    )
    taken = Snapshot.take(tally, stats, 4)
    assert (taken.num_rows_done, taken.num_output_tokens) == (0, 70)
    assert taken.left == TokensLeft(prompt=0, output=8 * 10 - 30)
    stats.max_output_tokens_left = 20
    assert Snapshot.take(tally, stats, 4).left == TokensLeft(prompt=0, output=20)


def test_once_no_prompt_is_left_only_the_speed_of_output_counts() -> None:
    rates = Rates(prompt_computed=900, prompt_reused=0, output=100)
    assert time_left(TokensLeft(prompt=1000, output=4000), rates) == "5s left"
    assert time_left(TokensLeft(prompt=0, output=4000), rates) == "40s left"


def test_time_left_is_unknown_without_a_row_count_and_without_speed() -> None:
    assert Snapshot.take(Tally(), FakeEngineStats(num_rows=10), None).left is None
    assert time_left(None, Rates(1, 1, 1)) == "time left unknown"
    assert time_left(TokensLeft(1, 1), Rates(0, 0, 0)) == "time left unknown"


def test_a_narrow_terminal_shows_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    clock, stream = Clock(), Terminal()
    progress = BarProgress(stream, clock)
    clock.now_s += 10
    progress.update(snapshot(num_prompt_tokens_computed=50_000, num_output_tokens=1000, left=TokensLeft(9e5, 0, True)))
    progress.close()
    for text in ("10/100 · 2m56s left if no row ends early", "5,000 tok/s", "KV 50 %"):
        assert text in stream.getvalue()
    assert "…" not in stream.getvalue()


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
