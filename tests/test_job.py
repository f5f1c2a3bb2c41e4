"""A job from source to output, with an engine that echoes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import FakeEngine, FakeModelSource

from batchinfer.config import EngineConfig
from batchinfer.errors import InputError
from batchinfer.interrupt import Interrupted
from batchinfer.job import run_job
from batchinfer.progress import Snapshot
from batchinfer.settings import job_settings
from batchinfer.summary import JobSummary


def parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


class Job:
    """Runs jobs in one folder and keeps the last engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "out.parquet"
        self.model = FakeModelSource()
        self.on_row: Callable[[int], None] = lambda row: None
        self.num_loads = 0
        self.engine: FakeEngine | None = None

    def run(self, prompts: Path, window_rows: int = 65_536, progress: Any = None, **flags: Any) -> JobSummary:
        settings = job_settings({"prompts": str(prompts), "model": "m", "output": str(self.output), **flags}, {}, None)
        return run_job(
            settings, progress, engine_factory=self._load, resolve=lambda name: self.model, window_rows=window_rows
        )

    def rows(self) -> list[dict[str, Any]]:
        return pq.read_table(self.output).to_pylist()

    def metadata(self) -> dict[str, Any]:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(pq.read_metadata(self.output).metadata[b"batchinfer"], parse_constant=refuse)

    def _load(self, model: Any, config: EngineConfig) -> FakeEngine:
        self.num_loads += 1
        self.engine = FakeEngine(model, config, on_row=lambda row: self.on_row(row))
        return self.engine


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.parametrize("window_rows", [1, 7, 299, 300, 1000])
def test_output_is_in_input_order_whatever_order_rows_finish_in(job: Job, tmp_path: Path, window_rows: int) -> None:
    prompts = [f"{'x' * (i * 37 % 50)} row {i}" for i in range(300)]
    source = parquet(tmp_path / "p.parquet", id=[str(i) for i in range(300)], prompt=prompts)
    summary = job.run(source, window_rows, max_tokens=100)
    rows = job.rows()
    assert [row["id"] for row in rows] == [str(i) for i in range(300)]
    assert [row["output"] for row in rows] == prompts
    assert (summary.num_rows, summary.num_rows_ok) == (300, 300)
    assert summary.num_prompt_tokens == sum(map(len, prompts))


def test_input_columns_are_kept_and_samples_follow_each_other(job: Job, tmp_path: Path) -> None:
    source = parquet(tmp_path / "p.parquet", prompt=["one", "two"], big=[2**60 + 1, None], tags=[["a"], []])
    job.run(source, n=3, seed=7)
    rows = job.rows()
    assert [(row["prompt"], row["sample_index"]) for row in rows] == [(p, s) for p in ("one", "two") for s in range(3)]
    assert [row["big"] for row in rows] == [2**60 + 1] * 3 + [None] * 3
    assert [row["tags"] for row in rows] == [["a"]] * 3 + [[]] * 3


def test_truncated_rows_are_counted_and_say_length(job: Job, tmp_path: Path) -> None:
    summary = job.run(parquet(tmp_path / "p.parquet", prompt=["12345", "123456"]), max_tokens=5)
    assert [row["finish_reason"] for row in job.rows()] == ["stop", "length"]
    assert (summary.num_rows_ok, summary.num_rows_truncated) == (2, 1)
    assert "truncated: 1" in summary.to_text()


def test_bad_rows_are_row_errors_and_the_run_goes_on(job: Job, tmp_path: Path) -> None:
    source = parquet(tmp_path / "p.parquet", prompt=["fine", None, "", "x" * 600, "also fine"])
    summary = job.run(source)
    rows = job.rows()
    assert [row["output"] for row in rows] == ["fine", None, None, None, "also fine"]
    codes = [row["error"] and row["error"]["code"] for row in rows]
    assert codes == [None, "prompt_null", "prompt_empty", "prompt_too_long", None]
    assert summary.failed_by_code == {"prompt_empty": 1, "prompt_null": 1, "prompt_too_long": 1}
    assert (summary.exit_code(strict=False), summary.exit_code(strict=True)) == (0, 3)


def test_nothing_succeeded_is_exit_code_1_and_the_file_is_there(job: Job, tmp_path: Path) -> None:
    summary = job.run(parquet(tmp_path / "p.parquet", prompt=["", ""]))
    assert summary.exit_code(strict=False) == 1
    assert len(job.rows()) == 2


def test_limit_takes_the_first_rows(job: Job, tmp_path: Path) -> None:
    assert job.run(parquet(tmp_path / "p.parquet", prompt=list("abc")), limit=2).num_rows == 2
    assert [row["prompt"] for row in job.rows()] == ["a", "b"]


