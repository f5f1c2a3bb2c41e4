"""Any small table goes through the writer with every cell equal: values, types, nulls."""

from __future__ import annotations

import datetime
import decimal
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchinfer.output import row_groups as groups_module
from batchinfer.output.schema import output_schema
from batchinfer.output.writer import ParquetOutput
from batchinfer.types import Completion, FinishReason

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def whole(bits: int, signed: bool) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else st.integers(0, 2**bits - 1)


LEAVES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int8(), whole(8, True)),
    (pa.int64(), whole(64, True)),
    (pa.uint32(), whole(32, False)),
    (pa.uint64(), whole(64, False)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.bool_(), st.booleans()),
    (pa.string(), text),
    (pa.large_string(), text),
    (pa.string_view(), text),
    (pa.binary(), st.binary(max_size=20)),
    (pa.binary_view(), st.binary(max_size=20)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.null(), st.none()),
    (pa.date32(), st.dates()),
    (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(datetime.UTC))),
    (pa.timestamp("ms"), st.integers(0, 2**40)),
    (pa.time64("us"), st.times()),
    (pa.duration("ns"), st.integers(0, 2**40)),
    (pa.decimal128(20, 3), st.decimals(-(10**10), 10**10, places=3)),
    (pa.dictionary(pa.int8(), pa.string()), text),
    (pa.uuid(), st.uuids()),
]


def nested(inner: st.SearchStrategy[tuple[pa.DataType, st.SearchStrategy]]) -> st.SearchStrategy:
    return st.one_of(
        inner.map(lambda i: (pa.list_(i[0]), st.lists(i[1] | st.none(), max_size=3))),
        inner.map(lambda i: (pa.large_list(i[0]), st.lists(i[1] | st.none(), max_size=3))),
        inner.map(lambda i: (pa.list_(i[0], 2), st.lists(i[1] | st.none(), min_size=2, max_size=2))),
        st.tuples(inner, inner).map(
            lambda ab: (
                pa.struct([("a", ab[0][0]), ("b", ab[1][0])]),
                st.fixed_dictionaries({"a": ab[0][1] | st.none(), "b": ab[1][1] | st.none()}),
            )
        ),
        inner.map(lambda i: (pa.map_(pa.string(), i[0]), st.lists(st.tuples(text, i[1] | st.none()), max_size=3))),
    )


# Extension types and dictionaries inside lists: Python values cannot be put into them directly.
plain_leaf = st.sampled_from([leaf for leaf in LEAVES if not isinstance(leaf[0], pa.BaseExtensionType)])
column_type = st.one_of(st.sampled_from(LEAVES), nested(st.one_of(plain_leaf, nested(plain_leaf))))


@st.composite
def columns(draw: st.DrawFn, num_rows: int) -> pa.ChunkedArray:
    type_, values = draw(column_type)
    cells = draw(st.lists(values | st.none(), min_size=num_rows, max_size=num_rows))
    cut = draw(st.integers(0, num_rows))
    return pa.chunked_array([pa.array(part, type_) for part in (cells[:cut], cells[cut:])], type_)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    num_rows = draw(st.integers(1, 8))
    arrays = [draw(columns(num_rows)) for _ in range(draw(st.integers(1, 3)))]
    return pa.table(dict(zip(("x", "", "output ü"), arrays, strict=False)))


def completions_of(samples: list[int]) -> list[Completion]:
    return [
        Completion(row, sample, [row], f"{row}/{sample}", FinishReason.STOP)
        for row, num_samples in enumerate(samples)
        for sample in range(num_samples)
    ]


def written(path: Path, table: pa.Table, samples: list[int], window: int) -> pa.Table:
    completions = completions_of(samples)
    with ParquetOutput(path, output_schema(table.schema), overwrite=True) as output:
        for first in range(0, table.num_rows, window):
            part = table.slice(first, window)
            output.write_window(part, first, [c for c in completions if first <= c.row_index < first + window][::-1])
        output.commit()
    return pq.read_table(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=tables(), data=st.data())
