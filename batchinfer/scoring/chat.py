"""Which tokens of a rendered chat are scored: all, or those of the assistant's turns.

Where the assistant's turns are is asked of the chat template in one of two ways:

* `{% generation %}` blocks, if it has them: what they print.
* else by rendering prefixes: a turn is what stands between the prompt for it (the messages before it,
  with the generation prompt) and the text that ends with it, cut behind its end-of-sequence token where
  only whitespace follows that one, for the model never writes it. Where the whole chat does not begin
  with these texts (the template drops or rewrites earlier turns), the row is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from batchinfer.dataset.messages import clean_messages
from batchinfer.dataset.row_input_error import RowInputError
from batchinfer.errors import InputError
from batchinfer.scoring.encode import ScoreTokenizer
from batchinfer.scoring.item import ScoreItem, Spans, spans_of
from batchinfer.types import ErrorCode, TokenIds

Turns = Literal["assistant", "all"]
TURN_CHOICES: tuple[str, ...] = get_args(Turns)

_Ranges = list[tuple[int, int]]  # of characters


class ChatEncoder:
    """Tokenizes chats to be scored.

    Args:
        turns: "assistant": what the assistant says, or "all": everything but the first token.
        system: goes first in chats that do not start with a system message.
        eos_token_ids: ids that end a turn.
    Raises:
        InputError: the model has no chat template, or `turns` is something else.
    """

    def __init__(
        self, tokenizer: ScoreTokenizer, eos_token_ids: Sequence[int], turns: Turns, system: str | None = None
    ) -> None:
        if turns not in TURN_CHOICES:
            raise InputError(f"--score must be one of {', '.join(TURN_CHOICES)}, got {turns!r}")
        if not tokenizer.chat_template:
            raise InputError("messages cannot be scored: the model has no chat template. Give texts instead")
        self.tokenizer = tokenizer
        self.eos_token_ids = np.array(sorted(eos_token_ids), dtype=np.int32)
        self.turns = turns
        self.system = system

    def item(self, value: Any) -> ScoreItem:
        """The messages of one row. What is wrong with them is the item's error."""
        try:
            return self._item(value)
        except RowInputError as error:
            return ScoreItem(error=error.error)
        except ValueError as error:  # the template's
            return ScoreItem.failed(ErrorCode.INVALID_MESSAGES, str(error))

    def _item(self, value: Any) -> ScoreItem:
        if value is None:
            raise RowInputError(ErrorCode.PROMPT_NULL, "the messages are null")
        if isinstance(value, bytes):
            raise RowInputError(ErrorCode.INVALID_MESSAGES, "the messages are not valid UTF-8")
        messages = clean_messages(value, self.system)
        text, ranges = self._ranges(messages)
        ids, ends = self.tokenizer.encode_with_ends([text], add_special_tokens=False)[0]
        spans = self._spans(ids, ends, ranges)
        if not spans:
            return ScoreItem.empty("the chat has no token with a context")
        return ScoreItem.of_text(text, ids, ends, spans, self.tokenizer.special_ids)

    def _ranges(self, messages: list[dict[str, Any]]) -> tuple[str, _Ranges | None]:
        """The rendered chat, and where in it the turns are that are scored; None: everywhere."""
        if self.turns == "all":
            return self.tokenizer.render_chat(messages, add_generation_prompt=False), None
        if not any(message["role"] == "assistant" for message in messages):
            raise RowInputError(ErrorCode.NOTHING_TO_SCORE, "the chat has no turn of the assistant")
        marked = self.tokenizer.render_chat_turns(messages)
        return marked if marked is not None else self._ranges_by_prefixes(messages)

    def _ranges_by_prefixes(self, messages: list[dict[str, Any]]) -> tuple[str, _Ranges]:
        text = self.tokenizer.render_chat(messages, add_generation_prompt=False)
        ranges = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if index == 0:
                raise _no_mask(index, "it is the first message, so there is no prompt before it")
            prompt = self.tokenizer.render_chat(messages[:index], add_generation_prompt=True)
            upto = self.tokenizer.render_chat(messages[: index + 1], add_generation_prompt=False)
            if not upto.startswith(prompt):
                raise _no_mask(index, "the chat does not begin with the prompt for this turn")
            if not text.startswith(upto):
                raise _no_mask(index, "the template renders it otherwise when more messages follow")
            ranges.append((len(prompt), len(upto)))
        return text, ranges

    def _spans(self, ids: TokenIds, ends: npt.NDArray[np.int32], ranges: _Ranges | None) -> Spans:
        """Tokens that hold a character of the ranges; never the first one, which has no context."""
        starts = np.concatenate(([0], ends[:-1]))
        mask = np.zeros(len(ids), dtype=np.bool_)
        for begin, end in [(0, int(ends[-1]))] if ranges is None else ranges:
            inside = np.flatnonzero((starts < end) & (ends > begin))
            mask[inside if ranges is None else self._without_tail(ids, inside)] = True
        mask[:1] = False
        return spans_of(mask)

    def _without_tail(self, ids: TokenIds, inside: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Up to the turn's last end-of-sequence token, if only whitespace comes behind it."""
        ended = np.flatnonzero(np.isin(ids[inside], self.eos_token_ids))
        if not len(ended):
            return inside
        tail = inside[ended[-1] + 1 :]
        if self.tokenizer.decode(ids[tail].tolist(), False).strip():
            return inside
        return inside[: ended[-1] + 1]


def _no_mask(index: int, reason: str) -> RowInputError:
    return RowInputError(
        ErrorCode.INVALID_MESSAGES,
        f"the chat template does not tell which tokens are the assistant's in message {index + 1}: {reason}. "
        "Use --score all, or a template with generation blocks",
    )


def is_messages(value: Any) -> bool:
    """Whether a Python value is a list of messages."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], Mapping)