def test_model_defaults_row_values_and_flags_reach_the_engine_and_the_metadata(job: Job, tmp_path: Path) -> None:
    job.model.generation_defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    source = parquet(
        tmp_path / "p.parquet", prompt=["a", "b"], sampling_params=[{"temperature": 0.25}, {"temperature": None}]
    )
    job.run(source, top_p=0.5)
    assert job.engine is not None
    assert [prompt.params.temperature for prompt in job.engine.prompts] == [0.25, 0.6]
    assert {prompt.params.top_p for prompt in job.engine.prompts} == {0.5}
    params = job.metadata()["params"]
    assert params["temperature"] == {
        "value": None,
        "origin": "row",
        "if_null": {"value": 0.6, "origin": "model"},
    }
    assert params["top_p"] == {"value": 0.5, "origin": "flag"}
    assert params["top_k"] == {"value": 20, "origin": "model"}
    assert params["max_tokens"] == {"value": 1024, "origin": "default"}


def test_metadata_says_what_made_the_file(job: Job, tmp_path: Path) -> None:
    source = parquet(tmp_path / "p.parquet", text=["ab", "abc"], custom_id=["x", "y"])
    job.run(source, logprobs=0, logprobs_mode="processed", block_size=16)
    metadata = job.metadata()
    assert metadata["version"]
    assert metadata["created"].endswith("+00:00")
    described = {"name": "fake", "adapter": None, "format": "hf", "architecture": "LlamaForCausalLM"}
    assert metadata["model"] == described
    assert metadata["digests"]["model"] == "model-digest"
    assert metadata["digests"]["tokenizer"] == "tokenizer-digest"
    assert len(metadata["digests"]["chat_template"]) == 64
    assert metadata["logprobs"]["mode"] == "processed"
    assert "after penalties" in metadata["logprobs"]["definition"]
    assert metadata["logprobs"]["head_dtype"] == "float32"
    assert metadata["engine"]["block_size"] == 16
    assert metadata["input"]["columns"] == {"prompt": "text", "id": "custom_id"}
    assert metadata["input"]["prompts"] == str(source)
    assert metadata["counts"]["num_output_tokens"] == 5
    assert metadata["counts"]["num_rows_ok"] == 2


@pytest.mark.parametrize(
    ("flags", "columns"),
    [
        ({}, set()),
        ({"logprobs": 0}, {"logprobs"}),
        ({"logprobs": 2}, {"logprobs", "top_logprobs"}),
        ({"prompt_logprobs": True}, {"prompt_logprobs"}),
    ],
)
def test_logprob_columns_are_there_when_asked_for(
    job: Job, tmp_path: Path, flags: dict[str, Any], columns: set[str]
) -> None:
    job.run(parquet(tmp_path / "p.parquet", prompt=["ab"]), **flags)
    assert {name for name in pq.read_schema(job.output).names if "logprobs" in name} == columns


def test_a_row_can_ask_for_logprobs(job: Job, tmp_path: Path) -> None:
    source = parquet(tmp_path / "p.parquet", prompt=["ab", "c"], sampling_params=[{"logprobs": None}, {"logprobs": 1}])
    job.run(source)
    assert [row["logprobs"] for row in job.rows()] == [None, [-0.5]]
    assert [row["top_logprobs"] for row in job.rows()] == [None, [[{"token_id": ord("c"), "logprob": -0.5}]]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"policy": "priority"}, "--policy priority needs --priority-column"),
        ({"max_model_len": 4096}, "--max-model-len 4096 is above the 512 tokens"),
        ({"min_tokens": 2000}, "min_tokens (2000) is above max_tokens (1024)"),
        ({"prompt_column": "nope"}, "nope"),
        ({"output_prefix": "p_"}, "--output-prefix"),
    ],
)
def test_what_cannot_work_is_refused_before_the_weights_load(
    job: Job, tmp_path: Path, flags: dict[str, Any], message: str
) -> None:
    source = parquet(tmp_path / "p.parquet", prompt=["ab"], p_output=["taken"])
    with pytest.raises(InputError) as caught:
        job.run(source, **flags)
    assert message in str(caught.value)
    assert job.num_loads == 0
    assert not job.output.exists()


