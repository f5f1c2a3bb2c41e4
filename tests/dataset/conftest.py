"""A tokenizer whose ids are the bytes of the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from batchinfer.types import TokenIds

BOS = 256


class ByteTokenizer:
    def __init__(self, bos: bool = False, chat_template: str | None = "bytes") -> None:
        self.num_ids = 257
        self.chat_template = chat_template
        self.bos = bos
        self.num_calls = 0
        self.seen_messages: list[list[dict[str, Any]]] = []

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[TokenIds]:
        self.num_calls += 1
        start = [BOS] if self.bos and add_special_tokens else []
        return [np.array([*start, *text.encode()], dtype=np.int32) for text in texts]

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        self.seen_messages.append(messages)
        if any(message["role"] == "refused" for message in messages):
            raise RuntimeError("role 'refused' is unknown")
        return "".join(f"<{message['role']}>{message.get('content', '')}" for message in messages) + "<assistant>"


@pytest.fixture
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture
def bos_tokenizer() -> ByteTokenizer:
    return ByteTokenizer(bos=True)


@pytest.fixture
def plain_tokenizer() -> ByteTokenizer:
    """Of a model without chat template."""
    return ByteTokenizer(chat_template=None)
