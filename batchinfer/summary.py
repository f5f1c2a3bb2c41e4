"""What a job did, in numbers: counted while it runs, printed and written as JSON at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from batchinfer.types import Completion, FinishReason

#: What a job's seconds are split into. "read" covers tokenizing; "run" leaves the others out. Reading and
#: planning of all windows but the first go on beside "run".
STAGES = ("load", "read", "plan", "run", "journal", "write")

#: EngineStats fields that add up over windows.
_SUMMED = (
    "num_prompt_tokens",
    "num_prompt_tokens_computed",
    "num_prompt_tokens_reused",
    "num_prompt_tokens_shareable",
    "num_prompt_tokens_recomputed",
    "num_preemptions",
    "num_steps",
)


class EngineCounts(Protocol):
    """What a job reads of EngineStats: counts of the engine's current run."""

    num_rows: int
    num_rows_done: int
    num_rows_failed: int
    num_seqs_running: int
    num_seqs_waiting: int
    num_prompt_tokens: int
    num_prompt_tokens_computed: int
    num_prompt_tokens_reused: int
    num_prompt_tokens_shareable: int
    num_prompt_tokens_recomputed: int
    num_output_tokens: int
    num_output_tokens_unfinished: int
    max_output_tokens_left: int
    num_preemptions: int
    num_steps: int
    num_kv_blocks: int
    num_kv_blocks_used: int
    planning_s: float


@dataclass(frozen=True, slots=True)
class RowCounts:
    """What finished rows came to. They can be added up."""

    num_rows: int = 0
    num_rows_truncated: int = 0  # with at least one sample cut at max_tokens or max_model_len
    num_completions: int = 0
    num_output_tokens: int = 0
    failed_by_code: dict[str, int] = field(default_factory=dict)  # rows

    @property
    def num_rows_failed(self) -> int:
        return sum(self.failed_by_code.values())

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(
            self.num_rows + other.num_rows,
            self.num_rows_truncated + other.num_rows_truncated,
            self.num_completions + other.num_completions,
            self.num_output_tokens + other.num_output_tokens,
            dict(sorted((Counter(self.failed_by_code) + Counter(other.failed_by_code)).items())),
        )

    def counts(self) -> dict[str, int]:
        """For the output's metadata."""
        return {
            "num_rows_ok": self.num_rows - self.num_rows_failed,
            "num_rows_truncated": self.num_rows_truncated,
            "num_rows_failed": self.num_rows_failed,
            "num_completions": self.num_completions,
            "num_output_tokens": self.num_output_tokens,
        }


@dataclass(slots=True)
class Tally:
    """Running totals of a job over its windows."""

    earlier: RowCounts = field(default_factory=RowCounts)  # of earlier runs of the job; in none of the others
    num_rows: int = 0  # that have a completion
    num_rows_truncated: int = 0  # with at least one sample cut at max_tokens or max_model_len
    num_completions: int = 0
    num_output_tokens: int = 0
    failed_by_code: Counter[str] = field(default_factory=Counter)  # rows; samples may fail one by one
    engine: Counter[str] = field(default_factory=Counter)  # finished windows, by EngineStats field
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    # rows of the current window
    _seen: set[int] = field(default_factory=set)
    _truncated: set[int] = field(default_factory=set)
    _failed: set[int] = field(default_factory=set)

    @property
    def num_rows_failed(self) -> int:
        return sum(self.failed_by_code.values())

    def add_completion(self, completion: Completion) -> None:
        row = completion.row_index
        self.num_completions += 1
        self.num_output_tokens += len(completion.token_ids)
        self.num_rows += _is_new(row, self._seen)
        if completion.error is not None:
            self.failed_by_code[completion.error.code.value] += _is_new(row, self._failed)
        elif completion.finish_reason is FinishReason.LENGTH:
            self.num_rows_truncated += _is_new(row, self._truncated)

    def end_window(self, stats: EngineCounts) -> None:
        """`stats` are the engine's of this window alone."""
        self.add_engine(stats)
        self.seconds["run"] -= stats.planning_s  # the engine plans inside run()
        for rows in (self._seen, self._truncated, self._failed):
            rows.clear()

    def add_engine(self, stats: EngineCounts) -> None:
        """`stats` are the engine's of a run that has ended."""
        for name in (*_SUMMED, "num_rows", "num_output_tokens"):
            self.engine[name] += getattr(stats, name)
        self.seconds["plan"] += stats.planning_s

    def forget(self, first_row: int, num_rows: int) -> None:
        """These rows are complete: nothing is held of them."""
        done = range(first_row, first_row + num_rows)
        for rows in (self._seen, self._truncated, self._failed):
            rows.difference_update(done)

    def engine_counts(self) -> dict[str, int]:
        """Of the runs that have ended."""
        return {name: self.engine[name] for name in _SUMMED}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start_s

    def counts(self) -> dict[str, int]:
        """Rows, completions and tokens, for the output's metadata."""
        return {
            "num_rows_ok": self.num_rows - self.num_rows_failed,
            "num_rows_truncated": self.num_rows_truncated,
            "num_rows_failed": self.num_rows_failed,
            "num_completions": self.num_completions,
            "num_output_tokens": self.num_output_tokens,
            **self.engine_counts(),
        }

    def summary(self, output: Path, params: dict[str, Any], rows: RowCounts | None = None) -> JobSummary:
        """`rows`: of the whole job, earlier runs included; None: there were none."""
        rows = rows or RowCounts(
            self.num_rows,
            self.num_rows_truncated,
            self.num_completions,
            self.num_output_tokens,
            dict(sorted(self.failed_by_code.items())),
        )
        return JobSummary(
            output=str(output),
            num_rows=rows.num_rows,
            num_rows_earlier=self.earlier.num_rows,
            num_output_tokens_earlier=self.earlier.num_output_tokens,
            failed_by_code=rows.failed_by_code,
            seconds={name: round(value, 6) for name, value in self.seconds.items()},
            params=params,
            **rows.counts(),
            **self.engine_counts(),
        )


