"""The chat messages of one row: what is wrong with them is the row's error."""

from __future__ import annotations

from typing import Any

from batchinfer.dataset.row_input_error import RowInputError
from batchinfer.models import messages
from batchinfer.models.messages import CleanMessages, MessagesError


def clean_messages(value: Any, system: str | None = None) -> CleanMessages:
    """As the chat template expects them; `system` goes first unless the row starts with a system message.

    Raises RowInputError (invalid_messages, invalid_image) naming the message, counted from 1.
    """
    try:
        cleaned = messages.clean_messages(value)
    except MessagesError as error:
        raise RowInputError(error.code, str(error)) from error
    if system is not None and cleaned[0]["role"] not in ("system", "developer"):
        return CleanMessages([{"role": "system", "content": system}, *cleaned])
    return cleaned
