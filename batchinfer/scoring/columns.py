"""Which columns of a dataset are scored, and how."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa

from batchinfer.dataset.columns import InputColumns, is_messages, is_token_ids
from batchinfer.dataset.row_params import is_text
from batchinfer.errors import InputError
from batchinfer.output.schema import METADATA_KEY

TEXT_NAME, CONTEXT_NAME, CONTINUATION_NAME, MESSAGES_NAME = "text", "context", "continuation", "messages"
_FLAGS = {"text": "--text-column", "messages": "--messages-column", "pair": "--context-column"}
_SHOWN_COLUMNS = 50


@dataclass(frozen=True, slots=True)
class RunColumns:
    """The output of a run: where it stored what, and what it made its prompts from."""

    output_token_ids: str
    output: str
    num_prompt_tokens: str
    input: InputColumns
    system: str | None
    digests: dict[str, str | None]  # of model, tokenizer and chat template
    model: str | None


@dataclass(frozen=True, slots=True)
class ScoreColumns:
    """Names of columns; exactly one of text, context with continuation, messages, and run is set.

    text, and context and continuation together, may hold token ids, which are scored as they are.
    """

    text: str | None = None
    context: str | None = None
    continuation: str | None = None
    messages: str | None = None
    run: RunColumns | None = None
    holds_ids: bool = False

    def to_dict(self) -> dict[str, str]:
        """For metadata: what is read under which name."""
        names = {name: getattr(self, name) for name in ("text", "context", "continuation", "messages")}
        if self.run is not None:
            names |= {f"prompt.{f.name}": getattr(self.run.input, f.name) for f in fields(self.run.input)}
            names["output_token_ids"] = self.run.output_token_ids
        return {name: column for name, column in names.items() if column is not None}


def find_score_columns(
    schema: pa.Schema,
    *,
    text: str | None = None,
    context: str | None = None,
    continuation: str | None = None,
    messages: str | None = None,
) -> ScoreColumns:
    """The columns that are named; else the output of a run, if this is one; else the one kind that goes by its
    usual names: text, context and continuation, messages.

    Raises InputError if a named column is missing or has the wrong type, or if none or several kinds could be meant.
    """
    named = [("--text-column", text), ("--messages-column", messages)]
    named += [("--context-column", context), ("--continuation-column", continuation)]
    given = [option for option, name in named if name is not None]
    if given and set(given) != {"--context-column", "--continuation-column"} and len(given) > 1:
        raise InputError(f"{' and '.join(given)} do not go together: give one kind of text to score")
    if text is not None:
        return _text(schema, text, "--text-column")
    if messages is not None:
        _check(schema, messages, "--messages-column", is_messages, "lists of structs with role and content")
        return ScoreColumns(messages=messages)
    if context is not None or continuation is not None:
        return _pair(schema, context or CONTEXT_NAME, continuation or CONTINUATION_NAME)
    run = find_run(schema)
    return ScoreColumns(run=run) if run is not None else _usual(schema)


def _usual(schema: pa.Schema) -> ScoreColumns:
    names = set(schema.names)
    found = []
    if TEXT_NAME in names:
        found.append((_FLAGS["text"], TEXT_NAME))
    if {CONTEXT_NAME, CONTINUATION_NAME} <= names:
        found.append((_FLAGS["pair"], CONTEXT_NAME))
    if MESSAGES_NAME in names and is_messages(schema.field(MESSAGES_NAME).type):
        found.append((_FLAGS["messages"], MESSAGES_NAME))
    if len(found) > 1:
        options = " or ".join(f"{option} {name}" for option, name in found)
        raise InputError(f"more than one kind of text could be scored: choose {options}")
    if not found:
        raise InputError(
            "nothing to score was found: no column text, no columns context and continuation, no column messages, and "
            "it is no output of batchinfer run. Name yours with --text-column, --context-column and "
            f"--continuation-column, or --messages-column. {_columns(schema)}"
        )
    ((option, name),) = found
    if option == _FLAGS["text"]:
        return _text(schema, name, option)
    if option == _FLAGS["messages"]:
        return ScoreColumns(messages=name)
    return _pair(schema, CONTEXT_NAME, CONTINUATION_NAME)


def _text(schema: pa.Schema, name: str, what: str) -> ScoreColumns:
    type_ = _type(schema, name, what)
    if is_messages(type_):
        raise InputError(f"column {name!r} holds messages: use --messages-column {name}")
    if not is_text(type_) and not is_token_ids(type_):
        raise InputError(f"{what} {name}: the column must hold text or lists of token ids, not {type_}")
    return ScoreColumns(text=name, holds_ids=is_token_ids(type_))


def _pair(schema: pa.Schema, context: str, continuation: str) -> ScoreColumns:
    types = [
        _type(schema, context, "--context-column"),
        _type(schema, continuation, "--continuation-column"),
    ]
    if not (all(map(is_text, types)) or all(map(is_token_ids, types))):
        raise InputError(
            f"columns {context!r} and {continuation!r} must both hold text, or both lists of token ids, "
            f"not {types[0]} and {types[1]}"
        )
    return ScoreColumns(context=context, continuation=continuation, holds_ids=is_token_ids(types[0]))


def find_run(schema: pa.Schema) -> RunColumns | None:
    """What a run wrote into a file of this schema; None if it is not the output of a run.

    Raises InputError if it is, and its metadata or its prompt column is gone.
    """
    results = {(f.metadata or {}).get(METADATA_KEY): f.name for f in schema}
    ids, output, num_prompt_tokens = (
        results.get(name) for name in (b"output_token_ids", b"output", b"num_prompt_tokens")
    )
    if ids is None or output is None or num_prompt_tokens is None:
        return None
    metadata = _run_metadata(schema)
    read = ("prompt", "messages", "token_ids", "body")
    columns = InputColumns(**{kind: name for kind, name in metadata["input"]["columns"].items() if kind in read})
    for name in (columns.prompt, columns.messages, columns.token_ids, columns.body):
        if name is not None and name not in schema.names:
            raise InputError(f"the run read its prompts from column {name!r}, which is not there any more")
    return RunColumns(
        output_token_ids=ids,
        output=output,
        num_prompt_tokens=num_prompt_tokens,
        input=columns,
        system=metadata["input"].get("system"),
        digests=dict(metadata.get("digests") or {}),
        model=(metadata.get("model") or {}).get("name"),
    )


def _run_metadata(schema: pa.Schema) -> dict[str, Any]:
    raw = (schema.metadata or {}).get(METADATA_KEY)
    try:
        metadata = json.loads(raw) if raw is not None else None
    except ValueError as error:
        raise InputError(f"the metadata of the run is damaged: {error}") from error
    stated = metadata.get("input") if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or not isinstance(stated, dict) or not isinstance(stated.get("columns"), dict):
        raise InputError(
            "this has the columns of a run's output, and no metadata that says what its prompts were: "
            "score the file that batchinfer run wrote, or name columns with --context-column and --continuation-column"
        )
    return metadata


def _type(schema: pa.Schema, name: str, option: str) -> pa.DataType:
    if name not in schema.names:
        raise InputError(f"{option} {name}: there is no such column. {_columns(schema)}")
    return schema.field(name).type


def _check(schema: pa.Schema, name: str, option: str, fits: Any, wanted: str) -> None:
    type_ = _type(schema, name, option)
    if not fits(type_):
        raise InputError(f"{option} {name}: the column must hold {wanted}, not {type_}")


def _columns(schema: pa.Schema) -> str:
    shown = [f"{field.name} ({field.type})" for field in list(schema)[:_SHOWN_COLUMNS]]
    more = f" and {len(schema) - len(shown)} more" if len(schema) > len(shown) else ""
    return f"Columns: {', '.join(shown)}{more}"