def _is_new(row: int, rows: set[int]) -> bool:
    """Adds it too."""
    if row in rows:
        return False
    rows.add(row)
    return True


@dataclass(frozen=True, slots=True)
class JobSummary:
    """The result of a job. Rates are per second of `seconds["run"]`, the time the engine ran.

    Rows count once, prompt tokens once for each sample: a row with n = 4 brings its prompt four times.
    Rows, completions and output tokens are those of the whole job; prompt tokens, preemptions, steps, seconds
    and rates those of this run, where earlier runs did a part of the job.
    """

    output: str
    num_rows: int
    num_rows_ok: int
    num_rows_truncated: int
    num_rows_failed: int
    failed_by_code: dict[str, int]
    num_completions: int
    num_prompt_tokens: int
    num_prompt_tokens_computed: int
    num_prompt_tokens_reused: int
    num_prompt_tokens_shareable: int
    num_prompt_tokens_recomputed: int
    num_output_tokens: int
    num_preemptions: int
    num_steps: int
    seconds: dict[str, float]
    params: dict[str, Any]  # see ResolvedParams.to_dict
    num_rows_earlier: int = 0  # done by earlier runs
    num_output_tokens_earlier: int = 0

    @property
    def sharing_achieved(self) -> float | None:
        """Reused over all prompt tokens, 0 to 1; None without prompt tokens."""
        return _ratio(self.num_prompt_tokens_reused, self.num_prompt_tokens)

    @property
    def sharing_possible(self) -> float | None:
        return _ratio(self.num_prompt_tokens_shareable, self.num_prompt_tokens)

    @property
    def sharing_achieved_of_possible(self) -> float | None:
        """None where nothing is shared."""
        return _ratio(self.num_prompt_tokens_reused, self.num_prompt_tokens_shareable)

    @property
    def tokens_per_second(self) -> dict[str, float | None]:
        run_s = self.seconds["run"]
        num_output_tokens = self.num_output_tokens - self.num_output_tokens_earlier
        total = self.num_prompt_tokens + num_output_tokens
        return {
            "prompt_computed": _ratio(self.num_prompt_tokens_computed, run_s),
            "output": _ratio(num_output_tokens, run_s),
            "total": _ratio(total, run_s),  # reused prompt tokens included
        }

    def exit_code(self, *, strict: bool) -> int:
        """0 done; 1 nothing succeeded; 3 a row failed and `strict` is set."""
        if self.num_rows_ok == 0:
            return 1
        return 3 if strict and self.num_rows_failed else 0

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON values: no NaN, no infinity."""
        result = asdict(self)
        result["sharing_achieved"] = self.sharing_achieved
        result["sharing_possible"] = self.sharing_possible
        result["sharing_achieved_of_possible"] = self.sharing_achieved_of_possible
        result["tokens_per_second"] = self.tokens_per_second
        return result

    def to_text(self) -> str:
        """The same for people, one fact a line."""
        rates = self.tokens_per_second
        failed = f"{self.num_rows_failed:,}"
        if self.failed_by_code:
            failed += " (" + ", ".join(f"{code}: {count:,}" for code, count in self.failed_by_code.items()) + ")"
        recomputed = self.num_prompt_tokens_recomputed
        each_sample = ", once for each sample" if self.num_completions > self.num_rows else ""
        lines = [
            ("rows", f"ok: {self.num_rows_ok:,} · truncated: {self.num_rows_truncated:,} · failed: {failed}"),
            (
                "prompt tokens",
                f"total: {self.num_prompt_tokens:,}{each_sample} · computed: {self.num_prompt_tokens_computed:,}"
                f" · reused: {self.num_prompt_tokens_reused:,}"
                + (f" · computed again: {recomputed:,}" if recomputed else ""),
            ),
            (
                "sharing",
                f"achieved: {_percent(self.sharing_achieved)} · possible: {_percent(self.sharing_possible)}"
                f" · achieved of possible: {_percent(self.sharing_achieved_of_possible)}",
            ),
            ("output tokens", f"{self.num_output_tokens:,} in {self.num_completions:,} completions"),
            (
                "tokens/s",
                f"prompt computed: {_rate(rates['prompt_computed'])} · output: {_rate(rates['output'])}"
                f" · total with reused: {_rate(rates['total'])}",
            ),
            ("preemptions", f"{self.num_preemptions:,}"),
            ("seconds", " · ".join(f"{name}: {value:.2f}" for name, value in self.seconds.items())),
            ("output", self.output),
        ]
        if self.num_rows_earlier:
            lines.insert(1, ("", f"{self.num_rows_earlier:,} of them by earlier runs"))
        return "\n".join(f"{name:<14} {text}" for name, text in lines)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.1f} %"


def _rate(value: float | None) -> str:
    return "none" if value is None else f"{value:,.0f}"
