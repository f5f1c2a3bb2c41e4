from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from batchinfer.engine.detokenizer import IncrementalDetokenizer, OutputText, _token_classes
from batchinfer.models.tokenizer import Tokenizer

BROKEN = "\ufffd"


class Pieces:
    """A tokenizer whose id i decodes to pieces[i]; counts the ids it decodes."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces
        self.num_ids = len(pieces)
        self.num_decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.num_decoded += len(ids)
        return "".join(self.pieces[i] for i in ids if 0 <= i < len(self.pieces))


def byte_level() -> Tokenizer:
    """All 256 bytes (ids 0..255 = the byte), pieces of several bytes that cut characters, an end token."""
    printable = (*range(33, 127), *range(161, 173), *range(174, 256))  # GPT-2's bytes_to_unicode
    others = iter(range(256, 512))
    chars = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    merged = [b" a", b"the", b"\xe6\xb1", b"\x89 x", b"\xf0\x9f", b"a\xc3", b"\x99\x82!", b"\n\n", b"\xbf\xbd"]
    vocab = {char: byte for byte, char in enumerate(chars)}
    vocab |= {"".join(chars[b] for b in piece): 256 + i for i, piece in enumerate(merged)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, {"eos_token": "<end>"})


def sentencepiece(strip_with: str) -> Tokenizer:
    """Byte fallback as Llama 2 has it, the leading space taken away by Strip or by Metaspace."""
    pieces = [
        "<unk>",
        "▁",
        "▁a",
        "a",
        "é",
        "▁▁",
        "the",
        "\ufffd",
        "a\ufffd",
        "\n",
        "1",
        *(f"<0x{b:02X}>" for b in range(256)),
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    backend.decoder = {
        "strip": decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    }[strip_with]
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, {"eos_token": "<end>"})


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.backend.token_to_id(token)
    assert token_id is not None
    return token_id


def fallback_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    return [id_of(tokenizer, f"<0x{b:02X}>") for b in data]


def embedded() -> Tokenizer:
    """The tokenizer of SmolLM2-135M-Instruct."""
    pytest.importorskip("gguf")
    from batchinfer.models.source import resolve_model

    return resolve_model("smollm2-135m").tokenizer


BUILDERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "strip": lambda: sentencepiece("strip"),
    "metaspace": lambda: sentencepiece("metaspace"),
    "embedded": embedded,
}


@pytest.fixture(scope="module", params=BUILDERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return BUILDERS[request.param]()


def pushed(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[str], str]:
    """The pieces, and what finish adds; every text so far is checked against the full decoding."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces: list[str] = []
    for count, token_id in enumerate(ids, start=1):
        pieces.append(detokenizer.push(token_id))
        assert "".join(pieces) + detokenizer.pending_text == tokenizer.decode(ids[:count])
    rest = detokenizer.finish()
    assert detokenizer.pending_text == ""
    return pieces, rest


