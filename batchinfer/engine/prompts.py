"""What callers of the engine write as a prompt -> Prompt. A prompt that cannot run is a row's error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from batchinfer.dataset.messages import clean_messages
from batchinfer.dataset.row_input_error import RowInputError, check_text
from batchinfer.dataset.token_ids import checked_token_ids
from batchinfer.types import ErrorCode, Prompt, SamplingParams, row_key


def make_prompt(
    content: Any, params: SamplingParams, tokenizer: Any, vocab_size: int, row_index: int, row_id: str | int | None
) -> Prompt:
    """A Prompt from text, token ids or chat messages (which get the chat template and no second BOS).

    None, text that is not valid Unicode, messages that the template refuses and ids outside the
    vocabulary are errors of the prompt. Raises ValueError for what is no prompt at all.
    """
    try:
        ids = checked_token_ids(_encode(content, tokenizer), vocab_size)
    except RowInputError as error:
        ids = np.empty(0, dtype=np.int32)
        return Prompt(row_index, ids, params, row_key(row_id, ids), error=error.error)
    except ValueError as error:
        raise ValueError(f"prompt {row_index}: {error}") from error
    return Prompt(row_index, ids, params, row_key(row_id, ids))


def _encode(content: Any, tokenizer: Any) -> np.ndarray:
    if content is None:
        raise RowInputError(ErrorCode.PROMPT_NULL, "the prompt is null")
    if isinstance(content, str):
        return tokenizer.encode_batch([check_text(content, "the prompt")])[0]
    if isinstance(content, (list, tuple, np.ndarray)) and len(content) and isinstance(content[0], Mapping):
        return _encode_chat(list(content), tokenizer)
    try:
        ids = np.asarray(content)
    except ValueError:  # lists of unequal length
        ids = np.empty(())
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise ValueError(f"a prompt must be text, a list of token ids or a list of messages, got {content!r:.100}")
    return ids


def _encode_chat(messages: list[Any], tokenizer: Any) -> np.ndarray:
    if not tokenizer.chat_template:
        raise ValueError("the model has no chat template; use prompts instead of messages")
    cleaned = clean_messages(messages)
    try:
        return tokenizer.encode_chat(cleaned)
    except ValueError as error:
        raise RowInputError(ErrorCode.INVALID_MESSAGES, str(error)) from error
