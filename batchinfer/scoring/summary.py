"""What a scoring job did, in numbers: printed and written as JSON at the end."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from batchinfer.scoring.result import CorpusScore, RowScore
from batchinfer.summary import EngineCounts
from batchinfer.types import ErrorCode

STAGES = ("load", "read", "plan", "run", "write")
_SUMMED = (
    "num_prompt_tokens",
    "num_prompt_tokens_computed",
    "num_prompt_tokens_reused",
    "num_prompt_tokens_recomputed",
    "num_preemptions",
    "num_steps",
)


@dataclass(slots=True)
class ScoreTally:
    """Running totals of a scoring job over its windows of rows."""

    num_rows: int = 0
    num_rows_in_windows: int = 0  # longer than the window, see RowScore.sees_all
    num_rows_nothing: int = 0  # without a token to score
    failed_by_code: Counter[str] = field(default_factory=Counter)
    corpus: CorpusScore = field(default_factory=CorpusScore)
    engine: Counter[str] = field(default_factory=Counter)  # finished windows of rows, by EngineStats field
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @property
    def num_rows_failed(self) -> int:
        return self.failed_by_code.total()

    def add(self, row: RowScore) -> None:
        self.num_rows += 1
        self.num_rows_in_windows += row.sees_all is False
        if row.error is None:
            self.corpus.add(row)
        elif row.error.code is ErrorCode.NOTHING_TO_SCORE:
            self.num_rows_nothing += 1
        else:
            self.failed_by_code[row.error.code.value] += 1

    def end_window(self, stats: EngineCounts) -> None:
        for name in _SUMMED:
            self.engine[name] += getattr(stats, name)
        self.seconds["plan"] += stats.planning_s
        self.seconds["run"] -= stats.planning_s  # the engine plans inside run()

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start_s

    def summary(self, output: str, policy: dict[str, Any], warnings: tuple[str, ...]) -> ScoreSummary:
        corpus = self.corpus
        figures = {
            name: getattr(corpus, name)
            for name in (
                "nll_per_token",
                "perplexity",
                "mean_of_row_perplexities",
                "byte_perplexity",
                "word_perplexity",
                "bits_per_byte",
            )
        }
        return ScoreSummary(
            output=output,
            num_rows=self.num_rows,
            num_rows_ok=corpus.num_rows,
            num_rows_nothing_to_score=self.num_rows_nothing,
            num_rows_failed=self.num_rows_failed,
            failed_by_code=dict(sorted(self.failed_by_code.items())),
            num_rows_in_windows=self.num_rows_in_windows,
            num_rows_greedy=corpus.num_greedy_rows,
            num_scored_tokens=corpus.num_tokens,
            num_scored_bytes=corpus.num_bytes,
            num_scored_words=corpus.num_words,
            nll=corpus.nll if corpus.num_rows else None,
            **figures,
            **{name: self.engine[name] for name in _SUMMED},
            seconds={name: round(value, 6) for name, value in self.seconds.items()},
            policy=policy,
            warnings=warnings,
        )


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """The result of a scoring job. Figures of the corpus are over all scored tokens together; see CorpusScore."""

    output: str
    num_rows: int
    num_rows_ok: int
    num_rows_nothing_to_score: int
    num_rows_failed: int
    failed_by_code: dict[str, int]
    num_rows_in_windows: int
    num_rows_greedy: int
    num_scored_tokens: int
    num_scored_bytes: int
    num_scored_words: int
    nll: float | None
    nll_per_token: float | None
    perplexity: float | None
    mean_of_row_perplexities: float | None
    byte_perplexity: float | None
    word_perplexity: float | None
    bits_per_byte: float | None
    num_prompt_tokens: int
    num_prompt_tokens_computed: int
    num_prompt_tokens_reused: int
    num_prompt_tokens_recomputed: int
    num_preemptions: int
    num_steps: int
    seconds: dict[str, float]
    policy: dict[str, Any]
    warnings: tuple[str, ...]

    def exit_code(self, *, strict: bool) -> int:
        """0 done; 1 no row has a score; 3 a row failed and `strict` is set."""
        if self.num_rows_ok == 0:
            return 1
        return 3 if strict and self.num_rows_failed else 0

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON values. A figure beyond a float is null, and named in `not_finite`."""
        values = asdict(self)
        not_finite = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
        return {**values, **dict.fromkeys(not_finite), "warnings": list(self.warnings), "not_finite": not_finite}

    def to_text(self) -> str:
        """The same for people, one fact a line."""
        failed = f"{self.num_rows_failed:,}"
        if self.failed_by_code:
            failed += " (" + ", ".join(f"{code}: {count:,}" for code, count in self.failed_by_code.items()) + ")"
        run_s = self.seconds["run"]
        rate = f" · scored per second: {self.num_scored_tokens / run_s:,.0f}" if run_s > 0 else ""
        lines = [
            (
                "rows",
                f"ok: {self.num_rows_ok:,} · nothing to score: {self.num_rows_nothing_to_score:,} · failed: {failed}",
            ),
            ("scored", f"tokens: {self.num_scored_tokens:,} · bytes: {self.num_scored_bytes:,}{rate}"),
            (
                "perplexity",
                f"corpus: {_figure(self.perplexity)} · per word: {_figure(self.word_perplexity)}"
                f" · per byte: {_figure(self.byte_perplexity)} · mean of rows: "
                f"{_figure(self.mean_of_row_perplexities)}",
            ),
            ("nats/token", _figure(self.nll_per_token)),
            ("bits/byte", _figure(self.bits_per_byte)),
            ("greedy", f"rows whose every token is the most probable one: {self.num_rows_greedy:,}"),
            (
                "tokens read",
                f"total: {self.num_prompt_tokens:,} · computed: {self.num_prompt_tokens_computed:,}"
                f" · reused: {self.num_prompt_tokens_reused:,}",
            ),
            ("seconds", " · ".join(f"{name}: {value:.2f}" for name, value in self.seconds.items())),
            ("output", self.output),
        ]
        if self.num_rows_in_windows:
            text = f"{self.num_rows_in_windows:,} rows are longer than the window of {self.policy['window']} tokens"
            lines.insert(1, ("windows", f"{text}; every scored token saw at least {self.policy['min_context']}"))
        lines += [("warning", text) for text in self.warnings]
        return "\n".join(f"{name:<14} {text}" for name, text in lines)


def _figure(value: float | None) -> str:
    return "none" if value is None else f"{value:,.4f}"
