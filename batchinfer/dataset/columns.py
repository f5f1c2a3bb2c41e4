"""Which columns of a dataset hold the prompts, ids and parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import pyarrow as pa
import pyarrow.types as pt

from batchinfer.dataset.row_params import check_params_type, is_list, is_text
from batchinfer.errors import InputError
from batchinfer.types import SamplingParams

PROMPT_NAMES = ("prompt", "text")
MESSAGES_NAMES = ("messages",)
TOKEN_IDS_NAMES = ("prompt_token_ids", "token_ids")
ID_NAMES = ("id", "custom_id")
PARAMS_NAME = "sampling_params"
BODY_NAME = "body"
URL_NAME = "url"
#: Columns of these names are used without being named.
USUAL_NAMES = frozenset({*PROMPT_NAMES, *MESSAGES_NAMES, *TOKEN_IDS_NAMES, *ID_NAMES, PARAMS_NAME, BODY_NAME})
_SHOWN_COLUMNS = 50


@dataclass(frozen=True, slots=True)
class InputColumns:
    """Names of columns; exactly one of prompt, messages, token_ids and body is set.

    Attributes:
        prompt: text.
        messages: list of structs with role and content.
        token_ids: list of whole numbers, run as they are.
        id: text or whole numbers; what a row's random stream is keyed by.
        params: struct of sampling parameters, which count before all others.
        priority: numbers; higher runs earlier.
        body: JSON text of an OpenAI Batch request, which also brings sampling parameters.
    """

    prompt: str | None = None
    messages: str | None = None
    token_ids: str | None = None
    id: str | None = None
    params: str | None = None
    priority: str | None = None
    body: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """The columns that prompts are made of; there need be no url."""
        names = frozenset(name for name in asdict(self).values() if name is not None)
        return names if self.body is None else names | {URL_NAME}

    def used(self, schema: pa.Schema) -> list[str]:
        """The columns of `schema` that prompts are made of, in its order."""
        return [name for name in schema.names if name in self.names]


def find_columns(
    schema: pa.Schema,
    *,
    prompt: str | None = None,
    messages: str | None = None,
    id: str | None = None,
    priority: str | None = None,
) -> InputColumns:
    """The columns that are named, and those that go by a usual name and have a fitting type.

    Names looked for: prompt, text, messages, prompt_token_ids, token_ids; id, custom_id;
    sampling_params; body beside custom_id (OpenAI Batch). A `prompt` of lists of messages counts as
    messages. Raises InputError if a named column is missing or has the wrong type, if no prompts
    are found, or if more than one column could be meant.
    """
    params = PARAMS_NAME if PARAMS_NAME in schema.names else None
    if params:
        check_params_type(params, schema.field(params).type)
    if priority is not None:
        _require(schema, priority, "--priority-column", is_number, "numbers")
    kind, column = _find_prompts(schema, prompt, messages)
    return InputColumns(**{kind: column}, id=_find_id(schema, id), params=params, priority=priority)


def row_param_names(schema: pa.Schema, columns: InputColumns) -> frozenset[str]:
    """The sampling parameters that rows may set themselves; of OpenAI Batch bodies that is not known in advance."""
    if columns.body is not None:
        return frozenset(SamplingParams.names())
    if columns.params is None:
        return frozenset()
    return frozenset(field.name for field in schema.field(columns.params).type)


def is_messages(type_: pa.DataType) -> bool:
    if not is_list(type_) or not pt.is_struct(type_.value_type):
        return False
    names = {field.name: field.type for field in type_.value_type}
    return "role" in names and is_text(names["role"]) and ("content" in names or "tool_calls" in names)


def is_token_ids(type_: pa.DataType) -> bool:
    return is_list(type_) and bool(pt.is_integer(type_.value_type))


def is_number(type_: pa.DataType) -> bool:
    return bool(pt.is_integer(type_) or pt.is_floating(type_))


def _is_id(type_: pa.DataType) -> bool:
    return is_text(type_) or bool(pt.is_integer(type_))


def _find_prompts(schema: pa.Schema, prompt: str | None, messages: str | None) -> tuple[str, str]:
    """(field of InputColumns, column)"""
    if prompt is not None and messages is not None:
        raise InputError("give --prompt-column or --messages-column, not both")
    if messages is not None:
        _require(schema, messages, "--messages-column", is_messages, "lists of structs with role and content")
        return "messages", messages
    if prompt is not None:
        return _named_prompt(schema, prompt)
    found = _candidates(schema)
    if len(found) > 1:
        options = " or ".join(
            f"--{'messages' if kind == 'messages' else 'prompt'}-column {name}" for kind, name in found
        )
        raise InputError(f"more than one column could hold the prompts: choose {options}")
    if found:
        return found[0]
    if BODY_NAME in schema.names and "custom_id" in schema.names and is_text(schema.field(BODY_NAME).type):
        return "body", BODY_NAME
    raise _nothing_found(schema)


def _named_prompt(schema: pa.Schema, name: str) -> tuple[str, str]:
    type_ = _field(schema, name, "--prompt-column").type
    if is_text(type_):
        return "prompt", name
    if is_token_ids(type_):
        return "token_ids", name
    if is_messages(type_):
        raise InputError(f"column {name!r} holds messages: use --messages-column {name}")
    raise InputError(f"--prompt-column {name}: the column must hold text or lists of token ids, not {type_}")


def _candidates(schema: pa.Schema) -> list[tuple[str, str]]:
    """At most one column of each kind, the first usual name of a fitting type."""
    rules: tuple[tuple[str, tuple[str, ...], Callable[[pa.DataType], bool]], ...] = (
        ("prompt", PROMPT_NAMES, is_text),
        ("messages", (*MESSAGES_NAMES, PROMPT_NAMES[0]), is_messages),
        ("token_ids", TOKEN_IDS_NAMES, is_token_ids),
    )
    found = []
    for kind, names, fits in rules:
        fitting = [name for name in names if name in schema.names and fits(schema.field(name).type)]
        if fitting:
            found.append((kind, fitting[0]))
    return found


def _nothing_found(schema: pa.Schema) -> InputError:
    for name in (*PROMPT_NAMES, *MESSAGES_NAMES, *TOKEN_IDS_NAMES):
        if name in schema.names:
            wanted = {"messages": "lists of structs with role and content"}.get(name, "text")
            wanted = "lists of whole numbers" if name in TOKEN_IDS_NAMES else wanted
            return InputError(
                f"column {name!r} must hold {wanted}, not {schema.field(name).type}; "
                f"use another with --prompt-column or --messages-column. {_columns(schema)}"
            )
    return InputError(
        "no column is named prompt, text or messages: name yours with --prompt-column or --messages-column. "
        + _columns(schema)
    )


def _find_id(schema: pa.Schema, name: str | None) -> str | None:
    if name is not None:
        _require(schema, name, "--id-column", _is_id, "text or whole numbers")
        return name
    return next((n for n in ID_NAMES if n in schema.names and _is_id(schema.field(n).type)), None)


def _require(schema: pa.Schema, name: str, option: str, fits: Callable[[pa.DataType], bool], wanted: str) -> None:
    type_ = _field(schema, name, option).type
    if not fits(type_):
        raise InputError(f"{option} {name}: the column must hold {wanted}, not {type_}")


def _field(schema: pa.Schema, name: str, option: str) -> pa.Field:
    if name not in schema.names:
        raise InputError(f"{option} {name}: there is no such column. {_columns(schema)}")
    return schema.field(name)


def _columns(schema: pa.Schema) -> str:
    shown = [f"{field.name} ({field.type})" for field in list(schema)[:_SHOWN_COLUMNS]]
    more = f" and {len(schema) - len(shown)} more" if len(schema) > len(shown) else ""
    return f"Columns: {', '.join(shown)}{more}"