def test_every_input_cell_is_equal(tmp_path: Path, table: pa.Table, data: st.DataObject) -> None:
    samples = data.draw(st.lists(st.integers(1, 3), min_size=table.num_rows, max_size=table.num_rows))
    window = data.draw(st.integers(1, table.num_rows))
    result = written(tmp_path / "out.parquet", table, samples, window)
    rows = [row for row, num_samples in enumerate(samples) for _ in range(num_samples)]
    assert [result.schema.field(i).type for i in range(table.num_columns)] == table.schema.types
    assert result.schema.names[: table.num_columns] == table.schema.names
    for index in range(table.num_columns):
        before = table.column(index).to_pylist()
        assert result.column(index).to_pylist() == [before[row] for row in rows]
    assert result.column("output").to_pylist() == [f"{c.row_index}/{c.sample_index}" for c in completions_of(samples)]


@pytest.mark.parametrize("samples", [[1, 1, 1], [2, 1, 3]])
def test_nan_and_exact_values(tmp_path: Path, samples: list[int]) -> None:
    table = pa.table(
        {
            "nan": pa.array([math.nan, None, -0.0]),
            "wide": pa.array([decimal.Decimal(10) ** 50, None, decimal.Decimal(-1)], pa.decimal256(60, 2)),
            "half": pa.array([0.5, None, -math.inf], pa.float16()),
            "list_views": pa.array([["a"], None, []], pa.list_view(pa.string())),
            "empty_list": pa.array([[], None, [None]], pa.list_(pa.list_(pa.int64()))),
        }
    )
    result = written(tmp_path / "out.parquet", table, samples, 3)
    rows = [row for row, num_samples in enumerate(samples) for _ in range(num_samples)]
    for name in table.column_names:
        before = table.column(name).to_pylist()
        assert result.schema.field(name).type == table.schema.field(name).type
        assert repr(result.column(name).to_pylist()) == repr([before[row] for row in rows])


def test_chunks_with_different_dictionaries(tmp_path: Path) -> None:
    chunks = [pa.array(values).dictionary_encode() for values in (["a", "b"], ["c", None, "a"])]
    table = pa.table({"x": pa.chunked_array(chunks)})
    result = written(tmp_path / "out.parquet", table, [1, 2, 3, 1, 2], 5)
    assert result.column("x").to_pylist() == ["a", "b", "b", "c", "c", "c", None, "a", "a"]
    assert pa.types.is_dictionary(result.schema.field("x").type)


@pytest.mark.parametrize("window", [1, 2, 4])
def test_messages_of_string_views_in_every_slice(tmp_path: Path, window: int) -> None:
    message = pa.struct([("role", pa.string()), ("content", pa.string_view())])
    rows = [[{"role": "user", "content": "x"}], None, [{"role": "user", "content": None}, None], []]
    for type_, some in ((pa.list_(message), rows), (pa.list_(message, 1), [rows[0], None, [None], rows[0]])):
        table = pa.table({"x": pa.array(some, type_)})
        result = written(tmp_path / "out.parquet", table, [1, 2, 1, 3], window)
        assert result.schema.field("x").type == type_
        assert result.column("x").to_pylist() == [some[i] for i in (0, 1, 1, 2, 3, 3, 3)]


def test_bytes_that_are_no_utf8_pass_unchanged(tmp_path: Path) -> None:
    buffers = pa.array([b"ok", b"\xed\xa0\xbd"], pa.binary()).buffers()
    table = pa.table({"x": pa.Array.from_buffers(pa.string(), 2, buffers)})
    result = written(tmp_path / "out.parquet", table, [1, 2], 2)
    assert result.column("x").cast(pa.binary()).to_pylist() == [b"ok", b"\xed\xa0\xbd", b"\xed\xa0\xbd"]


def test_fields_keep_nullability_and_metadata(tmp_path: Path) -> None:
    fields = [pa.field("x", pa.int64(), nullable=False, metadata={"k": "v"})]
    table = pa.table([pa.array([1, 2])], schema=pa.schema(fields))
    result = written(tmp_path / "out.parquet", table, [1, 2], 2)
    assert not result.schema.field("x").nullable
    assert result.schema.field("x").metadata[b"k"] == b"v"


def test_take_in_small_pieces_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"x": [f"{i}" * (i % 50) for i in range(500)]})
    samples = [i % 4 + 1 for i in range(500)]
    whole_groups = written(tmp_path / "a.parquet", table, samples, 500)
    monkeypatch.setattr(groups_module, "_MAX_TAKE_BYTES", 500)
    assert written(tmp_path / "b.parquet", table, samples, 500).equals(whole_groups)
