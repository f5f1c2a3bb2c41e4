"""The bytes of a text's tokens are the text's bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from batchinfer.models.hf_tokenizer import read_hf_tokenizer
from batchinfer.models.source import resolve_model
from batchinfer.models.token_bytes import TokenBytes
from batchinfer.models.tokenizer import Tokenizer

TEXTS = ["hello world 12", "  é\n🙂🙂 汉字\t", "a\u00ad\u0000b", "Ġ ▁ <0x41>"]


def byte_fallback() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abehlowrd▁", "▁a"]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend, {})


@pytest.mark.parametrize("text", TEXTS[:3])
def test_byte_level_tokens_add_up(text: str, byte_tokenizer: Any, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    tokenizer = read_hf_tokenizer(tmp_path)
    ids = tokenizer.encode_batch([text], add_special_tokens=False)[0].tolist()
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize("text", [*TEXTS[:3], "hello a world"])
def test_byte_fallback_tokens_add_up(text: str) -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode_batch([text])[0].tolist()
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_of_the_embedded_model_add_up(text: str) -> None:
    tokenizer = resolve_model("smollm2-135m").tokenizer
    ids = tokenizer.encode_batch([text], add_special_tokens=False)[0].tolist()
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.eos_token_id is not None
    assert tokenizer.token_bytes(tokenizer.eos_token_id).decode() == tokenizer.special_tokens["eos_token"]


def test_unknown_ids_and_other_decoders() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"hello": 0, "[UNK]": 1}, unk_token="[UNK]"))
    assert [TokenBytes(backend)[token_id] for token_id in (0, 1, 2, -1)] == [b"hello", b"[UNK]", b"", b""]
