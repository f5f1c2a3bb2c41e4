"""The writer: rows in input order, nothing lost or shifted, all or nothing on disk."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import InputError
from batchinfer.output import row_groups as groups_module
from batchinfer.output.schema import output_schema
from batchinfer.output.writer import OutputError, ParquetOutput, check_output
from batchinfer.types import ErrorCode, FinishReason


def numbered(num_rows: int) -> pa.Table:
    return pa.table({"id": list(range(num_rows)), "prompt": [f"p{i}" for i in range(num_rows)]})


def write(path: Path, table: pa.Table, completions: list, window: int | None = None, **options) -> pa.Table:
    schema = output_schema(table.schema, **options)
    with ParquetOutput(path, schema) as output:
        window = window or table.num_rows
        for first in range(0, table.num_rows, window):
            part = table.slice(first, window)
            rows = range(first, first + part.num_rows)
            output.write_window(part, first, [c for c in completions if c.row_index in rows])
        output.commit()
    return pq.read_table(path)


@pytest.mark.parametrize("window", [17, 50, 60, 300])
def test_rows_come_in_input_order_whatever_order_they_finish_in(tmp_path: Path, complete, window: int) -> None:
    completions = [complete(row) for row in range(300)]
    random.Random(1).shuffle(completions)
    table = write(tmp_path / "out.parquet", numbered(300), completions, window)
    assert table.column("id").to_pylist() == list(range(300))
    assert table.column("output").to_pylist() == [f"row {row} sample 0" for row in range(300)]
    assert table.column("output_token_ids").to_pylist() == [[row, 0, 7] for row in range(300)]


def test_samples_ascend_and_repeat_their_row(tmp_path: Path, complete, fail) -> None:
    completions = [complete(row, sample) for row in range(12) if row != 5 for sample in range(row % 4 + 1)] + [fail(5)]
    random.Random(2).shuffle(completions)
    table = write(tmp_path / "out.parquet", numbered(12), completions, 5)
    expected = [(row, sample) for row in range(12) for sample in range(1 if row == 5 else row % 4 + 1)]
    assert list(zip(table.column("id").to_pylist(), table.column("sample_index").to_pylist(), strict=True)) == expected
    assert table.column("prompt").to_pylist() == [f"p{row}" for row, _ in expected]
    outputs = [None if row == 5 else f"row {row} sample {sample}" for row, sample in expected]
    assert table.column("output").to_pylist() == outputs


def test_duplicate_input_ids_are_rows_of_their_own(tmp_path: Path, complete) -> None:
    table = write(tmp_path / "out.parquet", pa.table({"id": [7, 7, 8]}), [complete(row) for row in (2, 0, 1)])
    assert table.column("id").to_pylist() == [7, 7, 8]
    assert table.column("output").to_pylist() == [f"row {row} sample 0" for row in range(3)]


def test_what_a_fine_and_a_failed_row_hold(tmp_path: Path, complete, fail) -> None:
    fine = complete(
        0, text="", token_ids=[], finish_reason=FinishReason.LENGTH, stop_reason=13, logprobs=[], top_logprobs=[],
        prompt_logprobs=[None, -0.5],
    )  # fmt: skip
    partial = complete(2, token_ids=[1], logprobs=[-1.0], top_logprobs=[[(1, -1.0)]], stop_reason="x")
    partial.error = fail(2, ErrorCode.NON_FINITE_LOGITS).error
    options = {"logprobs": True, "top_logprobs": True, "prompt_logprobs": True}
    table = write(tmp_path / "out.parquet", numbered(3).select(["id"]), [fine, fail(1), partial], **options)
    first, second, third = table.to_pylist()
    assert first == {
        "id": 0, "sample_index": 0, "output": "", "output_token_ids": [], "finish_reason": "length",
        "stop_reason": "13", "num_prompt_tokens": 5, "num_cached_tokens": 3, "num_output_tokens": 0,
        "logprobs": [], "top_logprobs": [], "prompt_logprobs": [None, -0.5], "error": None,
    }  # fmt: skip
    assert second == {
        "id": 1, "sample_index": 0, "output": None, "output_token_ids": None, "finish_reason": "error",
        "stop_reason": None, "num_prompt_tokens": 0, "num_cached_tokens": 0, "num_output_tokens": 0,
        "logprobs": None, "top_logprobs": None, "prompt_logprobs": None,
        "error": {"code": "prompt_null", "message": "row 1 cannot run"},
    }  # fmt: skip
    assert third["error"]["code"] == "non_finite_logits"
    assert (third["output"], third["output_token_ids"], third["logprobs"], third["stop_reason"]) == (None,) * 4
    assert (third["num_prompt_tokens"], third["num_output_tokens"]) == (5, 0)


def test_logprobs_keep_infinities_and_their_lengths(tmp_path: Path, complete) -> None:
    top = [[(5, -0.25), (6, -math.inf)], [], [(7, -1.5)]]
    completions = [
        complete(0, token_ids=[5, 6, 7], logprobs=[-0.25, -math.inf, math.nan], top_logprobs=top),
        complete(1, token_ids=[8], logprobs=None),
        complete(2, token_ids=[9], logprobs=[-2.0], top_logprobs=[[(9, -2.0)]]),
    ]
    table = write(tmp_path / "out.parquet", numbered(3), completions, logprobs=True, top_logprobs=True)
    logprobs = table.column("logprobs").to_pylist()
    assert logprobs[0][:2] == [-0.25, -math.inf]
    assert math.isnan(logprobs[0][2])
    assert logprobs[1:] == [None, [-2.0]]
    assert table.column("top_logprobs").to_pylist() == [
        [[{"token_id": i, "logprob": p} for i, p in pairs] for pairs in top],
        None,
        [[{"token_id": 9, "logprob": -2.0}]],
    ]


def test_a_prefix_reaches_the_file_and_an_output_can_be_an_input(tmp_path: Path, complete) -> None:
    first = write(tmp_path / "1.parquet", numbered(4), [complete(row) for row in range(4)])
    again = [complete(row, text=f"again {row}") for row in range(4)]
    table = write(tmp_path / "2.parquet", first, again, prefix="second_")
    assert table.select(first.column_names).equals(first)
    assert table.column("second_output").to_pylist() == [f"again {row}" for row in range(4)]


@pytest.mark.parametrize("wrong", ["missing row", "missing sample", "twice", "stranger"])
def test_a_row_without_its_completions_is_an_assertion(tmp_path: Path, complete, wrong: str) -> None:
    completions = [complete(0), complete(1, 0), complete(1, 1), complete(2)]
    completions = {
        "missing row": completions[1:],
        "missing sample": [completions[0], *completions[2:]],
        "twice": [*completions, complete(0)],
        "stranger": [*completions, complete(3)],
    }[wrong]
    with (
        ParquetOutput(tmp_path / "out.parquet", output_schema(numbered(3).schema)) as output,
        pytest.raises(AssertionError),
    ):
        output.write_window(numbered(3), 0, completions)
    assert list(tmp_path.iterdir()) == []


def test_windows_must_follow_each_other(tmp_path: Path, complete) -> None:
    with ParquetOutput(tmp_path / "out.parquet", output_schema(numbered(1).schema)) as output:
        output.write_window(numbered(1), 0, [complete(0)])
        with pytest.raises(AssertionError, match="rows from 1 are next, got 0"):
            output.write_window(numbered(1), 0, [complete(0)])


# Metadata


def test_metadata_of_start_and_finish(tmp_path: Path, complete) -> None:
    table = numbered(1).replace_schema_metadata({"own": "x"})
    path = tmp_path / "out.parquet"
    with ParquetOutput(path, output_schema(table.schema, metadata={"batchinfer": '{"model": "m"}'})) as output:
        output.write_window(table, 0, [complete(0)])
        output.commit({"batchinfer": '{"model": "m", "rows": 1}', "more": "ü"})
    expected = {b"own": b"x", b"batchinfer": b'{"model": "m", "rows": 1}', b"more": "ü".encode()}
    assert pq.read_schema(path).metadata == expected
    assert pq.read_table(path).schema.metadata == expected
    in_file = pq.ParquetFile(path).metadata.metadata
    assert {key: in_file[key] for key in expected} == expected
    assert pq.read_schema(path).names[:2] == ["id", "prompt"]


def test_a_hugging_face_dataset_comes_back_with_its_features(tmp_path: Path, complete, fail) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "chat": [{"role": datasets.Value("string")}],
            "matrix": datasets.Array2D((2, 2), "int32"),
        }
    )
    rows = {"label": [0, 1, 1], "chat": [[{"role": "user"}], [], None], "matrix": [[[i, 1], [2, 3]] for i in range(3)]}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    path = tmp_path / "out.parquet"
    scored = complete(0, logprobs=[-1.0] * 3, top_logprobs=[[(1, -1.0)]] * 3)
    completions = [scored, fail(1), complete(2), complete(2, 1)]
    schema = output_schema(dataset.features.arrow_schema, logprobs=True, top_logprobs=True)
    with ParquetOutput(path, schema) as output:
        output.write_window(dataset.with_format("arrow")[:], 0, completions)
        output.commit({"batchinfer": "{}"})
    loaded = datasets.load_dataset(
        "parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"), keep_in_memory=True
    )
    assert loaded.features["label"] == features["label"]
    assert {name: loaded.features[name] for name in features} == features
    assert loaded.features["top_logprobs"] == datasets.List(
        datasets.List({"token_id": datasets.Value("int32"), "logprob": datasets.Value("float32")})
    )
    assert list(loaded["output"]) == ["row 0 sample 0", None, "row 2 sample 0", "row 2 sample 1"]
    assert [error and error["code"] for error in loaded["error"]] == [None, "prompt_null", None, None]
    assert list(loaded["matrix"]) == [[[i, 1], [2, 3]] for i in (0, 1, 2, 2)]


def test_pandas_reads_it(tmp_path: Path, complete) -> None:
    import pandas as pd

    frame = pd.DataFrame({"prompt": ["a", "b"]}, index=pd.Index([5, 6], name="key"))
    table = pa.Table.from_pandas(frame)
    write(tmp_path / "out.parquet", table, [complete(0, 0), complete(0, 1), complete(1)])
    loaded = pd.read_parquet(tmp_path / "out.parquet")
    assert loaded.index.tolist() == [5, 5, 6]
    assert loaded["output"].tolist() == ["row 0 sample 0", "row 0 sample 1", "row 1 sample 0"]


# Row groups


def test_row_groups_are_bounded_in_bytes_and_rows(tmp_path: Path, complete, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "GROUP_BYTES", 100_000)
    monkeypatch.setattr(groups_module, "_MIN_GROUP_ROWS", 4)
    table = pa.table({"messages": [[{"role": "user", "content": "x" * 2000}]] * 200, "id": list(range(200))})
    completions = [complete(row, sample) for row in range(200) for sample in range(3)]
    read = write(tmp_path / "out.parquet", table, completions)
    assert read.column("id").to_pylist() == [row for row in range(200) for _ in range(3)]
    file = pq.ParquetFile(tmp_path / "out.parquet")
    assert 12 <= file.num_row_groups <= 40
    monkeypatch.setattr(groups_module, "GROUP_BYTES", 2**27)
    monkeypatch.setattr(groups_module, "GROUP_ROWS", 100)
    write(tmp_path / "rows.parquet", table, completions)
    assert pq.ParquetFile(tmp_path / "rows.parquet").num_row_groups == 8


def test_small_windows_are_one_row_group(tmp_path: Path, complete) -> None:
    write(tmp_path / "out.parquet", numbered(1000), [complete(row) for row in range(1000)])
    assert pq.ParquetFile(tmp_path / "out.parquet").num_row_groups == 1


@pytest.mark.slow
def test_more_than_two_gib_of_text(tmp_path: Path, complete) -> None:
    chunk = pa.array(["x" * 1_000_000] * 400)
    table = pa.table({"id": list(range(1200)), "prompt": pa.chunked_array([chunk] * 3)})
    completions = [complete(row, sample) for row in range(1200) for sample in range(2)]
    with ParquetOutput(tmp_path / "out.parquet", output_schema(table.schema)) as output:
        output.write_window(table, 0, completions)
        output.commit()
    file = pq.ParquetFile(tmp_path / "out.parquet")
    num_rows = 0
    for batch in file.iter_batches(64):
        assert batch.column("id").to_pylist() == [(num_rows + i) // 2 for i in range(batch.num_rows)]
        assert set(pa.compute.binary_length(batch.column("prompt")).to_pylist()) == {1_000_000}
        num_rows += batch.num_rows
    assert num_rows == 2400


# All or nothing


def test_nothing_is_there_until_commit(tmp_path: Path, complete) -> None:
    path = tmp_path / "out.parquet"
    with ParquetOutput(path, output_schema(numbered(1).schema)) as output:
        output.write_window(numbered(1), 0, [complete(0)])
        assert not path.exists()
        assert all(file.name.startswith(".") for file in tmp_path.iterdir())
        output.commit()
        assert path.exists()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, None])
def test_leaving_without_commit_leaves_nothing(tmp_path: Path, complete, error: type[BaseException] | None) -> None:
    path = tmp_path / "out.parquet"

    def job() -> None:
        with ParquetOutput(path, output_schema(numbered(1).schema)) as output:
            output.write_window(numbered(1), 0, [complete(0)])
            if error:
                raise error

    if error:
        with pytest.raises(error):
            job()
    else:
        job()
    assert list(tmp_path.iterdir()) == []


def test_an_old_file_stays_until_the_new_one_is_whole(tmp_path: Path, complete) -> None:
    path = tmp_path / "out.parquet"
    path.write_text("old")
    with pytest.raises(InputError, match=r"out\.parquet exists: choose another name or give --overwrite"):
        ParquetOutput(path, output_schema(numbered(1).schema))
    with ParquetOutput(path, output_schema(numbered(1).schema), overwrite=True) as output:
        output.write_window(numbered(1), 0, [complete(0)])
        assert path.read_text() == "old"
    assert path.read_text() == "old"
    with ParquetOutput(path, output_schema(numbered(1).schema), overwrite=True) as output:
        output.write_window(numbered(1), 0, [complete(0)])
        output.commit()
    assert pq.read_table(path).num_rows == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_appears_meanwhile_is_kept_and_so_is_the_work(tmp_path: Path, complete) -> None:
    path = tmp_path / "out.parquet"
    with ParquetOutput(path, output_schema(numbered(1).schema)) as output:
        output.write_window(numbered(1), 0, [complete(0)])
        path.write_text("other")
        with pytest.raises(InputError, match=r"appeared meanwhile and is left alone; this run is .*\.tmp"):
            output.commit()
    assert path.read_text() == "other"
    (kept,) = (file for file in tmp_path.iterdir() if file != path)
    assert pq.read_table(kept).num_rows == 1


def test_a_symbolic_link_is_followed(tmp_path: Path, complete) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "out.parquet"
    link.symlink_to(tmp_path / "real" / "out.parquet")
    write(link, numbered(1), [complete(0)])
    assert link.is_symlink()
    assert pq.read_table(tmp_path / "real" / "out.parquet").num_rows == 1


def test_a_failed_write_names_the_path_and_leaves_nothing(
    tmp_path: Path, complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.parquet"

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with ParquetOutput(path, output_schema(numbered(1).schema)) as output:
        monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
        with pytest.raises(OutputError, match=r"cannot write .*out\.parquet: No space left on device"):
            output.write_window(numbered(1), 0, [complete(0)])
    assert list(tmp_path.iterdir()) == []


def test_a_failed_sync_names_the_path_and_leaves_nothing(
    tmp_path: Path, complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with ParquetOutput(tmp_path / "out.parquet", output_schema(numbered(1).schema)) as output:
        output.write_window(numbered(1), 0, [complete(0)])
        monkeypatch.setattr(os, "fsync", broken)
        with pytest.raises(OutputError, match=r"cannot write .*out\.parquet: Input/output error"):
            output.commit()
    assert list(tmp_path.iterdir()) == []


# What is refused before any work


def test_outputs_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"is a folder: name a file in it, such as .*out\.parquet"):
        check_output(tmp_path)
    with pytest.raises(InputError, match=r"folder .*nope of output .*x\.parquet does not exist: make it first"):
        check_output(tmp_path / "nope" / "x.parquet")
    with pytest.raises(InputError, match=r"file is not a folder"):
        check_output(tmp_path / "file" / "x.parquet")
    with pytest.raises(InputError, match="exists: choose another name or give --overwrite"):
        check_output(tmp_path / "file")
    check_output(tmp_path / "file", overwrite=True)
    check_output(str(tmp_path / "new.parquet"))
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody may write to")
def test_a_folder_that_cannot_be_written_to() -> None:
    with pytest.raises(InputError, match=r"cannot write to folder /proc of output /proc/out\.parquet"):
        check_output("/proc/out.parquet")


def test_an_input_file_can_be_its_own_output(tmp_path: Path, complete) -> None:
    from batchinfer.dataset.source import open_source

    path = tmp_path / "rows.parquet"
    pq.write_table(numbered(10), path, row_group_size=3)
    source = open_source(str(path))
    with ParquetOutput(path, output_schema(source.schema), overwrite=True) as output:
        for first, window in enumerate(source.windows(1)):
            output.write_window(window, first, [complete(first)])
        output.commit()
    assert pq.read_table(path).column("output").to_pylist() == [f"row {row} sample 0" for row in range(10)]
    assert json.loads(json.dumps(pq.read_table(path).column("id").to_pylist())) == list(range(10))
