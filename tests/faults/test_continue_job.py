"""A job that was stopped goes on, and only that job: identity, input, damage, row errors, disk full."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import FakeEngine, FakeModelSource

from batchinfer.errors import InputError
from batchinfer.job import run_job
from batchinfer.job_run import RowErrorsError
from batchinfer.job_status import job_status
from batchinfer.output.journal import read_journal
from batchinfer.output.lock import JobLock
from batchinfer.output.store import DiffersError
from batchinfer.settings import job_settings
from batchinfer.summary import JobSummary
from batchinfer.types import Completion, FinishReason

NUM_ROWS = 20


class Stop(BaseException):
    """Breaks a job off, as a kill would, but for the flush on the way out."""


class Jobs:
    """Runs one job again and again; `ran` are the rows that the engine was given in the last run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prompts = folder / "in.parquet"
        self.output = folder / "out"
        self.model = FakeModelSource()
        self.ran: list[int] = []
        self.said: list[str] = []
        self.write()

    def write(self, **changes: Any) -> None:
        columns = {"prompt": [f"row {i}" for i in range(NUM_ROWS)], "note": list(range(NUM_ROWS))}
        pq.write_table(pa.table({**columns, **changes}), self.prompts)

    def run(self, stop_at: int | None = None, engine: type[FakeEngine] = FakeEngine, **flags: Any) -> JobSummary:
        self.ran, self.said = [], []

        def on_row(row: int) -> None:
            if row == stop_at:
                raise Stop
            self.ran.append(row)

        given = {"prompts": str(self.prompts), "model": "m", "output": str(self.output), "window": 5, **flags}
        return run_job(
            job_settings(given, {}, None),
            self,
            engine_factory=lambda model, config: engine(model, config, on_row),
            resolve=lambda name: self.model,
        )

    def stop(self, at: int = 11, **flags: Any) -> None:
        """Rows run from the last of a window to its first: of window 2, rows 14 to 12 are journaled then."""
        with pytest.raises(Stop):
            self.run(at, **flags)

    def rows(self) -> list[dict[str, Any]]:
        return pq.read_table(self.output).to_pylist()

    @property
    def state(self) -> Path:
        return self.output / "_batchinfer"

    # a ProgressReporter
    def stage(self, text: str) -> None:
        self.said.append(text)

    def update(self, snapshot: Any) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


def check_whole(jobs: Jobs) -> None:
    assert [(row["note"], row["output"]) for row in jobs.rows()] == [(i, f"row {i}") for i in range(NUM_ROWS)]


def test_a_folder_of_parts_is_continued_where_it_was(jobs: Jobs) -> None:
    jobs.stop()
    assert sorted(path.name for path in jobs.output.glob("*.parquet")) == ["part-00000.parquet", "part-00001.parquet"]
    summary = jobs.run()
    assert jobs.ran == [11, 10, 19, 18, 17, 16, 15]
    assert f"continuing {jobs.output}: 13 of 20 rows are done" in jobs.said
    assert (summary.num_rows_ok, summary.num_rows_earlier, summary.num_output_tokens) == (20, 13, 110)
    check_whole(jobs)
    assert [pq.read_metadata(part).num_rows for part in sorted(jobs.output.glob("*.parquet"))] == [5] * 4
    said = json.loads(pq.read_schema(jobs.output / "part-00002.parquet").metadata[b"batchinfer"])
    assert (said["input"]["num_rows"], said["counts"]["num_rows_ok"]) == (5, 5)
    assert sorted(path.name for path in jobs.state.iterdir()) == ["lock", "manifest.json"]