class TestPiecesAddUpToTheFullDecoding:
    @settings(max_examples=400, deadline=None)
    @given(data=st.data())
    def test_random_ids(self, tokenizer: Tokenizer, data: st.DataObject) -> None:
        # Some ids are unknown to the tokenizer. Runs of a few ids make broken bytes and spaces meet.
        any_id = st.integers(0, tokenizer.num_ids + 2)
        few = data.draw(st.lists(any_id, min_size=1, max_size=5))
        ids = data.draw(st.lists(st.sampled_from(few) | any_id, max_size=60))
        pieces, rest = pushed(tokenizer, ids)
        assert "".join(pieces) + rest == tokenizer.decode(ids)

    @settings(max_examples=300, deadline=None)
    @given(text=st.text(st.sampled_from("a 1\n\x7féñ汉字🙂\u200d\ufffd▁"), max_size=12), cut=st.integers(0, 30))
    def test_bytes_of_text_and_of_cut_text(self, tokenizer: Tokenizer, text: str, cut: int) -> None:
        first = tokenizer.backend.token_to_id("<0x00>") or 0  # ids of the 256 bytes, in both kinds built here
        for data in (text.encode(), text.encode()[cut:], text.encode()[:cut] + b"\xff" + text.encode()):
            ids = [first + byte for byte in data]
            pieces, rest = pushed(tokenizer, ids)
            assert "".join(pieces) + rest == tokenizer.decode(ids)

    def test_every_token_of_the_vocabulary_after_another(self, tokenizer: Tokenizer) -> None:
        step = max(1, tokenizer.num_ids // 1500)
        ids = list(range(0, tokenizer.num_ids, step)) + list(range(min(400, tokenizer.num_ids)))
        detokenizer = IncrementalDetokenizer(tokenizer)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == tokenizer.decode(ids)


class TestBytesOfACharacter:
    TEXT = "🙂🙂 汉字 é"

    @pytest.mark.parametrize("kind", ["byte-level", "strip", "metaspace"])
    def test_characters_split_over_tokens_show_no_replacement_character(self, kind: str) -> None:
        tokenizer = BUILDERS[kind]()
        ids = list(self.TEXT.encode()) if kind == "byte-level" else fallback_ids(tokenizer, self.TEXT.encode())
        pieces, rest = pushed(tokenizer, ids)
        assert "".join(pieces) + rest == self.TEXT == tokenizer.decode(ids)
        assert BROKEN not in "".join(pieces)

    def test_embedded_tokenizer_round_trip(self) -> None:
        tokenizer = embedded()
        ids = tokenizer.encode_batch([self.TEXT])[0].tolist()
        assert len(ids) > len(self.TEXT)  # characters are split
        pieces, rest = pushed(tokenizer, ids)
        assert "".join(pieces) == self.TEXT
        assert rest == ""

    @pytest.mark.parametrize("kind", ["byte-level", "strip", "metaspace"])
    @pytest.mark.parametrize("num_bytes", [1, 2, 3, 5, 10, 13])
    def test_cut_inside_a_character_equals_the_full_decoding(self, kind: str, num_bytes: int) -> None:
        tokenizer = BUILDERS[kind]()
        data = self.TEXT.encode()[:num_bytes]
        ids = list(data) if kind == "byte-level" else fallback_ids(tokenizer, data)
        pieces, rest = pushed(tokenizer, ids)
        assert "".join(pieces) + rest == tokenizer.decode(ids)
        assert BROKEN in rest

    @pytest.mark.parametrize("kind", BUILDERS)
    def test_a_genuine_final_replacement_character_is_kept(self, kind: str) -> None:
        tokenizer = BUILDERS[kind]()
        text = "a\ufffd"
        if kind == "embedded":
            ids = tokenizer.encode_batch([text])[0].tolist()
        else:
            ids = list(text.encode()) if kind == "byte-level" else fallback_ids(tokenizer, text.encode())
        pieces, rest = pushed(tokenizer, ids)
        assert "".join(pieces) + rest == tokenizer.decode(ids) == text

    def test_a_spoilt_run_of_byte_tokens_is_not_given_out_early(self) -> None:
        tokenizer = sentencepiece("strip")
        a = id_of(tokenizer, "a")
        pieces, rest = pushed(tokenizer, [a, *fallback_ids(tokenizer, b"\n\xc3\xa9\xff"), a])
        assert pieces == ["a", "", "", "", "", BROKEN * 4 + "a"]
        assert rest == ""
        pieces, rest = pushed(tokenizer, [a, *fallback_ids(tokenizer, b"\n\xc3\xa9"), a])
        assert pieces == ["a", "", "", "", "\néa"]
        assert rest == ""

    def test_kinds_of_token_are_told_apart(self) -> None:
        assert not _token_classes(byte_level()).has_byte_fallback
        assert not _token_classes(embedded()).has_byte_fallback
        assert not _token_classes(Pieces("a", BROKEN, "b")).has_byte_fallback
        for tokenizer in (sentencepiece("strip"), sentencepiece("metaspace")):
            classes = _token_classes(tokenizer)
            names = tokenizer.backend.get_vocab()
            assert {i for i in names.values() if classes[i].is_fallback_byte} == set(
                fallback_ids(tokenizer, bytes(range(256)))
            )
            assert {name for name, i in names.items() if classes[i].is_invisible} == {"<end>"}
            assert classes[tokenizer.num_ids + 5].is_invisible


class TestWorkPerToken:
    @pytest.mark.parametrize("pattern", [[0], [1], [0, 1], [1, 1, 0], [2], [2, 1]])
    def test_a_push_decodes_few_tokens_however_long_the_text(self, pattern: list[int]) -> None:
        tokenizer = Pieces("ab", BROKEN, "")
        detokenizer = IncrementalDetokenizer(tokenizer)
        ids = pattern * (3000 // len(pattern))
        text = "".join(map(detokenizer.push, ids[:30]))
        tokenizer.num_decoded = 0
        text += "".join(map(detokenizer.push, ids[30:]))
        assert tokenizer.num_decoded <= 60 * len(ids)
        assert text + detokenizer.finish() == tokenizer.decode(ids)

    def test_broken_bytes_without_end_stay_cheap(self) -> None:
        tokenizer = byte_level()
        detokenizer = IncrementalDetokenizer(tokenizer)
        ids = [0xE6, 0xB1, 0xFF, 0xE6, 0xE6, 0xB1] * 500
        most_held = 0
        text = ""
        for token_id in ids:
            text += detokenizer.push(token_id)
            most_held = max(most_held, len(detokenizer._held))
        assert most_held <= 8
        assert text + detokenizer.finish() == tokenizer.decode(ids)

    def test_without_stop_strings_nothing_is_decoded_before_the_end(self) -> None:
        tokenizer = Pieces("a", "b")
        output = OutputText(tokenizer, (), False)
        assert [output.push(i) for i in (0, 1, 1)] == [None] * 3
        assert tokenizer.num_decoded == 0
        assert output.finish() == "abb"
        assert output.token_ids == [0, 1, 1]