def test_no_rows_is_an_error_before_the_weights_load(job: Job, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no rows"):
        job.run(parquet(tmp_path / "p.parquet", prompt=pa.array([], pa.string())))
    assert job.num_loads == 0


def test_a_model_that_may_not_be_read_is_refused_by_name(job: Job, tmp_path: Path) -> None:
    def resolve(name: str) -> Any:
        raise PermissionError(13, "Permission denied", "m/config.json")

    settings = job_settings(
        {"prompts": str(parquet(tmp_path / "p.parquet", prompt=["a"])), "model": "m", "output": str(job.output)},
        {},
        None,
    )
    with pytest.raises(InputError, match=r"^cannot read model m: Permission denied \(m/config\.json\)"):
        run_job(settings, resolve=resolve)


def test_an_output_that_may_not_be_looked_at_is_refused_by_name(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(path: Path, overwrite: bool) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("batchinfer.output.place.check_output", check)
    with pytest.raises(InputError, match=r"^cannot write output .*out\.parquet: Permission denied"):
        job.run(parquet(tmp_path / "p.parquet", prompt=["a"]))


def test_an_existing_output_is_kept_unless_overwrite(job: Job, tmp_path: Path) -> None:
    source = parquet(tmp_path / "p.parquet", prompt=["ab"])
    job.output.write_bytes(b"precious")
    with pytest.raises(InputError, match="--overwrite"):
        job.run(source)
    assert job.output.read_bytes() == b"precious"
    job.run(source, overwrite=True)
    assert len(job.rows()) == 1


@pytest.mark.parametrize("given", ["in.parquet", ".", "*.parquet", "link.parquet"])
def test_an_output_is_never_a_file_of_the_input(job: Job, tmp_path: Path, given: str) -> None:
    source = parquet(tmp_path / "in.parquet", prompt=["a"])
    before = source.read_bytes()
    (tmp_path / "link.parquet").symlink_to(source)
    with pytest.raises(InputError, match=r"output .*in\.parquet is a file of the input .*: choose another name"):
        job.run(tmp_path / given, output=str(source), overwrite=True)
    assert source.read_bytes() == before
    assert job.num_loads == 0


@pytest.mark.parametrize("error", [RuntimeError("device lost"), Interrupted(2)])
def test_a_job_that_breaks_off_keeps_what_was_done_and_frees_the_engine(
    job: Job, tmp_path: Path, error: BaseException
) -> None:
    def on_row(row: int) -> None:
        if row == 5:
            raise error

    job.on_row = on_row
    source = parquet(tmp_path / "p.parquet", prompt=list("abcdefgh"))
    with pytest.raises(type(error)) as caught:
        job.run(source, window_rows=4)
    folder = tmp_path / ".out.parquet.batchinfer"
    note = f"6 of 8 rows are kept in {folder}: to continue, run the same command again"
    assert caught.value.__notes__ == [note]
    assert not job.output.exists()
    assert job.engine is not None
    assert job.engine.num_runs_closed == 1
    job.on_row = lambda row: None
    summary = job.run(source)
    assert (summary.num_rows_ok, summary.num_rows_earlier) == (8, 6)
    assert [row["output"] for row in job.rows()] == list("abcdefgh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "p.parquet"]


@pytest.mark.parametrize("output", ["out.parquet", "out"])
def test_a_job_that_breaks_off_before_its_first_row_leaves_nothing(job: Job, tmp_path: Path, output: str) -> None:
    def on_row(row: int) -> None:
        raise RuntimeError("device lost")

    job.on_row = on_row
    source = parquet(tmp_path / "p.parquet", prompt=list("ab"))
    with pytest.raises(RuntimeError) as caught:
        job.run(source, output=str(tmp_path / output))
    assert caught.value.__notes__ == [f"nothing was written to {tmp_path / output}"]
    assert [path.name for path in tmp_path.iterdir()] == ["p.parquet"]


def test_a_job_that_breaks_off_leaves_the_file_that_was_to_be_replaced(job: Job, tmp_path: Path) -> None:
    def on_row(row: int) -> None:
        raise RuntimeError("device lost")

    job.on_row = on_row
    job.output.write_bytes(b"precious")
    with pytest.raises(RuntimeError):
        job.run(parquet(tmp_path / "p.parquet", prompt=["a"]), overwrite=True)
    assert job.output.read_bytes() == b"precious"


def test_progress_sees_every_step_of_every_window(job: Job, tmp_path: Path) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.stages: list[str] = []
            self.rows_done: list[int] = []

        def stage(self, text: str) -> None:
            self.stages.append(text)

        def update(self, snapshot: Snapshot) -> None:
            assert snapshot.num_rows == 5
            self.rows_done.append(snapshot.num_rows_done)

        def close(self) -> None:
            pass

    recorder = Recorder()
    source = parquet(tmp_path / "p.parquet", prompt=list("abcde"))
    job.run(source, window_rows=2, progress=recorder)
    assert recorder.rows_done == [1, 2, 3, 4, 5]
    assert recorder.stages == ["loading m", f"running {source}"]


def test_seconds_are_told_by_stage(job: Job, tmp_path: Path) -> None:
    summary = job.run(parquet(tmp_path / "p.parquet", prompt=["ab"]))
    assert set(summary.seconds) == {"load", "read", "plan", "run", "journal", "write"}
    assert all(value >= 0 for value in summary.seconds.values())
