"""A job whose output is OpenAI Batch lines: what it was asked, in its form, whole and once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import FakeEngine, FakeModelSource

from batchinfer.errors import InputError
from batchinfer.job import run_job
from batchinfer.job_status import job_status
from batchinfer.output import durable, store
from batchinfer.settings import job_settings
from batchinfer.summary import JobSummary


class Job:
    def __init__(self, folder: Path) -> None:
        self.output = folder / "results" / "out.jsonl"
        self.output.parent.mkdir()
        self.num_loads = 0
        self.on_row: Callable[[int], None] = lambda row: None

    def run(self, prompts: Path, **flags: Any) -> JobSummary:
        given = {"prompts": str(prompts), "model": "m", "output": str(self.output), **flags}
        return run_job(
            job_settings(given, {}, None),
            engine_factory=self._load,  # type: ignore[arg-type]
            resolve=lambda name: FakeModelSource(),  # type: ignore[arg-type, return-value]
        )

    def _load(self, model: Any, config: Any) -> FakeEngine:
        self.num_loads += 1
        return FakeEngine(model, config, on_row=lambda row: self.on_row(row))

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def requests(path: Path, num_rows: int) -> Path:
    urls = ("/v1/chat/completions", "/v1/completions")
    bodies = [
        {"messages": [{"role": "user", "content": f"row {i}"}], "n": i % 3 + 1, "logprobs": True, "top_logprobs": 1}
        if i % 2 == 0
        else {"prompt": f"row {i}"}
        for i in range(num_rows)
    ]
    lines = [{"custom_id": f"id-{i}", "method": "POST", "url": urls[i % 2], "body": b} for i, b in enumerate(bodies)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def without_ids(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What does not depend on when the job began."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(inner) for key, inner in value.items() if key not in ("id", "request_id", "created")}
        return [strip(inner) for inner in value] if isinstance(value, list) else value

    return strip(lines)


@pytest.mark.parametrize("window", [1, 4, 100])
def test_requests_in_lines_out(job: Job, tmp_path: Path, window: int) -> None:
    summary = job.run(requests(tmp_path / "batch.jsonl", 10), window=window)
    assert (summary.num_rows, summary.num_rows_ok) == (10, 10)
    lines = job.lines()
    assert [line["custom_id"] for line in lines] == [f"id-{i}" for i in range(10)]
    for i, line in enumerate(lines):
        body = line["response"]["body"]
        assert (line["error"], line["response"]["status_code"], body["model"]) == (None, 200, "m")
        if i % 2:
            assert (body["object"], body["choices"][0]["text"]) == ("text_completion", f"row {i}")
            continue
        text = f"user: row {i}\nassistant: "
        assert body["object"] == "chat.completion"
        assert [choice["message"]["content"] for choice in body["choices"]] == [text] * (i % 3 + 1)
        tokens = body["choices"][0]["logprobs"]["content"]
        assert "".join(token["token"] for token in tokens) == text
        assert {token["top_logprobs"][0]["logprob"] for token in tokens} == {-0.5}
        assert body["usage"]["completion_tokens"] == len(text) * (i % 3 + 1)


def test_requests_at_fault_have_their_own_lines(job: Job, tmp_path: Path) -> None:
    path = requests(tmp_path / "batch.jsonl", 2)
    bad = ["no json", json.dumps({"custom_id": "long", "body": {"prompt": "x" * 600}})]
    path.write_text(path.read_text() + "\n".join(bad))
    summary = job.run(path)
    assert summary.num_rows_ok == 2
    unread, long = job.lines()[2:]
    assert (unread["custom_id"], unread["response"]["body"]["error"]["code"]) == (None, "invalid_row")
    assert "batch.jsonl, line 3: not JSON" in unread["response"]["body"]["error"]["message"]
    assert (long["custom_id"], long["error"], long["response"]["status_code"]) == ("long", None, 400)
    assert long["response"]["body"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("window", [3, 100])
def test_a_job_that_was_stopped_goes_on_and_ends_the_same(job: Job, tmp_path: Path, window: int) -> None:
    path = requests(tmp_path / "batch.jsonl", 10)

    def stop(row: int) -> None:
        if row == 5:
            raise KeyboardInterrupt

    job.on_row = stop
    with pytest.raises(KeyboardInterrupt):
        job.run(path, window=window, flush_rows=1)
    assert not job.output.exists()
    job.on_row = lambda row: None
    job.run(path, window=window, flush_rows=1)
    resumed = job.lines()
    job.run(path, window=window, overwrite=True)
    assert without_ids(job.lines()) == without_ids(resumed)
    assert len({line["id"] for line in resumed}) == 10


def test_a_finished_job_is_not_run_again(job: Job, tmp_path: Path) -> None:
    path = requests(tmp_path / "batch.jsonl", 4)
    first = job.run(path)
    before = job.output.read_bytes()
    again = job.run(path)
    assert job.num_loads == 1
    assert (again.num_rows, again.num_rows_ok) == (first.num_rows, first.num_rows_ok)
    assert job.output.read_bytes() == before
    with pytest.raises(InputError, match="max_tokens"):
        job.run(path, max_tokens=3)
    job.output.unlink()
    job.run(path)
    assert job.num_loads == 2
    assert without_ids(job.lines()) == without_ids([json.loads(line) for line in before.splitlines()])


def test_no_part_and_no_journal_is_left(job: Job, tmp_path: Path) -> None:
    job.run(requests(tmp_path / "batch.jsonl", 4), window=2)
    left = sorted(path.name for path in job.output.parent.rglob("*") if path.is_file())
    assert [name for name in left if name.startswith(("part", "journal")) or name.endswith(".tmp")] == []
    assert "out.jsonl" in left


def test_a_file_of_another_job_is_not_replaced(job: Job, tmp_path: Path) -> None:
    job.output.write_text("mine")
    with pytest.raises(InputError, match="exists"):
        job.run(requests(tmp_path / "batch.jsonl", 2))
    assert job.output.read_text() == "mine"
    assert job.num_loads == 0
    job.run(requests(tmp_path / "batch.jsonl", 2), overwrite=True)
    assert len(job.lines()) == 2


def test_prompts_of_a_parquet_file(job: Job, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", None], "key": [7, 8]}), tmp_path / "p.parquet")
    job.run(tmp_path / "p.parquet", id_column="key", output_format="openai")
    assert [line["custom_id"] for line in job.lines()] == ["7", "8"]
    assert [line["response"]["status_code"] for line in job.lines()] == [200, 400]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"output_format": "csv"}, "--output-format must be parquet or openai, got 'csv'"),
        ({"output_format": "parquet"}, r"--output-format parquet needs a folder, or .*as --output, got out\.jsonl"),
        ({"output_format": "openai", "output": "out.parquet"}, r"openai needs a name that ends in \.jsonl as --output"),
        ({"output_format": "openai", "output": "folder"}, r"openai needs a name that ends in \.jsonl as --output"),
    ],
)
def test_a_format_that_does_not_fit_the_name_is_refused(flags: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job_settings({"prompts": "p", "model": "m", "output": "out.jsonl", **flags}, {}, None)


def test_an_input_that_was_touched_since_is_not_taken_for_the_same(job: Job, tmp_path: Path) -> None:
    path = requests(tmp_path / "batch.jsonl", 2)
    job.run(path)
    os.utime(path, ns=(0, 0))
    with pytest.raises(InputError, match="cannot be told whether the input is still what it was made of"):
        job.run(path)
    assert len(job.lines()) == 2


def test_a_file_that_somebody_wrote_over_is_left_alone(job: Job, tmp_path: Path) -> None:
    path = requests(tmp_path / "batch.jsonl", 2)
    job.run(path)
    job.output.write_text("mine")
    with pytest.raises(InputError, match="exists and is not what a job wrote there"):
        job.run(path)
    assert job.output.read_text() == "mine"


def test_status_of_a_finished_and_of_a_stopped_job(job: Job, tmp_path: Path) -> None:
    path = requests(tmp_path / "batch.jsonl", 4)

    def stop(row: int) -> None:
        if row == 2:
            raise KeyboardInterrupt

    job.on_row = stop
    with pytest.raises(KeyboardInterrupt):
        job.run(path, window=2)
    status = job_status(job.output)
    assert (status.state, status.counts.num_rows, status.num_rows) == ("stopped", 3, 4)  # the second window ends first
    job.on_row = lambda row: None
    job.run(path)
    status = job_status(job.output)
    assert (status.state, status.counts.num_rows, status.num_rows) == ("finished", 4, 4)


@pytest.mark.parametrize("step", ["output written", "output synced", "output renamed", "output finished"])
def test_a_job_killed_while_it_ends_goes_on(
    job: Job, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(name: str) -> None:
        if name == step:
            raise Killed

    path = requests(tmp_path / "batch.jsonl", 6)
    for module in (durable, store):
        monkeypatch.setattr(module, "durable_step", kill)
    with pytest.raises(Killed):
        job.run(path, window=2)
    monkeypatch.undo()
    job.run(path, window=2)
    assert job.num_loads == 1
    assert [line["custom_id"] for line in job.lines()] == [f"id-{i}" for i in range(6)]
    left = {file.name for file in job.output.parent.rglob("*") if file.is_file()}
    assert left == {"out.jsonl", "manifest.json", "lock"}
