"""The schema of the output, fixed before the first row: the input's columns, then the new ones."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.errors import InputError
from batchinfer.output.storage import storage_type

#: Metadata key: of a field, which result it holds (its name without prefix); of the schema, the run.
METADATA_KEY = b"batchinfer"

_TOP_LOGPROB = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])
ERROR_TYPE = pa.struct([("code", pa.string()), ("message", pa.string())])
_OPTIONAL = ("logprobs", "top_logprobs", "prompt_logprobs")
_COLUMNS: dict[str, pa.DataType] = {
    "sample_index": pa.int32(),
    "output": pa.string(),
    "output_token_ids": pa.list_(pa.int32()),
    "finish_reason": pa.string(),
    "stop_reason": pa.string(),
    "num_prompt_tokens": pa.int32(),
    "num_cached_tokens": pa.int32(),
    "num_output_tokens": pa.int32(),
    "logprobs": pa.list_(pa.float32()),
    "top_logprobs": pa.list_(pa.list_(_TOP_LOGPROB)),
    "prompt_logprobs": pa.list_(pa.float32()),
    "error": ERROR_TYPE,
}


def output_schema(
    input_schema: pa.Schema,
    *,
    logprobs: bool = False,
    top_logprobs: bool = False,
    prompt_logprobs: bool = False,
    prefix: str = "",
    metadata: Mapping[str, str] | None = None,
) -> pa.Schema:
    """`input_schema` unchanged, then one field per result, each named `prefix` + its name.

    Every new field says in its own metadata (key "batchinfer") which result it holds, so that it is
    known whatever the prefix. Schema metadata is kept, `metadata` is added, and where the input
    comes from Hugging Face datasets its features are extended by those of the new columns.
    Raises InputError if an input column has a new column's name or a type that Parquet cannot hold.
    """
    fields = result_fields(
        input_schema.names,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
        prefix=prefix,
    )
    return extended_schema(input_schema, fields, metadata)


def extended_schema(
    input_schema: pa.Schema, fields: list[pa.Field], metadata: Mapping[str, str] | None = None
) -> pa.Schema:
    """`input_schema` unchanged, then `fields` from added_fields, as in output_schema. Raises InputError as it does."""
    for field in input_schema:
        _check_can_be_written(field)
    merged = dict(input_schema.metadata or {})
    if b"huggingface" in merged:
        merged[b"huggingface"] = _extend_features(merged[b"huggingface"], fields)
    merged.update({key.encode(): value.encode() for key, value in (metadata or {}).items()})
    return pa.schema([*input_schema, *fields], metadata=merged or None)


def result_fields(
    input_names: Collection[str], *, logprobs: bool, top_logprobs: bool, prompt_logprobs: bool, prefix: str = ""
) -> list[pa.Field]:
    """One field per result, as in output_schema. Raises InputError if an input column has one of their names."""
    wanted = {"logprobs": logprobs, "top_logprobs": top_logprobs, "prompt_logprobs": prompt_logprobs}
    return added_fields(
        {name: type_ for name, type_ in _COLUMNS.items() if wanted.get(name, True)}, input_names, prefix
    )


def added_fields(
    columns: Mapping[str, pa.DataType], input_names: Collection[str], prefix: str = "", kind: str = ""
) -> list[pa.Field]:
    """A field for each result of `columns`, which says in its metadata what it holds: `kind` + its name.

    Raises InputError if an input column has one of their names.
    """
    fields = [
        pa.field(prefix + name, type_, metadata={METADATA_KEY: (kind + name).encode()})
        for name, type_ in columns.items()
    ]
    taken = [field.name for field in fields if field.name in input_names]
    if taken:
        raise InputError(
            f"the input has a column named {taken[0]!r}, which the output needs for its own: "
            "give the new columns a prefix with --output-prefix"
        )
    return fields


def _check_can_be_written(field: pa.Field) -> None:
    """Parquet lacks some Arrow types, and the writer tells only when it meets them."""
    try:
        probe = pa.table({field.name: pa.nulls(1, storage_type(field.type))})
        pq.write_table(probe, pa.BufferOutputStream())
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"column {field.name!r} has type {field.type}, which Parquet cannot hold: {error}") from error


def _extend_features(info: bytes, fields: list[pa.Field]) -> bytes:
    """Add the new columns to what datasets stores about its features; left alone if it is not understood."""
    try:
        parsed = json.loads(info)
        features = parsed["info"]["features"]
        features.update({field.name: _feature(field.type) for field in fields})
    except (ValueError, KeyError, TypeError, AttributeError):
        return info
    return json.dumps(parsed).encode()


def _feature(type_: pa.DataType) -> dict[str, Any]:
    if pa.types.is_list(type_):
        return {"feature": _feature(type_.value_type), "_type": "List"}
    if pa.types.is_struct(type_):
        return {field.name: _feature(field.type) for field in type_}
    return {"dtype": {"float": "float32"}.get(str(type_), str(type_)), "_type": "Value"}
