"""Faulty inputs of a job: refused by name before the model loads, or errors of their rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import FakeEngine, FakeModelSource

from batchinfer.errors import InputError
from batchinfer.job import run_job
from batchinfer.job_input import JobError
from batchinfer.settings import job_settings
from batchinfer.summary import JobSummary


class Job:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "results" / "out.parquet"
        self.output.parent.mkdir()
        self.num_loads = 0

    def run(self, prompts: Path | str, **flags: Any) -> JobSummary:
        given = {"prompts": str(prompts), "model": "m", "output": str(self.output), **flags}
        return run_job(
            job_settings(given, {}, None),
            engine_factory=self._load,  # type: ignore[arg-type]
            resolve=lambda name: FakeModelSource(),  # type: ignore[arg-type, return-value]
        )

    def _load(self, model: Any, config: Any) -> FakeEngine:
        self.num_loads += 1
        return FakeEngine(model, config)

    def rows(self) -> list[dict[str, Any]]:
        return pq.read_table(self.output).to_pylist()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def parquet(path: Path, num_rows: int = 100, **options: Any) -> Path:
    table = pa.table({"id": range(num_rows), "prompt": [f"p{i}" for i in range(num_rows)]})
    pq.write_table(table, path, **options)
    return path


def empty_file(folder: Path) -> Path:
    (folder / "a.parquet").touch()
    return folder / "a.parquet"


def cut_file(folder: Path) -> Path:
    path = parquet(folder / "a.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    return path


def other_magic(folder: Path) -> Path:
    path = parquet(folder / "a.parquet")
    path.write_bytes(b"PK\x03\x04" + path.read_bytes()[4:])
    return path


def folder_without_data(folder: Path) -> Path:
    (folder / "data").mkdir()
    (folder / "data" / "readme.txt").write_text("x")
    return folder / "data"


def a_bad_file_among_good_ones(folder: Path) -> Path:
    (folder / "data").mkdir()
    parquet(folder / "data" / "a.parquet")
    (folder / "data" / "b.parquet").touch()
    return folder / "data"


def another_schema(folder: Path) -> Path:
    (folder / "data").mkdir()
    parquet(folder / "data" / "a.parquet")
    pq.write_table(pa.table({"id": ["x"], "prompt": ["y"]}), folder / "data" / "b.parquet")
    return folder / "data"


def no_rows(folder: Path) -> Path:
    return parquet(folder / "a.parquet", 0)


def empty_lines(folder: Path) -> Path:
    (folder / "a.jsonl").write_text("\n\n")
    return folder / "a.jsonl"


def no_json(folder: Path) -> Path:
    (folder / "a.jsonl").write_text("id,prompt\n1,hello\n")
    return folder / "a.jsonl"


def mixed_types(folder: Path) -> Path:
    (folder / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": 2}\n')
    return folder / "a.jsonl"


def a_damaged_first_page(folder: Path) -> Path:
    path = parquet(folder / "a.parquet")
    data = bytearray(path.read_bytes())
    data[4:300] = b"\xff" * 296
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (empty_file, r"a\.parquet is empty \(0 bytes\)"),
        (cut_file, r"a\.parquet is cut short or damaged"),
        (other_magic, r"a\.parquet is not a Parquet file"),
        (folder_without_data, r"data holds no \*\.parquet file"),
        (a_bad_file_among_good_ones, r"b\.parquet is empty"),
        (another_schema, r"column 'id' has type string in .*b\.parquet and int64 in .*a\.parquet"),
        (no_rows, r"a\.parquet has no rows"),
        (empty_lines, r"a\.jsonl has no rows"),
        (no_json, r"a\.jsonl is not JSON Lines.*line 1: not JSON"),
        (mixed_types, r"a\.jsonl, line 2: 'prompt' is a number here and a string in line 1"),
        (a_damaged_first_page, r"cannot read .*a\.parquet from row 0 on \(row group 0\)"),
        (lambda folder: folder / "none.parquet", r"none\.parquet does not exist"),
    ],
)
def test_what_cannot_be_read_is_refused_before_the_model_loads(
    job: Job, tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    source = make(tmp_path)
    with pytest.raises(InputError, match=message):
        job.run(source)
    assert job.num_loads == 0
    assert list(job.output.parent.iterdir()) == []


@pytest.mark.parametrize("window", [1, 2, 100])
def test_bad_lines_are_row_errors_and_the_run_goes_on(job: Job, tmp_path: Path, window: int) -> None:
    lines = [
        b'{"id": 1, "prompt": "one"}',
        b'{"id": 2, "prompt": "\xff"}',
        b'{"id": 3, "prompt": "three"}',
        b'{"id": 4, "prompt": ',
        b'{"id": 5, "prompt": "\\ud83d"}',
        b'{"id": 6, "prompt": null}',
        b'{"id": 7, "prompt": "' + b"x" * 1_000_000 + b'"}',
        b'{"id": 8, "prompt": "eight"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    summary = job.run(path, window=window)
    rows = job.rows()
    assert [row["id"] for row in rows] == [1, None, 3, None, 5, 6, 7, 8]
    assert [row["output"] for row in rows] == ["one", None, "three", None, None, None, None, "eight"]
    codes = [None, "invalid_row", None, "invalid_row", "invalid_row", "prompt_null", "prompt_too_long", None]
    assert [row["error"] and row["error"]["code"] for row in rows] == codes
    assert rows[1]["error"]["message"] == f"{path}, line 2: not UTF-8 at byte 21 of the line"
    assert rows[3]["error"]["message"].startswith(f"{path}, line 4: not JSON: ")
    assert rows[4]["error"]["message"].startswith(f"{path}, line 5: 'prompt' holds half of a surrogate pair")
    assert (summary.num_rows, summary.num_rows_ok) == (8, 3)


def test_a_page_that_is_damaged_in_the_middle_stops_the_job_and_keeps_what_was_done(job: Job, tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", 1000, row_group_size=100, use_dictionary=False)
    whole = path.read_bytes()
    column = pq.read_metadata(path).row_group(7).column(1)
    damaged = bytearray(whole)
    damaged[column.data_page_offset : column.data_page_offset + 60] = b"\xff" * 60
    path.write_bytes(damaged)
    with pytest.raises(JobError, match=r"cannot read .*a\.parquet from row 700 on \(row group 7\)") as error:
        job.run(path, window=100)
    assert any("700" in note for note in error.value.__notes__)  # rows that are kept
    path.write_bytes(whole)
    job.run(path, window=100)
    assert [(row["id"], row["output"]) for row in job.rows()] == [(i, f"p{i}") for i in range(1000)]


def test_a_page_that_is_damaged_where_no_prompt_is_stops_the_job_when_its_rows_are_written(
    job: Job, tmp_path: Path
) -> None:
    table = pa.table({"prompt": [f"p{i}" for i in range(300)], "more": [f"{i} more" for i in range(300)]})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=100, use_dictionary=False)
    column = pq.read_metadata(path).row_group(1).column(1)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[column.data_page_offset : column.data_page_offset + 60] = b"\xff" * 60
    path.write_bytes(damaged)
    with pytest.raises(JobError, match=r"cannot read .*a\.parquet from row 100 on \(row group 1\)"):
        job.run(path, window=100)
    path.write_bytes(whole)
    job.run(path, window=100)
    assert [row["more"] for row in job.rows()] == table.column("more").to_pylist()


def test_requests_of_a_batch_that_cannot_be_read_are_row_errors(job: Job, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]}
    lines = [json.dumps({"custom_id": str(i), "body": body}) for i in range(2)]
    lines += ["not json", json.dumps({"custom_id": 7, "body": body}), json.dumps({"custom_id": "i", "body": image})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    job.run(tmp_path / "a.jsonl")
    rows = job.rows()
    assert [row["custom_id"] for row in rows] == ["0", "1", None, None, "i"]
    codes = [None, None, "invalid_row", "invalid_row", "invalid_image"]
    assert [row["error"] and row["error"]["code"] for row in rows] == codes
