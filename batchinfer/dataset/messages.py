"""Chat messages as an Arrow column or JSON brings them -> what chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from batchinfer.dataset.row_input_error import RowInputError, check_text
from batchinfer.types import ErrorCode

_TEXT_PARTS = ("text", "input_text", "output_text")


def clean_messages(value: Any, system: str | None = None) -> list[dict[str, Any]]:
    """The messages of one row, null keys dropped and text parts joined.

    Arrow fills a key that other rows have with null; a template that asks whether `tool_calls` is
    there must not find it. `system` goes first unless the row starts with a system message.
    Raises RowInputError (invalid_messages) naming the message, counted from 1.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise _invalid("messages must be a non-empty list" if value != [] else "there are no messages")
    messages = [_clean_message(message, number) for number, message in enumerate(value, start=1)]
    if system is not None and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _clean_message(value: Any, number: int) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _invalid(f"message {number} is {'null' if value is None else type(value).__name__}, not an object")
    message = drop_nulls(value)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _invalid(f"message {number} has no role (such as system, user, assistant)")
    if "content" in message:
        message["content"] = _content_text(message["content"], number)
    elif "tool_calls" not in message:
        raise _invalid(f"message {number} ({role}) has no content")
    check_text(json.dumps(message, ensure_ascii=False, default=str), f"message {number}", ErrorCode.INVALID_MESSAGES)
    return message


def _content_text(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(f"message {number} has content of type {type(content).__name__}, not text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise _invalid(f"message {number} has a content part of type {kind!r}: only text can be used")
        if not isinstance(part.get("text"), str):
            raise _invalid(f"message {number} has a text part without text")
        texts.append(part["text"])
    return "".join(texts)


def drop_nulls(value: Any) -> Any:
    """Without the keys, at any depth, whose value is null."""
    if isinstance(value, Mapping):
        return {key: drop_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [drop_nulls(inner) for inner in value]
    return value


def _invalid(message: str) -> RowInputError:
    return RowInputError(ErrorCode.INVALID_MESSAGES, message)
