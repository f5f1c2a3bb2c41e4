"""Chat messages as Arrow, JSON or Python bring them -> what chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from batchinfer.models.message_images import image_problem, is_image
from batchinfer.types import ErrorCode

_TEXT_PARTS = ("text", "input_text", "output_text")


class MessagesError(ValueError):
    """Messages that no chat template can be given; `code` is the row's error."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INVALID_MESSAGES) -> None:
        super().__init__(message)
        self.code = code


class CleanMessages(list[dict[str, Any]]):
    """What clean_messages() made, so that it need not be done again."""


def clean_messages(value: Any, *, joins_text: bool = True) -> CleanMessages:
    """The messages of one chat as plain data, null keys dropped.

    Args:
        joins_text: make one text of content that comes in parts, and refuse parts that are no text: most templates
            take texts only. Else parts are left to the template.

    Arrow fills a key that other rows have with null; a template that asks whether `tool_calls` is
    there must not find it. Templates come with models, so they see JSON types and no objects with methods.
    Raises MessagesError naming the message, counted from 1.
    """
    if isinstance(value, CleanMessages):
        return value
    if hasattr(value, "tolist"):  # a numpy array of messages, as data frames give them
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise MessagesError(f"messages must be a list of messages, not {_kind(value)}")
    if not value:
        raise MessagesError("there are no messages")
    return CleanMessages(_clean_message(message, number, joins_text) for number, message in enumerate(value, start=1))


def _clean_message(value: Any, number: int, joins_text: bool) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise MessagesError(f"message {number} is {_kind(value)}, not an object with role and content")
    message = {
        str(key): _content(inner, number, joins_text) if key == "content" else _plain(inner)
        for key, inner in value.items()
        if inner is not None
    }
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise MessagesError(f"message {number} has no role (such as system, user, assistant)")
    if "content" not in message and not message.get("tool_calls"):
        raise MessagesError(f"message {number} ({role}) has no content")
    _check_text(json.dumps(message, ensure_ascii=False), number)
    return message


def _content(content: Any, number: int, joins_text: bool) -> Any:
    if isinstance(content, str):
        return str(content)
    if hasattr(content, "tolist"):
        content = content.tolist()
    if not isinstance(content, (list, tuple)):
        raise MessagesError(f"message {number} has content of type {_kind(content)}, not text")
    return "".join(_part_text(part, number) for part in content) if joins_text else _plain(content)


def _part_text(part: Any, number: int) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if is_image(kind):
        problem = image_problem(part)
        why = "an image, and the model reads text only" if problem is None else f"an unreadable image: {problem}"
        raise MessagesError(f"message {number} has {why}", ErrorCode.INVALID_IMAGE)
    if kind not in _TEXT_PARTS:
        raise MessagesError(f"message {number} has a content part of type {kind!r}: only text can be used")
    if not isinstance(part.get("text"), str):
        raise MessagesError(f"message {number} has a text part without text")
    return part["text"]


def _plain(value: Any) -> Any:
    """Rebuilt from JSON types, without the keys whose value is null at any depth."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays, as Parquet readers give them
        return _plain(value.tolist())
    return str(value)


def _check_text(text: str, number: int) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise MessagesError(f"message {number} is not valid Unicode: it holds {half}") from error


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
