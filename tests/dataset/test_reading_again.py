"""Windows hold only what prompts are made of; all columns come again, unchanged, when the rows are written."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.dataset.columns import InputColumns
from batchinfer.dataset.source import PromptSource, from_dataset, open_source
from batchinfer.dataset.windows import input_windows
from batchinfer.errors import InputError

NUM_ROWS = 97


def table_of(num_rows: int = NUM_ROWS) -> pa.Table:
    struct = pa.struct([("x", pa.int64()), ("y", pa.list_(pa.string()))])
    schema = pa.schema(
        [
            ("a.b", pa.int64()),
            ("prompt", pa.string()),
            ("a", pa.struct([("b", pa.int64()), ("c", pa.string())])),
            ("wide", pa.large_binary()),
            ("id", pa.int32()),
            ("nested", pa.list_(struct)),
        ]
    )
    rows = [
        {
            "a.b": i,
            "prompt": None if i % 7 == 3 else f"p{i}",
            "a": None if i % 5 == 0 else {"b": -i, "c": str(i)},
            "wide": bytes([i % 256]) * 50,
            "id": i,
            "nested": [{"x": i, "y": [None, "z"]}] * (i % 3),
        }
        for i in range(num_rows)
    ]
    return pa.Table.from_pylist(rows, schema=schema).replace_schema_metadata({"who": "me"})


def parquet(folder: Path, table: pa.Table) -> PromptSource:
    pq.write_table(table.slice(0, 40), folder / "1.parquet", row_group_size=16)
    pq.write_table(table.slice(40, 0), folder / "2.parquet")
    pq.write_table(table.slice(40, 7), folder / "3.parquet")
    pq.write_table(table.slice(47), folder / "4.parquet", row_group_size=30)
    return open_source(str(folder))


def in_memory(folder: Path, table: pa.Table) -> PromptSource:
    return from_dataset(pa.concat_tables([table.slice(0, 30), table.slice(30)]))


def map_style(folder: Path, table: pa.Table) -> PromptSource:
    datasets = pytest.importorskip("datasets")
    backwards = datasets.Dataset(table.take(pa.array(range(table.num_rows - 1, -1, -1))).combine_chunks())
    return from_dataset(backwards.select(range(table.num_rows - 1, -1, -1)))


def stream(folder: Path, table: pa.Table) -> PromptSource:
    datasets = pytest.importorskip("datasets")
    return from_dataset(datasets.Dataset(table.combine_chunks()).to_iterable_dataset(num_shards=3))


SOURCES = [parquet, in_memory, map_style, stream]


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize("start", [0, 1, 16, 39, 40, 46, 47, 96, 97])
def test_windows_from_any_row_with_some_columns(make: Callable[..., PromptSource], start: int, tmp_path: Path) -> None:
    table = table_of()
    source = make(tmp_path, table)
    windows = list(source.windows(11, columns=["id", "a", "a.b"], start=start))
    assert all(window.column_names == ["a.b", "a", "id"] for window in windows)
    assert all(window.num_rows == 11 for window in windows[:-1])
    expected = table.select(["a.b", "a", "id"]).slice(start)
    assert [row for window in windows for row in window.to_pylist()] == expected.to_pylist()
    for name in expected.column_names:
        assert all(window.schema.field(name) == source.schema.field(name) for window in windows)


@pytest.mark.parametrize("make", SOURCES)
def test_all_columns_come_again(make: Callable[..., PromptSource], tmp_path: Path) -> None:
    table = table_of()
    source = make(tmp_path, table)
    windows = list(input_windows(source, 20, columns=["prompt", "id"], start=5))
    assert [(w.first_row_index, w.num_rows) for w in windows] == [(5, 20), (25, 20), (45, 20), (65, 20), (85, 12)]
    assert all(w.table.column_names == ["prompt", "id"] for w in windows)
    in_order = [piece for window in windows for piece in window.full()]
    assert all(piece.schema.equals(source.schema, check_metadata=True) for piece in in_order)
    assert pa.concat_tables(in_order).to_pylist() == table.slice(5).to_pylist()
    for window in (windows[3], windows[0], windows[0], windows[4]):  # any order, and more than once
        again = pa.concat_tables(window.full())
        assert again.to_pylist() == table.slice(window.first_row_index, window.num_rows).to_pylist()


def test_a_reading_that_was_left_does_not_shift_the_next_one(tmp_path: Path) -> None:
    table = table_of()
    first, second = list(input_windows(parquet(tmp_path, table), 30, columns=["id"]))[:2]
    next(first.full())
    assert pa.concat_tables(second.full()).column("id").to_pylist() == list(range(30, 60))
    assert pa.concat_tables(first.full()).column("id").to_pylist() == list(range(30))


def test_rows_are_read_once_more_and_not_from_the_beginning_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = parquet(tmp_path, table_of())
    num_decoded: dict[str, int] = {"some": 0, "all": 0}
    iter_batches = pq.ParquetFile.iter_batches

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        for batch in iter_batches(self, *args, **kwargs):
            num_decoded["some" if kwargs["columns"] else "all"] += batch.num_rows
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    for window in input_windows(source, 10, columns=["prompt"]):
        assert sum(piece.num_rows for piece in window.full()) == window.num_rows
    assert num_decoded == {"some": NUM_ROWS, "all": NUM_ROWS}


def test_wide_columns_are_not_held_while_windows_run(tmp_path: Path) -> None:
    """Also where the file is small because every row holds the same value."""
    num_rows, num_bytes = 400, 100_000
    value = b"x" * num_bytes
    wide = pa.table({"prompt": [f"p{i}" for i in range(num_rows)], "wide": pa.array([value] * num_rows, pa.binary())})
    pq.write_table(wide, tmp_path / "a.parquet")
    del wide
    gc.collect()
    source = open_source(str(tmp_path / "a.parquet"))
    before = pa.total_allocated_bytes()
    windows = list(input_windows(source, 100, columns=["prompt"]))
    assert pa.total_allocated_bytes() - before < 10 * num_bytes
    pieces = [piece.column("wide") for window in windows for piece in window.full()]
    assert all(value.as_py() == b"x" * num_bytes for piece in pieces for value in piece.unique())
    assert sum(len(piece) for piece in pieces) == num_rows


def test_a_file_that_changes_while_the_job_runs_is_not_mixed_in(tmp_path: Path) -> None:
    pq.write_table(table_of(), tmp_path / "a.parquet")
    first, second = input_windows(open_source(str(tmp_path / "a.parquet")), 60, columns=["prompt"])
    pq.write_table(table_of(80), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet changed since it was opened"):
        list(first.full())
    with pytest.raises(InputError, match=r"a\.parquet changed since it was opened"):
        list(second.full())


def test_a_start_beyond_the_rows_is_refused(tmp_path: Path) -> None:
    source = parquet(tmp_path, table_of())
    assert list(source.windows(5, start=NUM_ROWS)) == []
    with pytest.raises(ValueError, match="has 97 rows, none of them is row 98"):
        list(source.windows(5, start=98))


def test_the_columns_that_prompts_are_made_of() -> None:
    schema = pa.schema([(name, pa.string()) for name in ("url", "x", "body", "custom_id", "method")])
    assert InputColumns(body="body", id="custom_id").used(schema) == ["url", "body", "custom_id"]
    assert InputColumns(prompt="x").used(schema) == ["x"]
