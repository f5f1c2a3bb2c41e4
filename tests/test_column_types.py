"""Every Arrow type comes through a job and through generate_dataset unchanged: type, values, nulls."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import FakeEngine, FakeModelSource

from batchinfer.errors import InputError
from batchinfer.job import run_job
from batchinfer.pipeline import generate_dataset
from batchinfer.settings import job_settings
from batchinfer.types import SamplingParams

D = decimal.Decimal
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.large_string())])
LONG = "a string longer than the twelve bytes that a view holds"


class Celsius(pa.ExtensionType):
    """A type that only its owner registers."""

    def __init__(self) -> None:
        super().__init__(pa.float32(), "batchinfer.tests.degrees")

    def __arrow_ext_serialize__(self) -> bytes:
        return b"C"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Celsius:
        return cls()


def tensors() -> pa.Array:
    type_ = pa.fixed_shape_tensor(pa.int32(), [2, 2])
    storage = pa.array([[1, 2, 3, 4], None, [5, 6, 7, 8], None, [0, 0, 0, 0]], type_.storage_type)
    return pa.ExtensionArray.from_storage(type_, storage)


#: Five cells each; None is null.
COLUMNS: dict[str, pa.Array] = {
    "string": pa.array(["a", None, "", "ü🙂", "None"], pa.string()),
    "large_string": pa.array(["a", None, "", "ü🙂", LONG], pa.large_string()),
    "string_view": pa.array(["a", None, "", LONG, LONG + "2"], pa.string_view()),
    "binary": pa.array([b"\x00\xff", None, b"", b"a", b"b"], pa.binary()),
    "large_binary": pa.array([b"\x00\xff", None, b"", b"a", b"b"], pa.large_binary()),
    "binary_view": pa.array([b"\x00\xff", None, b"", LONG.encode(), b"b"], pa.binary_view()),
    "fixed_size_binary": pa.array([b"abc", None, b"\x00\x00\x00", b"def", b"abc"], pa.binary(3)),
    "dictionary": pa.array(["a", None, "b", "a", ""], pa.dictionary(pa.int8(), pa.string())),
    "dictionary_of_large": pa.array(["a", None, "b", "a", ""], pa.dictionary(pa.int32(), pa.large_string())),
    "ordered_dictionary": pa.DictionaryArray.from_arrays(
        pa.array([1, None, 0, 1, 2], pa.int32()), ["low", "mid", "high"], ordered=True
    ),
    "decimal128": pa.array([D("1.10"), None, D("-2.00"), D("9" * 36 + ".99"), D("0.00")], pa.decimal128(38, 2)),
    "decimal256": pa.array([D("1.10"), None, D("-2.00"), D("9" * 60 + ".99"), D("0.00")], pa.decimal256(76, 2)),
    "timestamp_zone": pa.array([1, None, 2**60, -1, 0], pa.timestamp("ns", "Europe/Berlin")),
    "timestamp_offset": pa.array([1, None, 2**50, -1, 0], pa.timestamp("us", "+05:30")),
    "timestamp_utc_ms": pa.array([1, None, 2**40, -1, 0], pa.timestamp("ms", "UTC")),
    "timestamp_s": pa.array([1, None, 2**31, -1, 0], pa.timestamp("s")),
    "duration_s": pa.array([1, None, 2**31, -1, 0], pa.duration("s")),
    "duration_ns": pa.array([1, None, 2**60, -1, 0], pa.duration("ns")),
    "date32": pa.array([datetime.date(2020, 2, 29), None, datetime.date(1, 1, 1), None, datetime.date(9999, 12, 31)]),
    "date64": pa.array([datetime.date(2020, 2, 29), None, datetime.date(1970, 1, 1), None, None], pa.date64()),
    "time32": pa.array([1, None, 86_399_999, 0, 5], pa.time32("ms")),
    "time64": pa.array([1, None, 86_399_999_999_999, 0, 5], pa.time64("ns")),
    "int64": pa.array([2**53 + 1, None, -(2**63), 2**63 - 1, 0], pa.int64()),
    "uint64": pa.array([2**64 - 1, None, 2**53 + 1, 2**63, 0], pa.uint64()),
    "int8": pa.array([1, None, -128, 127, 0], pa.int8()),
    "uint32": pa.array([1, None, 2**32 - 1, 2, 0], pa.uint32()),
    "half": pa.array([np.float16(0.5), None, np.float16(-math.inf), np.float16(65504), np.float16(0)], pa.float16()),
    "float": pa.array([0.1, None, math.inf, -0.0, math.nan], pa.float32()),
    "double": pa.array([0.1, None, 5e-324, -0.0, math.nan], pa.float64()),
    "bool": pa.array([True, None, False, True, False]),
    "null": pa.nulls(5),
    "list": pa.array([[1], None, [], [None, 2**60], [3]], pa.list_(pa.int64())),
    "large_list": pa.array([["a"], None, [], [None, "b"], ["c"]], pa.large_list(pa.string())),
    "list_view": pa.array([["a"], None, [], [None, "b"], ["c"]], pa.list_view(pa.string())),
    "fixed_size_list": pa.array([[1, 2], None, [None, 3], [4, 5], None], pa.list_(pa.int64(), 2)),
    "fixed_size_list_of_structs": pa.array(
        [[{"role": "a", "content": None}], None, [None], [{"role": None, "content": "b"}], None], pa.list_(MESSAGE, 1)
    ),
    "messages": pa.array(
        [[{"role": "user", "content": None}], None, [], [None, {"role": "a", "content": LONG}], []], pa.list_(MESSAGE)
    ),
    "lists_of_lists": pa.array([[[1, None], [], None], None, [], [None], [[2]]], pa.list_(pa.list_(pa.int64()))),
    "struct": pa.array([{"a": None, "b": [1]}, None, {"a": "x", "b": []}, {"a": "", "b": None}, None]),
    "deep": pa.array([{"a": [{"b": {"c": [D("1.5")]}}]}, None, {"a": [None]}, {"a": None}, {"a": []}]),
    "struct_of_views": pa.array(
        [{"a": [LONG]}, None, {"a": None}, {"a": [None, "b"]}, {"a": []}],
        pa.struct([("a", pa.list_(pa.string_view()))]),
    ),
    "map": pa.array(
        [[("k", 1)], None, [], [("a", None), ("b", 2)], [("k", 2**31 - 1)]], pa.map_(pa.string(), pa.int32())
    ),
    "map_of_lists": pa.array([[("k", [1])], None, [], [("a", None)], []], pa.map_(pa.string(), pa.list_(pa.int8()))),
    "uuid": pa.array([uuid.UUID(int=i) if i != 1 else None for i in range(5)], pa.uuid()),
    "tensor": tensors(),
    "json": pa.array(['{"a": 1}', None, "null", "[]", '"x"'], pa.json_(pa.string())),
    "bool8": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, None, 0, 1, 0], pa.int8())),
    "own_extension": pa.ExtensionArray.from_storage(Celsius(), pa.array([1.5, None, -273.15, 0, 5], pa.float32())),
}


def test_there_are_five_cells_of_each() -> None:
    assert {name: len(cells) for name, cells in COLUMNS.items()} == dict.fromkeys(COLUMNS, 5)
    assert [name for name, cells in COLUMNS.items() if cells.null_count == 0] == []


def repeated(values: Sequence[Any], times: int) -> list[Any]:
    return [value for value in values for _ in range(times)]


def exact(cells: Any, times: int = 1) -> str:
    """Equal for equal values, NaN and -0.0 told apart; of each cell so many times."""
    return repr(repeated(cells.to_pylist(), times))


def run(folder: Path, source: Path | str, window_rows: int = 2, **flags: Any) -> pa.Table:
    output = folder / "out.parquet"
    given = {"prompts": str(source), "model": "m", "output": str(output), "overwrite": True, **flags}
    run_job(
        job_settings(given, {}, None),
        engine_factory=lambda model, config: FakeEngine(model, config),  # type: ignore[arg-type]
        resolve=lambda name: FakeModelSource(),  # type: ignore[arg-type, return-value]
        window_rows=window_rows,
    )
    return pq.read_table(output)


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("n", [1, 2])
def test_through_a_job(name: str, n: int, tmp_path: Path) -> None:
    table = pa.table({"prompt": list("abcde"), "x": COLUMNS[name]})
    pq.write_table(table.slice(0, 3), tmp_path / "1.parquet", row_group_size=2)
    pq.write_table(table.slice(3), tmp_path / "2.parquet")
    read = pq.read_table(tmp_path / "1.parquet").schema.field("x")  # Parquet has no seconds, for one
    found = run(tmp_path, f"{tmp_path}/[12].parquet", n=n)
    assert found.schema.field("x").equals(read, check_metadata=True)
    if read.type == table.schema.field("x").type:
        assert exact(found.column("x")) == exact(COLUMNS[name], n)
    else:
        assert name in {"timestamp_s", "date64", "dictionary_of_large", "own_extension"}
        again = pa.concat_tables([pq.read_table(tmp_path / f"{part}.parquet") for part in (1, 2)])
        assert found.column("x").to_pylist() == repeated(again.column("x").to_pylist(), n)
    assert found.column("output").to_pylist() == repeated("abcde", n)


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("n", [1, 2])
def test_through_generate_dataset_of_a_table(name: str, n: int) -> None:
    table = pa.table({"prompt": list("abcde"), "x": COLUMNS[name]}).replace_schema_metadata({"who": "me"})
    found = generate_dataset(FakeEngine(), table, SamplingParams(n=n), window_rows=2)
    assert found.schema.field("x").equals(table.schema.field("x"), check_metadata=True)
    assert found.schema.metadata == {b"who": b"me"}
    assert exact(found.column("x")) == exact(COLUMNS[name], n)


#: What the datasets package has no feature for.
_NO_FEATURE = {
    "string_view", "binary_view", "fixed_size_binary", "ordered_dictionary", "dictionary", "dictionary_of_large",
    "list_view", "fixed_size_list_of_structs", "struct_of_views", "map", "map_of_lists", "uuid",
    "tensor", "json", "bool8", "own_extension",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in COLUMNS if name not in _NO_FEATURE])
@pytest.mark.parametrize("is_stream", [False, True])
def test_through_generate_dataset_of_a_dataset(name: str, is_stream: bool) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset(pa.table({"prompt": list("abcde"), "x": COLUMNS[name]}))
    given = dataset.to_iterable_dataset() if is_stream else dataset
    result = generate_dataset(FakeEngine(), given, SamplingParams(n=2), window_rows=2)
    assert result.features["x"] == dataset.features["x"]
    arrow = result.with_format("arrow")
    found = pa.concat_tables(arrow.iter(batch_size=3)) if is_stream else arrow[:]
    before = dataset.with_format("arrow")[:].column("x")
    assert found.schema.field("x").type == before.type
    assert exact(found.column("x")) == exact(before, 2)


@pytest.mark.parametrize(
    "cells",
    [
        pa.array([(1, 2, 3), None], pa.month_day_nano_interval()),
        pa.array([D("1E+2"), None], pa.decimal128(5, -2)),
        pa.array([[LONG], None], pa.list_view(pa.string_view())),
        pa.RunEndEncodedArray.from_arrays([2], [1], pa.run_end_encoded(pa.int32(), pa.int64())),
        pa.UnionArray.from_dense(
            pa.array([0, 1], pa.int8()), pa.array([0, 0], pa.int32()), [pa.array([1]), pa.array(["a"])]
        ),
    ],
    ids=lambda cells: str(cells.type),
)
def test_what_parquet_cannot_hold_is_named_before_any_work(cells: pa.Array, tmp_path: Path) -> None:
    """Such columns come from datasets in memory; generate_dataset leaves them as they are."""
    from batchinfer.output.schema import output_schema

    table = pa.table({"prompt": ["a", "b"], "x": cells})
    with pytest.raises(InputError, match=r"column 'x' has type .*, which Parquet cannot hold"):
        output_schema(table.schema)
    found = generate_dataset(FakeEngine(), table, SamplingParams(n=2))
    assert found.column("x").to_pylist() == repeated(table.column("x").to_pylist(), 2)


def test_features_of_hugging_face_go_with_the_file(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "prompt": datasets.Value("large_string"),
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "matrix": datasets.Array2D((2, 2), "int32"),
            "turns": datasets.List({"role": datasets.Value("string"), "n": datasets.Value("uint64")}),
            "when": datasets.Value("timestamp[us, tz=UTC]"),
        }
    )
    rows = {
        "prompt": ["a", None],
        "label": [1, None],
        "matrix": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]],
        "turns": [[{"role": "x", "n": 2**63 - 1}], []],
        "when": [datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC), None],
    }
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
    found = run(tmp_path, tmp_path / "a.parquet")
    described = json.loads(found.schema.metadata[b"huggingface"])["info"]["features"]
    loaded = datasets.Dataset.from_parquet(str(tmp_path / "out.parquet"), cache_dir=str(tmp_path / "cache"))
    assert {name: loaded.features[name] for name in features} == dict(features)
    assert list(described) == loaded.column_names
    assert loaded.features["error"] == {"code": datasets.Value("string"), "message": datasets.Value("string")}
    assert [loaded[name][:] for name in rows] == [rows[name] for name in rows]
