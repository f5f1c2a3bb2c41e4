"""Counting rows and tokens over windows."""

from __future__ import annotations

import json
from pathlib import Path

from fakes import FakeEngineStats

from batchinfer.summary import JobSummary, Tally
from batchinfer.types import Completion, ErrorCode, FinishReason, RowError


def completion(row: int, sample: int = 0, *, cut: bool = False, num_tokens: int = 3) -> Completion:
    reason = FinishReason.LENGTH if cut else FinishReason.STOP
    return Completion(row, sample, token_ids=[1] * num_tokens, text="x", finish_reason=reason)


def error(row: int, sample: int = 0, code: ErrorCode = ErrorCode.PROMPT_NULL) -> Completion:
    return Completion(row, sample, error=RowError(code, "why"))


def window(tally: Tally, *completions: Completion, stats: FakeEngineStats | None = None) -> None:
    for each in completions:
        tally.add_completion(each)
    tally.end_window(stats or FakeEngineStats())


def summary(tally: Tally) -> JobSummary:
    return tally.summary(Path("out.parquet"), {})


def test_a_row_counts_once_however_many_samples_it_has() -> None:
    tally = Tally()
    window(tally, completion(0, 1, cut=True), completion(0, 0, cut=True), completion(1, 0), completion(1, 1, cut=True))
    result = summary(tally)
    assert (result.num_rows, result.num_rows_ok, result.num_rows_truncated) == (2, 2, 2)
    assert (result.num_completions, result.num_output_tokens) == (4, 12)


def test_the_summary_says_that_prompt_tokens_count_for_each_sample() -> None:
    one, two = Tally(), Tally()
    window(one, completion(0, 0), completion(1, 0), stats=FakeEngineStats(num_rows=2, num_prompt_tokens=70))
    window(two, completion(0, 0), completion(0, 1), stats=FakeEngineStats(num_rows=1, num_prompt_tokens=70))
    assert "total: 70 · computed" in summary(one).to_text()
    assert "total: 70, once for each sample · computed" in summary(two).to_text()


def test_failed_rows_count_by_code_and_once_a_row() -> None:
    tally = Tally()
    window(
        tally,
        error(0),
        error(1, 0, ErrorCode.NON_FINITE_LOGITS),
        error(1, 1, ErrorCode.NON_FINITE_LOGITS),
        completion(2),
    )
    result = summary(tally)
    assert result.failed_by_code == {"non_finite_logits": 1, "prompt_null": 1}
    assert (result.num_rows_ok, result.num_rows_failed) == (1, 2)
    assert "ok: 1 · truncated: 0 · failed: 2 (non_finite_logits: 1, prompt_null: 1)" in result.to_text()


def test_windows_add_up() -> None:
    tally = Tally()
    tally.seconds["run"] = 4.0  # of which the engine says it planned for 1 + 1
    stats = FakeEngineStats(
        num_rows=1,
        num_prompt_tokens=100,
        num_prompt_tokens_computed=30,
        num_prompt_tokens_reused=70,
        num_prompt_tokens_shareable=80,
        num_preemptions=2,
        planning_s=1.0,
    )
    window(tally, completion(0), stats=stats)
    window(tally, completion(1, cut=True), stats=stats)
    result = summary(tally)
    assert (result.num_rows, result.num_prompt_tokens, result.num_preemptions) == (2, 200, 4)
    assert result.sharing_achieved == 0.7
    assert result.sharing_possible == 0.8
    assert result.sharing_achieved_of_possible == 0.875
    assert result.seconds["plan"] == 2.0
    assert result.seconds["run"] == 2.0
    assert result.tokens_per_second == {"prompt_computed": 30.0, "output": 3.0, "total": 103.0}
    text = result.to_text()
    assert "achieved: 70.0 % · possible: 80.0 % · achieved of possible: 87.5 %" in text
    assert "truncated: 1" in text


def test_an_empty_job_divides_by_nothing() -> None:
    result = summary(Tally())
    value = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert value["sharing_achieved_of_possible"] is None
    assert value["tokens_per_second"] == {"prompt_computed": None, "output": None, "total": None}
    assert "tokens/s       prompt computed: none" in result.to_text()


def test_exit_codes() -> None:
    fine, mixed, bad = Tally(), Tally(), Tally()
    window(fine, completion(0))
    window(mixed, completion(0), error(1))
    window(bad, error(0), error(1))
    assert [summary(t).exit_code(strict=False) for t in (fine, mixed, bad)] == [0, 0, 1]
    assert [summary(t).exit_code(strict=True) for t in (fine, mixed, bad)] == [0, 3, 1]