def test_a_finished_job_is_said_to_be_done_and_nothing_runs(jobs: Jobs) -> None:
    for name in ("out", "out.parquet"):
        jobs.output = jobs.folder / name
        first = jobs.run(n=2)
        again = jobs.run(n=2)
        assert jobs.ran == []
        assert jobs.said == [f"{jobs.output} is done: nothing is left to run"]
        for name in ("num_rows", "num_rows_ok", "num_completions", "num_output_tokens", "failed_by_code"):
            assert getattr(first, name) == getattr(again, name)
        assert again.exit_code(strict=True) == 0


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("output", ["out", "out.parquet"])
@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"temperature": 0.7}, "params.temperature is 0.7 and was 0.0"),
        ({"seed": 1}, "params.seed is 1 and was 0"),
        ({"stop": ["x"]}, 'params.stop is ["x"] and was []'),
        ({"logprobs": 0}, "params.logprobs is 0 and was null"),
        ({"dtype": "bfloat16"}, 'engine.dtype is "bfloat16" and was "float32"'),
        ({"kv_dtype": "fp8"}, 'engine.kv_dtype is "float8_e4m3fn" and was "float32"'),
        ({"max_model_len": 100}, "engine.max_model_len is 100 and was 512"),
        ({"limit": 19}, "input.num_rows is 19 and was 20"),
        ({"id_column": "note"}, 'input.columns.id is "note" and was null'),
        ({"output_prefix": "o_"}, 'output.prefix is "o_" and was ""'),
    ],
)
def test_another_identity_is_refused_with_what_differs(
    jobs: Jobs, flags: dict[str, Any], field: str, output: str, finished: bool
) -> None:
    jobs.output = jobs.folder / output
    jobs.run() if finished else jobs.stop()
    before = {path: path.read_bytes() for path in jobs.folder.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(DiffersError) as caught:
        jobs.run(**flags)
    assert field in str(caught.value)
    assert str(jobs.output) in str(caught.value)
    assert jobs.ran == []
    after = {path: path.read_bytes() for path in jobs.folder.rglob("*") if path.is_file() and path.name != "lock"}
    assert after == before
    jobs.run(overwrite=True, **flags)
    assert len(jobs.ran) == flags.get("limit", NUM_ROWS)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda model: setattr(model, "digest", lambda: "other weights"), "model.model"),
        (lambda model: setattr(model.tokenizer, "digest", lambda: "other tokens"), "model.tokenizer"),
        (lambda model: setattr(model.tokenizer, "chat_template", "other"), "model.chat_template"),
        (lambda model: model.generation_defaults.update(top_k=7), "params.top_k is 7 and was 0"),
    ],
)
def test_another_model_under_the_same_name_is_noticed(
    jobs: Jobs, change: Callable[[FakeModelSource], None], field: str
) -> None:
    jobs.stop()
    jobs.model = FakeModelSource()
    change(jobs.model)
    with pytest.raises(DiffersError, match=field):
        jobs.run()


