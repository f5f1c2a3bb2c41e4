"""The output's schema is the input's, then the new columns."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from batchinfer.errors import InputError
from batchinfer.output.schema import output_schema

ALWAYS = [
    ("sample_index", pa.int32()),
    ("output", pa.string()),
    ("output_token_ids", pa.list_(pa.int32())),
    ("finish_reason", pa.string()),
    ("stop_reason", pa.string()),
    ("num_prompt_tokens", pa.int32()),
    ("num_cached_tokens", pa.int32()),
    ("num_output_tokens", pa.int32()),
]
ERROR = ("error", pa.struct([("code", pa.string()), ("message", pa.string())]))


def plain(schema: pa.Schema) -> list[tuple[str, pa.DataType]]:
    return [(field.name, field.type) for field in schema]


def test_columns_and_types() -> None:
    schema = output_schema(pa.schema([pa.field("id", pa.int8(), nullable=False, metadata={"k": "v"})]))
    assert plain(schema) == [("id", pa.int8()), *ALWAYS, ERROR]
    assert schema.field("id").equals(
        pa.field("id", pa.int8(), nullable=False, metadata={"k": "v"}), check_metadata=True
    )


def test_optional_columns() -> None:
    schema = output_schema(pa.schema([]), logprobs=True, top_logprobs=True, prompt_logprobs=True)
    pair = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])
    assert plain(schema) == [
        *ALWAYS,
        ("logprobs", pa.list_(pa.float32())),
        ("top_logprobs", pa.list_(pa.list_(pair))),
        ("prompt_logprobs", pa.list_(pa.float32())),
        ERROR,
    ]
    assert "top_logprobs" not in output_schema(pa.schema([]), logprobs=True).names


def test_a_prefix_renames_new_columns_only() -> None:
    schema = output_schema(pa.schema([("output", pa.string())]), prefix="model_")
    assert schema.names == ["output", *(f"model_{name}" for name, _ in [*ALWAYS, ERROR])]
    assert schema.field("model_output").metadata == {b"batchinfer": b"output"}


@pytest.mark.parametrize("name", ["output", "error", "sample_index", "logprobs"])
def test_a_clash_names_column_and_option(name: str) -> None:
    with pytest.raises(InputError, match=f"column named '{name}'.*--output-prefix"):
        output_schema(pa.schema([(name, pa.int8())]), logprobs=True)


def test_a_column_that_is_not_asked_for_cannot_clash() -> None:
    assert output_schema(pa.schema([("logprobs", pa.int8())])).names[0] == "logprobs"


@pytest.mark.parametrize(
    "type_",
    [
        pa.struct([]),
        pa.list_(pa.struct([])),
        pa.month_day_nano_interval(),
        pa.run_end_encoded(pa.int32(), pa.int64()),
        pa.sparse_union([pa.field("a", pa.int32())]),
        pa.dictionary(pa.int32(), pa.list_(pa.int32())),
        pa.list_view(pa.struct([("a", pa.string_view())])),
    ],
    ids=str,
)
def test_a_type_that_parquet_lacks_is_known_up_front(type_: pa.DataType) -> None:
    with pytest.raises(InputError, match=r"column 'odd' has type .*, which Parquet cannot hold"):
        output_schema(pa.schema([("id", pa.int64()), ("odd", type_)]))


def test_metadata_is_kept_and_added() -> None:
    schema = output_schema(pa.schema([], metadata={"own": "x"}), metadata={"batchinfer": "{}"})
    assert schema.metadata == {b"own": b"x", b"batchinfer": b"{}"}
    assert output_schema(pa.schema([])).metadata is None


@pytest.mark.parametrize("info", [b"{", b"[]", b'{"info": {}}', b'{"info": {"features": null}}'])
def test_features_that_are_not_understood_are_left_alone(info: bytes) -> None:
    assert output_schema(pa.schema([], metadata={"huggingface": info})).metadata == {b"huggingface": info}


def test_features_are_extended_as_datasets_would_write_them() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"label": datasets.ClassLabel(names=["no", "yes"])})
    options = {"logprobs": True, "top_logprobs": True, "prompt_logprobs": True}
    schema = output_schema(features.arrow_schema, **options)
    without = output_schema(pa.schema([]), **options)
    added = datasets.Features.from_arrow_schema(without)
    stored = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert datasets.Features.from_dict(stored) == datasets.Features({**features, **added})
    assert datasets.Features.from_arrow_schema(schema) == datasets.Features({**features, **added})
