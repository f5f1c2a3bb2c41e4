"""A scoring job that is stopped or whose input breaks: nothing is written, and what was going on is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import FakeModelSource
from score_models import cyclic, table_engine, uniform

from batchinfer.config import EngineConfig
from batchinfer.interrupt import Interrupted
from batchinfer.job_input import JobError
from batchinfer.progress import Snapshot
from batchinfer.scoring.job import run_score
from batchinfer.scoring.rows import RowReader
from batchinfer.scoring.settings import ScoreSettings
from batchinfer.scoring.summary import ScoreSummary


class Recorder:
    """A progress reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.snapshots: list[Snapshot] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def update(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def close(self) -> None:
        pass


@pytest.fixture
def settings(tmp_path: Path) -> ScoreSettings:
    pq.write_table(pa.table({"text": [f"text number {i}" for i in range(40)]}), tmp_path / "t.parquet")
    config = EngineConfig(max_batch_tokens=32)
    return ScoreSettings(str(tmp_path / "t.parquet"), "fake", tmp_path / "out.parquet", config)


def run(settings: ScoreSettings, progress: Any = None, table: Any = None, **options: Any) -> ScoreSummary:
    engine = table_engine(uniform() if table is None else table, config=settings.engine)
    factory: Callable[..., Any] = lambda source, config: engine  # noqa: E731
    return run_score(settings, progress, engine_factory=factory, resolve=lambda name: FakeModelSource(name), **options)


def test_progress_and_summary(settings: ScoreSettings) -> None:
    progress = Recorder()
    summary = run(settings, progress, window_rows=15)
    assert progress.stages == ["loading fake", f"scoring {settings.texts}"]
    done = [snapshot.num_rows_done for snapshot in progress.snapshots]
    assert done == sorted(done)
    assert max(done) <= summary.num_rows == 40
    assert progress.snapshots[-1].num_rows == 40
    assert summary.num_prompt_tokens_computed + summary.num_prompt_tokens_reused == summary.num_prompt_tokens
    assert summary.num_prompt_tokens_reused > 0
    assert summary.perplexity == pytest.approx(256, rel=1e-6)
    assert "corpus: 256.0000" in summary.to_text()


def test_an_interrupt_leaves_nothing(settings: ScoreSettings, tmp_path: Path) -> None:
    steps: list[int] = []

    def stop() -> None:
        steps.append(1)
        if len(steps) == 3:
            raise Interrupted(2)

    with pytest.raises(Interrupted) as caught:
        run(settings, check_interrupt=stop)
    assert "nothing was written" in "".join(caught.value.__notes__)
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


def test_rows_that_break_the_reader_are_named(settings: ScoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    original = RowReader.read

    def read(self: RowReader, table: pa.Table, first_row_index: int = 0) -> Any:
        if first_row_index:
            raise RuntimeError("broken")
        return original(self, table, first_row_index)

    monkeypatch.setattr(RowReader, "read", read)
    with pytest.raises(JobError, match="rows from 15 on: broken"):
        run(settings, window_rows=15)
    assert not settings.output.exists()


def test_windows_of_rows_change_no_bit(settings: ScoreSettings) -> None:
    found: list[ScoreSummary] = []
    rows = []
    for number, window_rows in enumerate((40, 7, 1)):
        one = ScoreSettings(settings.texts, "fake", settings.output.with_name(f"{number}.parquet"), settings.engine)
        found.append(run(one, table=cyclic(), window_rows=window_rows))
        rows.append(pq.read_table(one.output).to_pylist())
    assert rows[0] == rows[1] == rows[2]
    figures = ("nll", "perplexity", "mean_of_row_perplexities", "bits_per_byte", "word_perplexity")
    assert len({tuple(getattr(summary, name) for name in figures) for summary in found}) == 1


def test_lines_that_cannot_be_read_are_row_errors(settings: ScoreSettings, tmp_path: Path) -> None:
    lines = [b'{"text": "one"}', b'{"text": "\xff"}', b'{"text": "three"}', b"{"]
    (tmp_path / "t.jsonl").write_bytes(b"\n".join(lines))
    summary = run(replace(settings, texts=str(tmp_path / "t.jsonl")), window_rows=2)
    assert (summary.num_rows, summary.failed_by_code) == (4, {"invalid_row": 2})
    errors = pq.read_table(settings.output).column("error").to_pylist()
    assert [error and error["code"] for error in errors] == [None, "invalid_row", None, "invalid_row"]
    assert "t.jsonl, line 2: not UTF-8" in errors[1]["message"]
