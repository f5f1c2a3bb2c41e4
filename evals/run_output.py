"""A file of outputs as it was read: which columns are results, which were input, and which run made them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.errors import InputError
from batchinfer.evals.openai_outputs import is_openai_output, openai_rows
from batchinfer.evals.result import RunIdentity

if TYPE_CHECKING:
    import pyarrow as pa

_KEY = b"batchinfer"
#: Results that are used if a column has their name, in files that do not say which columns are results.
_RESULTS = (
    "sample_index",
    "output",
    "output_token_ids",
    "finish_reason",
    "stop_reason",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "error",
)
#: In such files a column of the name may hold something else.
_TYPES = {
    "sample_index": "integer",
    "output_token_ids": "list of integers",
    "finish_reason": "text",
    "num_output_tokens": "integer",
    "logprobs": "list of floats",
}


@dataclass(frozen=True, slots=True)
class RunOutput:
    """Attributes:
    table: all rows.
    results: result, such as "output" or "logprobs" -> its column.
    prompt_column: what the model was given, whatever its type; None where it is not known.
    id_column: None where rows have no id.
    """

    identity: RunIdentity
    table: pa.Table
    results: Mapping[str, str]
    prompt_column: str | None
    id_column: str | None

    @property
    def input_columns(self) -> list[str]:
        taken = set(self.results.values())
        return [name for name in self.table.column_names if name not in taken]

    def result(self, name: str) -> pa.ChunkedArray | None:
        column = self.results.get(name)
        return None if column is None else self.table.column(column)


def load_run_output(
    source: str | Path | pa.Table,
    *,
    name: str = "table",
    output_column: str | None = None,
    id_column: str | None = None,
) -> RunOutput:
    """Read the outputs of a run: what `batchinfer run` wrote, results of an OpenAI Batch, any table with a text column.

    Args:
        source: what open_source() reads (Parquet, JSON Lines, folders of them), or a table in memory.
        name: of a table in memory, for reports.
        output_column: the texts; None: the column that the file calls its output, else one named "output".
        id_column: what names rows; None: the run's own, else one named id or custom_id.
    Raises InputError naming the file and the column that is missing or of the wrong type.
    """
    import pyarrow as pa

    from batchinfer.output.storage import storage_schema

    if isinstance(source, pa.Table):
        table = source
    else:
        name = str(source)
        table = _read(name)
    if output_column is None and is_openai_output(table.schema):
        table = openai_rows(table)
    table = table.cast(storage_schema(table.schema))  # rows of views cannot be taken
    metadata = run_metadata(table.schema, name)
    results = _find_results(table.schema, output_column, name)
    _check_values(table, results, name)
    inputs = [column for column in table.column_names if column not in results.values()]
    columns = metadata.get("input", {}).get("columns", {})
    return RunOutput(
        identity=_identity(name, table.num_rows, metadata),
        table=table,
        results=results,
        prompt_column=_prompt_column(columns, inputs),
        id_column=_id_column(table.schema, columns, inputs, id_column, name),
    )


def run_metadata(schema: pa.Schema, name: str) -> dict[str, Any]:
    """What the file says of its run; empty if no run wrote it. See batchinfer/metadata.py."""
    text = (schema.metadata or {}).get(_KEY)
    if text is None:
        return {}
    try:
        metadata = json.loads(text)
    except ValueError as error:
        raise InputError(f"{name}: its metadata under {_KEY.decode()!r} is not JSON: {error}") from error
    if not isinstance(metadata, dict):
        raise InputError(f"{name}: its metadata under {_KEY.decode()!r} is not an object")
    return metadata


def _read(name: str) -> pa.Table:
    import pyarrow as pa

    from batchinfer.dataset.source import WINDOW_ROWS, open_source

    try:
        source = open_source(name)
        tables: Iterator[pa.Table] = source.windows(WINDOW_ROWS)
        return pa.concat_tables([source.schema.empty_table(), *tables])
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror or error}") from error


def _find_results(schema: pa.Schema, output_column: str | None, name: str) -> dict[str, str]:
    from batchinfer.dataset.row_params import is_text

    # Of a run over the output of another run the later columns are its own.
    said = {f.metadata[_KEY].decode(): f.name for f in schema if f.metadata and _KEY in f.metadata}
    results = said or {result: result for result in _RESULTS if result in schema.names and _fits(schema, result)}
    if output_column is not None:
        if output_column not in schema.names:
            raise InputError(f"--output-column {output_column}: {name} has no such column. {_columns(schema)}")
        if results.get("output", output_column) != output_column:
            results = {"output": output_column}  # another text: ids and logprobs of the run's own do not belong to it
        results["output"] = output_column
    if "output" not in results:
        raise InputError(
            f"{name} has no column 'output': name the column of generated texts with --output-column. "
            + _columns(schema)
        )
    type_ = schema.field(results["output"]).type
    if not is_text(type_):
        raise InputError(f"{name}: column {results['output']!r} must hold text, not {type_}")
    return results


def _fits(schema: pa.Schema, result: str) -> bool:
    import pyarrow.types as pt

    from batchinfer.dataset.columns import is_token_ids
    from batchinfer.dataset.row_params import is_list, is_text

    type_ = schema.field(result).type
    fits = {
        "integer": pt.is_integer(type_),
        "text": is_text(type_),
        "list of integers": is_token_ids(type_),
        "list of floats": is_list(type_) and pt.is_floating(type_.value_type),
    }
    return result not in _TYPES or bool(fits[_TYPES[result]])


def _check_values(table: pa.Table, results: Mapping[str, str], name: str) -> None:
    """What a run never writes, and other files may hold."""
    place = results.get("sample_index")
    if place is not None and table.column(place).null_count:
        raise InputError(f"{name}: column {place!r} must tell the sample of every row, and is null in some")


def _prompt_column(columns: Mapping[str, str], inputs: list[str]) -> str | None:
    from batchinfer.dataset.columns import BODY_NAME, MESSAGES_NAMES, PROMPT_NAMES, TOKEN_IDS_NAMES

    said = [columns[kind] for kind in ("prompt", "messages", "token_ids", "body") if columns.get(kind) in inputs]
    usual = (*PROMPT_NAMES[:1], *MESSAGES_NAMES, *TOKEN_IDS_NAMES[:1], BODY_NAME)
    return next(iter([*said, *(name for name in usual if name in inputs)]), None)


def _id_column(
    schema: pa.Schema, columns: Mapping[str, str], inputs: list[str], wanted: str | None, name: str
) -> str | None:
    from batchinfer.dataset.columns import ID_NAMES

    if wanted is not None:
        if wanted not in inputs:
            raise InputError(f"--id-column {wanted}: {name} has no such input column. {_columns(schema)}")
        return wanted
    return next((column for column in (columns.get("id"), *ID_NAMES) if column in inputs), None)


def _identity(name: str, num_rows: int, metadata: Mapping[str, Any]) -> RunIdentity:
    return RunIdentity(
        path=name,
        num_rows=num_rows,
        model=metadata.get("model", {}).get("name"),
        version=metadata.get("version"),
        created=metadata.get("created"),
        digests=metadata.get("digests", {}),
        params=metadata.get("params", {}),
        metadata=metadata,
    )


def _columns(schema: pa.Schema) -> str:
    return "Columns: " + ", ".join(f"{field.name} ({field.type})" for field in schema)
