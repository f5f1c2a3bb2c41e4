"""The bytes that one token adds to a text."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes by token id, of tokenizers whose decoder is byte-level or SentencePiece's; others by decoding alone."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Nothing for an id that the tokenizer does not know; an added token as it is written."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._find(token_id)
        return found

    def _find(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if "ByteLevel" in self._decoders:
            known = all(character in _BYTE_OF for character in token)
            return bytes(_BYTE_OF[character] for character in token) if known else token.encode()
        if "ByteFallback" in self._decoders:
            byte = _BYTE_TOKEN.fullmatch(token)
            if byte is not None:
                return bytes([int(byte[1], 16)])
        if "Metaspace" in self._decoders or "Replace" in self._decoders:
            return token.replace("\u2581", " ").encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def _decoders(self) -> frozenset[str]:
        decoder = self._backend.decoder
        return frozenset() if decoder is None else frozenset(_types(json.loads(decoder.__getstate__())))


def _types(decoder: dict[str, Any]) -> list[str]:
    return [decoder["type"], *(name for inner in decoder.get("decoders", []) for name in _types(inner))]


def _byte_characters() -> dict[str, int]:
    """The printable character that byte-level tokenizers write for each byte (GPT-2's table).

    Printable bytes stand for themselves; the others get the characters from U+0100 on, in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