def test_another_version_is_noticed(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.stop()
    monkeypatch.setattr("batchinfer.identity.__version__", "99")
    with pytest.raises(DiffersError, match='version is "99"'):
        jobs.run()


def test_what_cannot_alter_results_may_differ(jobs: Jobs) -> None:
    jobs.stop(temperature=0.0)
    jobs.run(
        max_batch_tokens=64,
        max_num_seqs=3,
        kv_memory="1MiB",
        block_size=16,
        threads=1,
        policy="priority",
        priority_column="note",
        prefix_sharing=False,
        flush_rows=2,
        flush_seconds=0.5,
        max_row_errors=3,
        strict=True,
    )
    check_whole(jobs)


def test_windows_stay_as_they_were(jobs: Jobs) -> None:
    jobs.stop()
    jobs.run(window=7)
    assert any(text.endswith("; windows stay 5 rows long, as the job began") for text in jobs.said)
    check_whole(jobs)


def test_a_job_begun_with_overwrite_is_continued_without_it(jobs: Jobs) -> None:
    jobs.output = jobs.folder / "out.parquet"
    jobs.output.write_bytes(b"old")
    with pytest.raises(Stop) as caught:
        jobs.run(11, overwrite=True)
    assert caught.value.__notes__[0].endswith("to continue, run the same command again without --overwrite")
    assert jobs.output.read_bytes() == b"old"
    jobs.run()
    assert len(jobs.ran) == 7
    check_whole(jobs)


def test_a_file_that_appeared_meanwhile_is_left_alone_and_the_work_is_kept(jobs: Jobs) -> None:
    jobs.output = jobs.folder / "out.parquet"
    jobs.stop()
    jobs.output.write_bytes(b"somebody's")
    with pytest.raises(InputError, match="appeared meanwhile"):
        jobs.run()
    assert jobs.output.read_bytes() == b"somebody's"
    jobs.output.unlink()
    jobs.run()
    assert jobs.ran == []
    check_whole(jobs)


# The input


def test_files_that_were_only_touched_are_compared_and_the_job_goes_on(jobs: Jobs) -> None:
    jobs.write(ratio=[float("nan")] * NUM_ROWS, prompt=[f"row {i}" for i in range(NUM_ROWS)])
    jobs.stop()
    os.utime(jobs.prompts, (1, 1))
    jobs.run()
    assert "comparing the input with the rows that are written: its files changed" in jobs.said
    assert len(jobs.ran) == 7
    check_whole(jobs)
    os.utime(jobs.prompts, (2, 2))
    jobs.run()
    assert jobs.ran == []


@pytest.mark.parametrize(
    ("row", "column", "message"),
    [
        (3, "note", "rows 0 to 4 of the input are not those that this job began with"),
        (9, "prompt", "rows 5 to 9 of the input are not those that this job began with"),
        (13, "prompt", "rows 10 to 14 of the input are not those that this job began with"),
    ],
)
def test_a_changed_row_is_not_continued_silently(jobs: Jobs, row: int, column: str, message: str) -> None:
    jobs.stop()
    values = pq.read_table(jobs.prompts).column(column).to_pylist()
    values[row] = "changed" if column == "prompt" else 99
    jobs.write(**{column: values})
    with pytest.raises(InputError, match=message):
        jobs.run()
    assert jobs.ran == []


@pytest.mark.parametrize("output", ["out", "out.parquet"])
def test_a_finished_output_of_other_rows_is_not_taken_for_this_run_s(jobs: Jobs, output: str) -> None:
    jobs.output = jobs.folder / output
    jobs.run()
    jobs.write(note=list(range(1, NUM_ROWS + 1)))
    with pytest.raises(DiffersError, match="not those"):
        jobs.run()


# Damage


@pytest.mark.parametrize("damage", [b"", b"PAR1 half", None])
def test_a_part_that_is_damaged_or_gone_is_set_aside_and_its_window_run_again(jobs: Jobs, damage: bytes | None) -> None:
    jobs.stop()
    part = jobs.output / "part-00001.parquet"
    part.unlink() if damage is None else part.write_bytes(damage)
    jobs.run()
    assert [row for row in jobs.ran if row < 10] == [9, 8, 7, 6, 5]
    assert any(text.startswith("part-00001.parquet ") and "its 5 rows are run again" in text for text in jobs.said)
    check_whole(jobs)


def test_a_half_written_part_and_leftovers_are_in_nobodys_way(jobs: Jobs) -> None:
    jobs.stop()
    (jobs.output / "part-00003.parquet").write_bytes(b"PAR1")
    (jobs.state / "part-00002.parquet.tmp").write_bytes(b"PAR1")
    (jobs.state / "manifest.json.tmp").write_bytes(b"{")
    jobs.run()
    assert jobs.ran == [11, 10, 19, 18, 17, 16, 15]
    assert "part-00003.parquet was not finished: it is set aside and written again" in jobs.said
    check_whole(jobs)
    assert sorted(path.name for path in jobs.state.iterdir()) == ["lock", "manifest.json"]


def test_a_torn_journal_loses_only_its_torn_rows(jobs: Jobs) -> None:
    jobs.stop(flush_rows=1)
    (journal,) = jobs.state.glob("journal-*.bin")
    journal.write_bytes(journal.read_bytes()[:-7])
    shutil.copy(journal, jobs.folder / "torn")
    jobs.run()
    assert jobs.ran == [12, 11, 10, 19, 18, 17, 16, 15]
    assert any("ended in" in text and "torn bytes: they are set aside" in text for text in jobs.said)
    check_whole(jobs)


@pytest.mark.parametrize("damage", [b"", b"nonsense" * 20])
def test_a_journal_damaged_from_its_beginning_is_set_aside(jobs: Jobs, damage: bytes) -> None:
    jobs.stop()
    (journal,) = jobs.state.glob("journal-*.bin")
    journal.write_bytes(damage)
    jobs.run()
    assert jobs.ran == [14, 13, 12, 11, 10, 19, 18, 17, 16, 15]
    check_whole(jobs)


def test_a_journal_of_another_job_is_not_used(jobs: Jobs) -> None:
    jobs.stop()
    (journal,) = jobs.state.glob("journal-*.bin")
    shutil.copy(journal, jobs.folder / "foreign")
    jobs.run(overwrite=True, stop_at=None)
    jobs.output = jobs.folder / "other"
    jobs.stop()
    shutil.copy(jobs.folder / "foreign", jobs.state / journal.name)
    jobs.run()
    assert jobs.ran == [14, 13, 12, 11, 10, 19, 18, 17, 16, 15]


def test_a_damaged_manifest_is_told(jobs: Jobs) -> None:
    jobs.stop()
    (jobs.state / "manifest.json").write_text("{")
    with pytest.raises(InputError, match=r"manifest\.json is damaged"):
        jobs.run()


@pytest.mark.parametrize(("was", "is_now"), [('"window_rows": 5', '"window_rows": 7'), ('"seed": 0', '"seed": 1')])
def test_a_manifest_that_is_json_with_another_digit_is_damaged(jobs: Jobs, was: str, is_now: str) -> None:
    """With windows of 7 rows behind parts of 5 the output would lack rows."""
    jobs.stop()
    manifest = jobs.state / "manifest.json"
    text = manifest.read_text()
    assert text.count(was) == 1
    manifest.write_text(text.replace(was, is_now))
    with pytest.raises(InputError, match=r"manifest\.json is damaged \(its check sum differs\)"):
        jobs.run()


# Samples, row errors


class Halfway(FakeEngine):
    """Samples come one by one, in a row that may end between two of them."""

    def _complete(self, prompt: Any) -> Any:
        for completion in super()._complete(prompt):
            yield completion
            self._on_row(1000 + 10 * prompt.row_index + completion.sample_index)


def test_of_a_row_only_the_samples_that_are_missing_run(jobs: Jobs) -> None:
    with pytest.raises(Stop):
        jobs.run(1000 + 10 * 17 + 1, engine=Halfway, n=3)  # samples 2 and 1 of row 17 are there
    jobs.run(engine=Halfway, n=3)
    assert [ran for ran in jobs.ran if ran // 10 == 117] == [1170]
    assert [(row["note"], row["sample_index"]) for row in jobs.rows()] == [(i, s) for i in range(20) for s in range(3)]


class FailingSample(FakeEngine):
    """Logits of sample 1 of each row are not finite."""

    def _complete(self, prompt: Any) -> Any:
        from batchinfer.types import ErrorCode, RowError, failed

        for completion in super()._complete(prompt):
            is_bad = completion.sample_index == 1
            yield failed(prompt, RowError(ErrorCode.NON_FINITE_LOGITS, "NaN"), 1) if is_bad else completion


def test_a_failed_sample_is_not_the_whole_row(jobs: Jobs) -> None:
    with pytest.raises(Stop):
        jobs.run(11, engine=FailingSample, n=3)
    summary = jobs.run(engine=FailingSample, n=3)
    assert summary.failed_by_code == {"non_finite_logits": 20}
    assert [row["error"] is not None for row in jobs.rows()] == [False, True, False] * NUM_ROWS


def test_refused_rows_are_journaled_as_such(jobs: Jobs) -> None:
    prompts = [None if i % 3 == 0 else "x" * 600 if i % 3 == 1 else f"row {i}" for i in range(NUM_ROWS)]
    jobs.write(prompt=prompts)
    jobs.stop(n=2)
    summary = jobs.run(n=2)
    assert summary.failed_by_code == {"prompt_null": 7, "prompt_too_long": 7}
    assert summary.num_completions == 7 + 7 + 2 * 6
    assert len(jobs.rows()) == summary.num_completions


def test_too_many_row_errors_stop_the_job_and_a_higher_number_continues_it(jobs: Jobs) -> None:
    jobs.write(prompt=[None if i % 2 else f"row {i}" for i in range(NUM_ROWS)])
    with pytest.raises(RowErrorsError, match=r"4 rows failed \(prompt_null: 4\), --max-row-errors allows 3") as caught:
        jobs.run(max_row_errors=3)
    assert "rows are kept" in caught.value.__notes__[0]
    again = "to continue, run the same command again with a higher --max-row-errors"
    assert caught.value.__notes__[0].endswith(again)
    with pytest.raises(RowErrorsError, match="4 rows failed"):
        jobs.run(max_row_errors=3)
    assert jobs.ran == []
    summary = jobs.run(max_row_errors=10)
    assert summary.failed_by_code == {"prompt_null": 10}
    assert len(jobs.ran) < NUM_ROWS
    assert len(jobs.rows()) == NUM_ROWS


# The disk, the lock, the state


def test_a_full_disk_stops_the_job_and_loses_nothing_that_was_safe(tmp_path: Path) -> None:
    """A limit on the size of files: the write that passes it fails as on a full disk."""
    pid = os.fork()
    if not pid:
        os._exit(_run_with_small_files(tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    said = json.loads((tmp_path / "said.json").read_text())
    assert "File too large" in said["error"]
    assert said["is_no_room"]
    kept = int(said["note"].split()[0])
    assert 0 < kept < NUM_ROWS
    assert "to continue, run the same command again" in said["note"]
    jobs = Jobs(tmp_path / "job")
    jobs.run()
    assert len(jobs.ran) <= NUM_ROWS - kept
    check_whole(jobs)


def _run_with_small_files(folder: Path) -> int:
    import resource

    from batchinfer.output.durable import OutputError

    (folder / "job").mkdir()
    jobs = Jobs(folder / "job")
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_500, 9_500))  # a journal may have about three flushes
    try:
        jobs.run(flush_rows=1)
    except OutputError as error:
        said = {"error": str(error), "is_no_room": error.is_no_room, "note": error.__notes__[0]}
        (folder / "said.json").write_text(json.dumps(said))
        return 0
    return 1


def test_a_lock_is_held_by_one_and_freed_with_its_holder(jobs: Jobs) -> None:
    jobs.stop()
    with JobLock(jobs.state / "lock", jobs.output):
        with pytest.raises(InputError, match=rf"is being written by process {os.getpid()} on .*, since "):
            jobs.run()
        assert job_status(jobs.output).state == "running"
    assert job_status(jobs.output).state == "stopped"
    jobs.run()
    check_whole(jobs)


def test_status_of_a_stopped_and_of_a_finished_job(jobs: Jobs) -> None:
    jobs.write(prompt=[None if i == 13 else f"row {i}" for i in range(NUM_ROWS)])
    for name in ("out", "out.parquet"):
        jobs.output = jobs.folder / name
        jobs.stop()
        status = job_status(jobs.output)
        assert (status.state, status.holder, status.num_rows) == ("stopped", None, NUM_ROWS)
        assert (status.counts.num_rows, status.counts.failed_by_code) == (13, {"prompt_null": 1})
        assert [(window.num_rows_done, window.is_written) for window in status.windows] == [
            (5, True),
            (5, True),
            (3, False),
        ]
        assert "13 of 20 (65.0 %) · truncated: 0 · failed: 1 (prompt_null: 1)" in status.to_text()
        assert json.loads(json.dumps(status.to_dict(), allow_nan=False))["num_rows_done"] == 13
        jobs.run()
        status = job_status(jobs.output)
        assert (status.state, status.counts.num_rows) == ("finished", NUM_ROWS)
        assert status.counts.failed_by_code == {"prompt_null": 1}
        assert status.identity["params"]["seed"] == 0
        assert "finished" in status.to_text()


def test_status_of_nothing(jobs: Jobs) -> None:
    with pytest.raises(InputError, match="there is no job with this output"):
        job_status(jobs.folder / "none")
    with pytest.raises(InputError, match="there is no job with this output"):
        job_status(jobs.prompts)


@pytest.mark.parametrize("name", ["folder", "link"])
def test_a_folder_that_holds_other_things_is_refused(jobs: Jobs, name: str) -> None:
    (jobs.folder / "folder").mkdir()
    (jobs.folder / "folder" / "precious.parquet").write_bytes(b"x")
    (jobs.folder / "link").symlink_to(jobs.folder / "folder")
    jobs.output = jobs.folder / name
    for overwrite in (False, True):
        with pytest.raises(InputError, match=r"holds precious\.parquet, which no job wrote"):
            jobs.run(overwrite=overwrite)
    assert (jobs.folder / "folder" / "precious.parquet").read_bytes() == b"x"


def test_an_output_folder_and_the_input_s_are_apart(jobs: Jobs) -> None:
    with pytest.raises(InputError, match=r"output .*/out lies in the folder of the input .*: choose another folder"):
        jobs.run(prompts=str(jobs.folder))
    jobs.run()
    part = jobs.output / "part-00000.parquet"
    message = r"part-00000\.parquet of the input lies in output .*: choose another folder"
    for prompts in (part, part.with_name("*.parquet")):
        with pytest.raises(InputError, match=message):
            jobs.run(prompts=str(prompts), overwrite=True, output_prefix="again_")
    assert part.exists()


def test_an_empty_folder_may_be_the_output(jobs: Jobs) -> None:
    jobs.output.mkdir()
    jobs.run()
    check_whole(jobs)


def test_overwrite_leaves_nothing_of_the_old_job(jobs: Jobs) -> None:
    jobs.run()
    jobs.run(overwrite=True, limit=7)
    assert sorted(path.name for path in jobs.output.glob("*.parquet")) == ["part-00000.parquet", "part-00001.parquet"]
    assert len(jobs.rows()) == 7


def test_input_columns_of_every_kind_survive_a_break(jobs: Jobs) -> None:
    rng = np.random.default_rng(0)
    words = pa.array(["a", None, "b", "a"] * 5).dictionary_encode()
    columns = {
        "prompt": pa.array([f"row {i}" for i in range(NUM_ROWS)], pa.large_string()),
        "view": pa.array([f"view {i} that is long enough" for i in range(NUM_ROWS)], pa.string_view()),
        "words": words,
        "big": pa.array(rng.integers(2**60, 2**62, NUM_ROWS)),
        "nested": pa.array([[{"a": [i, None]}] * (i % 3) for i in range(NUM_ROWS)]),
    }
    source = pa.table(columns)
    pq.write_table(source, jobs.prompts)
    for name in ("out", "out.parquet"):
        jobs.output = jobs.folder / name
        jobs.stop(n=2)
        os.utime(jobs.prompts, (1, 1))
        jobs.run(n=2)
        found = pq.read_table(jobs.output)
        for column in source.column_names:
            assert found.schema.field(column).type == source.schema.field(column).type
            assert found.column(column).to_pylist()[::2] == source.column(column).to_pylist()


def test_completions_that_are_flushed_are_not_held(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in memory of finished rows is bounded by the flush, not by the window."""
    from batchinfer import job_windows

    held: list[int] = []
    take = job_windows.OpenWindow.take

    def watch(window: job_windows.OpenWindow, completion: Completion) -> bool:
        held.append(len(window.pending))
        return take(window, completion)

    monkeypatch.setattr(job_windows.OpenWindow, "take", watch)
    jobs.run(window=20, flush_rows=4)
    assert max(held) == 3
    assert FinishReason.STOP.value in {row["finish_reason"] for row in jobs.rows()}


def test_flushes_come_with_time_too(jobs: Jobs) -> None:
    with pytest.raises(Stop):
        jobs.run(11, window=20, flush_seconds=0)
    (journal,) = jobs.state.glob("journal-*.bin")
    assert len(read_journal(journal).batches) == 8  # after each row, and not when it broke off alone
