"""Text <-> token ids, over the `tokenizers` library, and prompts from chat messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from batchinfer.models.chat import ChatTemplate
from batchinfer.models.token_bytes import TokenBytes
from batchinfer.types import Messages, TokenIds

if TYPE_CHECKING:
    import tokenizers


class Tokenizer:
    """A tokenizer with its special tokens and chat template.

    Args:
        backend: the `tokenizers` pipeline; its post-processor adds the special tokens.
        special_tokens: role -> text, e.g. {"bos_token": "<s>", "eos_token": "</s>"}; templates see these names.
        chat_template: Jinja source, or None.

    Attributes:
        num_ids: highest id + 1. Ids may be sparse, so this can be more than the number of tokens.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], chat_template: str | None = None
    ) -> None:
        # Both would alter ids behind the caller's back: a truncated prompt is another prompt.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.num_ids = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[TokenIds]:
        """Ids of each text, [num_tokens] int32.

        A text that itself starts with the beginning-of-sequence token gets no second one. Raises ValueError for a
        text that is not valid Unicode (lone surrogates).
        """
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeError) as e:
            raise ValueError(_not_unicode(texts)) from e
        rows = [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
        return [self._one_bos(text, ids) for text, ids in zip(texts, rows, strict=True)] if add_special_tokens else rows

    def encode_with_ends(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[tuple[TokenIds, npt.NDArray[np.int32]]]:
        """As encode_batch, with the number of characters of the text up to each token's end, [num_tokens] int32.

        Token i holds the characters [ends[i - 1], ends[i]), whitespace that tokenizers leave out of a token's
        place included. Tokens that are added hold none; of a character's several tokens each ends behind it.
        """
        try:
            encodings = self.backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeError) as e:
            raise ValueError(_not_unicode(texts)) from e
        rows = []
        for text, encoding in zip(texts, encodings, strict=True):
            all_ids = np.array(encoding.ids, dtype=np.int32)
            ids = self._one_bos(text, all_ids) if add_special_tokens else all_ids
            ends = np.array([end for _, end in encoding.offsets], dtype=np.int32)[len(all_ids) - len(ids) :]
            rows.append((ids, np.maximum.accumulate(ends)))
        return rows

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Ids the tokenizer does not know (padded vocabularies) decode to nothing."""
        known = [int(i) for i in ids if 0 <= i < self.num_ids]
        return self.backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text: UTF-8, or a part of a character's. A special token as it is written."""
        return self._token_bytes[token_id]

    def render_chat(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """Messages through the chat template. Raises ValueError without one, or if it refuses the messages."""
        if self._chat is None:
            raise ValueError("the model has no chat template; use prompts instead of messages")
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt)

    def encode_chat(self, messages: Messages, *, add_generation_prompt: bool = True) -> TokenIds:
        """Ids of the rendered messages; the template writes the special tokens, so none are added."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode_batch([text], add_special_tokens=False)[0]

    def render_chat_turns(self, messages: Messages) -> tuple[str, list[tuple[int, int]]] | None:
        """The rendered messages and the characters of the assistant's turns, where the template marks them.

        None if it does not: it has no `{% generation %}` blocks, or they are not plain text in it.
        Raises ValueError as render_chat.
        """
        return None if self._chat is None else self._chat.render_turns(messages)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    def digest(self) -> str:
        """Hex sha256 of everything that decides the ids of a text. The chat template has a digest of its own."""
        parts = [self.backend.to_str(), json.dumps(self.special_tokens, sort_keys=True)]
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self.backend)

    @cached_property
    def _chat(self) -> ChatTemplate | None:
        return None if self.chat_template is None else ChatTemplate(self.chat_template, self.special_tokens)

    def _id_of(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self.backend.token_to_id(text)

    def _one_bos(self, text: str, ids: TokenIds) -> TokenIds:
        if self.bos_token_id is None or len(ids) < 2 or not (ids[:2] == self.bos_token_id).all():
            return ids
        return ids[1:] if text.startswith(self.special_tokens["bos_token"]) else ids


def _not_unicode(texts: Sequence[str]) -> str:
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            return f"text {index} is not a string but {type(text).__name__}"
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:
            return f"text {index} is not valid Unicode: {e}"
    return "a text could not be tokenized"
