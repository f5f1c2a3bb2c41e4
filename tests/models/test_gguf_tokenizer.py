"""Tokenizers rebuilt from GGUF metadata, against a slow twin that implements the rules independently."""

from __future__ import annotations

import functools
import heapq
import random
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex

from batchinfer.errors import InputError
from batchinfer.models.gguf_file import GGUFFile
from batchinfer.models.gguf_tokenizer import PRE_TOKENIZERS, read_gguf_tokenizer, sentencepiece_merges
from batchinfer.models.source import ModelSource, resolve_model
from batchinfer.models.tokenizer import Tokenizer

GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def byte_alphabet() -> dict[int, str]:
    """GPT-2's spelling of bytes: printable ones are themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}


class SlowBPE:
    """Byte-level BPE by the book: special tokens, pre-tokenization, then the best-ranked pair again and again."""

    def __init__(self, metadata: dict[str, Any], split: Any, ignore_merges: bool = False) -> None:
        self.ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(m.split(" ")): rank for rank, m in enumerate(metadata["tokenizer.ggml.merges"])}
        kinds = metadata["tokenizer.ggml.token_type"]
        self.special = [token for token, i in self.ids.items() if kinds[i] in (3, 4)]
        self.split = split
        self.ignore_merges = ignore_merges
        self.alphabet = byte_alphabet()

    def encode(self, text: str) -> list[int]:
        parts = [text]
        if self.special:
            longest_first = sorted(self.special, key=len, reverse=True)
            parts = regex.split("(" + "|".join(map(regex.escape, longest_first)) + ")", text)
        ids = []
        for index, part in enumerate(parts):
            if index % 2:
                ids.append(self.ids[part])
            else:
                for piece in self.split(part):
                    ids += self.piece(piece)
        return ids

    def piece(self, piece: str) -> list[int]:
        symbols = [self.alphabet[b] for b in piece.encode()]
        if self.ignore_merges and "".join(symbols) in self.ids:
            return [self.ids["".join(symbols)]]
        symbols = [s for s in symbols if s in self.ids]  # bytes without a token vanish
        while True:
            pairs = [
                (self.ranks[pair], i)
                for i in range(len(symbols) - 1)
                if (pair := tuple(symbols[i : i + 2])) in self.ranks
            ]
            if not pairs:
                return [self.ids[s] for s in symbols]
            _, i = min(pairs)
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def split_smollm(text: str) -> list[str]:
    """Every digit alone (Unicode numeric, as Rust's char::is_numeric), then GPT-2's pattern on what lies between."""
    pieces: list[str] = []
    for part in regex.split(r"(\p{N})", text):
        pieces += regex.findall(GPT2, part)
    return pieces


PIECES = [
    "Hello", " world", "  ", "   ", "\n", "\n\n", "\t", " \n ", "\r\n",
    "1", "42", "007", "3.14", " 5", "   9", "½", "²", "٣",
    "Ⅷ", "we're", "I'LL", "don't", "'s", "’s", "naïve", "é", "e\u0301",
    "ß", "汉字", "日本語", "한국어", "العربية", "हिन्दी", "ไทย", "🙂", "👩‍👩‍👧‍👦",
    "🇩🇪", "\u00a0", "\u3000", "\u200b", "\ufeff", "def f(x):\n    return x+1\n", "\t\tif (a<=b) {", "}}", "//",
    "<!--", "https://a.b/c?d=e&f=1", "e=mc^2", "$9.99", "50%", "_", "__init__", "...", "?!",
    "--", "——", "“q”", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start", "<|im_end|", "|>",
    "<repo_name>", "A", "z", "ABC", " a", "\u0001", "\x7f", "0", "ﬁ",
    "Å", "µ", "²³", "𝒳", "𐍈", "ꙮ", "\u2028", "\u0004", "a\u0004b", "\u0016",
]  # fmt: skip

#: Of PIECES, those that SmolLM2 has no token for.
NO_TOKEN = {"\u0004", "\u0016"}


@functools.cache
def texts() -> tuple[str, ...]:
    rng = random.Random(0)
    mixed = ["".join(rng.choices(PIECES, k=rng.randint(2, 12))) for _ in range(300)]
    return (*PIECES, "", " ", "a  1", "a   12 34\n  5", "x = 10\n    y = 20", *mixed)


@pytest.fixture(scope="module")
def embedded() -> ModelSource:
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def embedded_metadata(embedded: ModelSource) -> dict[str, Any]:
    file = GGUFFile(embedded.path)
    file.close()
    return file.metadata


def test_smollm2_equals_the_slow_tokenizer(embedded: ModelSource, embedded_metadata: dict[str, Any]) -> None:
    assert embedded_metadata["tokenizer.ggml.pre"] == "smollm"
    slow = SlowBPE(embedded_metadata, split_smollm)
    assert len(texts()) > 300
    for text, ids in zip(texts(), embedded.tokenizer.encode_batch(texts()), strict=True):
        assert ids.dtype == np.int32
        assert ids.tolist() == slow.encode(text), repr(text)


def test_whitespace_before_digits(embedded: ModelSource, embedded_metadata: dict[str, Any]) -> None:
    """What the plain GPT-2 pattern gets wrong for this model: it would glue one space to the digit."""
    slow = SlowBPE(embedded_metadata, lambda text: regex.findall(GPT2, text))
    text = "a   12"
    ids = embedded.tokenizer.encode_batch([text])[0].tolist()
    tokens = embedded_metadata["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in ids] == ["a", "ĠĠĠ", "1", "2"]
    assert slow.encode(text) != ids


def test_smollm2_equals_llama_cpp(embedded: ModelSource) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    model = llama_cpp.Llama(model_path=str(embedded.path), vocab_only=True, verbose=False)
    # Bytes without a token vanish in both, but llama.cpp does not merge across the gap and `tokenizers` does.
    samples = [text for text in texts() if not set(text) & NO_TOKEN]
    assert len(samples) > 200
    for text, ids in zip(samples, embedded.tokenizer.encode_batch(samples), strict=True):
        assert ids.tolist() == model.tokenize(text.encode(), add_bos=False, special=True), repr(text)


def test_smollm2_decodes_what_it_encodes(embedded: ModelSource) -> None:
    tokenizer = embedded.tokenizer
    samples = [text for text in texts() if not set(text) & NO_TOKEN]
    for text, ids in zip(samples, tokenizer.encode_batch(samples), strict=True):
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_smollm2_special_tokens(embedded: ModelSource) -> None:
    tokenizer = embedded.tokenizer
    assert (tokenizer.num_ids, tokenizer.bos_token_id, tokenizer.eos_token_id) == (49152, 1, 2)
    assert tokenizer.special_ids == frozenset(range(17))
    ids = tokenizer.encode_batch(["<|im_start|>user\nhi<|im_end|>"])[0].tolist()
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "user\nhi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>"
    assert tokenizer.encode_batch(["hello"])[0].tolist() == tokenizer.encode_batch(["hello"], False)[0].tolist()


def test_smollm2_chat(embedded: ModelSource) -> None:
    text = embedded.tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = embedded.tokenizer.encode_chat([{"role": "user", "content": "Hi"}]).tolist()
    assert ids == embedded.tokenizer.encode_batch([text])[0].tolist()
    assert ids.count(1) == 3


# Other pre-tokenizers: a small vocabulary, learned from nothing, with merges that cross what the patterns cut.
LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, Any] = {
    "gpt-2": lambda text: regex.findall(GPT2, text),
    "smollm": split_smollm,
    "llama-bpe": lambda text: regex.findall(LLAMA3, text),
    "llama3": lambda text: regex.findall(LLAMA3, text),
    "llama-v3": lambda text: regex.findall(LLAMA3, text),
    "qwen2": lambda text: regex.findall(LLAMA3.replace("{1,3}", ""), unicodedata.normalize("NFC", text)),
}
MERGES = [
    "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "h e", "l l", "he ll", "1 2", "4 2", "0 0", "00 7",
    "Ġ Ġ", "ĠĠ Ġ", "Ġ 5", "Ċ Ċ", "' s", "Ġ Ċ", "Ġ a", "r e", "' re", ") :", ") :Ċ", "Ã ©",
    "n 't", "ð Ł", "ðŁ Ļ", "ðŁĻ Ĥ", ". .", ".. .", "Ġ 9", "ĠĠ Ġ9", "I '", "L L",
]  # fmt: skip


def bpe_metadata(pre: str, **more: Any) -> dict[str, Any]:
    merged = {merge.replace(" ", ""): None for merge in MERGES}
    tokens = list(dict.fromkeys([*byte_alphabet().values(), *"".join(MERGES).replace(" ", ""), *merged]))
    # A merge needs both its parts as tokens.
    tokens += [p for merge in MERGES for p in merge.split(" ") if p not in tokens]
    whole = ["Hello", "ABC", "don"]  # reachable by no merge: only a tokenizer that ignores merges finds them
    tokens = list(dict.fromkeys([*tokens, *whole, "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", "[PAD999]"]))
    types = [{"<tool>": 4, "[PAD999]": 5}.get(t, 3 if t.startswith("<|") else 1) for t in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    } | {f"tokenizer.{key}": value for key, value in more.items()}


def read(metadata: dict[str, Any]) -> Tokenizer:
    return read_gguf_tokenizer(metadata, Path("tiny.gguf"))


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_equals_its_slow_twin(pre: str) -> None:
    metadata = bpe_metadata(pre)
    slow = SlowBPE(metadata, SPLITS[pre], ignore_merges=pre.startswith("llama"))
    tokenizer = read(metadata)
    samples = [*texts(), "<tool>12007<tool>", "Hello don ABC", "it's I'LL 'RE"]
    for text, ids in zip(samples, tokenizer.encode_batch(samples, add_special_tokens=False), strict=True):
        assert ids.tolist() == slow.encode(text), repr(text)


@pytest.mark.parametrize("pre", ["default", "tekken", "deepseek-llm", "", "smollm2"])
def test_unknown_pre_tokenizer_is_an_error(pre: str) -> None:
    with pytest.raises(InputError, match=rf"unknown pre-tokenizer tokenizer\.ggml\.pre = '{pre}'"):
        read(bpe_metadata(pre))


def test_missing_pre_tokenizer_is_an_error() -> None:
    metadata = bpe_metadata("smollm")
    del metadata["tokenizer.ggml.pre"]
    with pytest.raises(InputError, match=r"missing key tokenizer\.ggml\.pre"):
        read(metadata)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ggml.model": "bert"}, "tokenizer.ggml.model = 'bert'"),
        ({"ggml.tokens": None}, "missing key tokenizer.ggml.tokens"),
        ({"ggml.merges": ["ab"]}, "'ab' in tokenizer.ggml.merges"),
        ({"ggml.merges": ["q z"]}, "the merges do not fit the tokens"),
        ({"ggml.token_type": np.ones(3, dtype=np.int32)}, "3 token types"),
        ({"ggml.bos_token_id": 10**6}, "tokenizer.ggml.bos_token_id = 1000000"),
    ],
)
def test_faults_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        read(bpe_metadata("smollm", **values))
    assert message in str(error.value)


def test_duplicate_token_is_an_error() -> None:
    metadata = bpe_metadata("smollm")
    metadata["tokenizer.ggml.tokens"][5] = metadata["tokenizer.ggml.tokens"][6]
    with pytest.raises(InputError, match="same token twice"):
        read(metadata)


def test_unused_ids_decode_to_nothing() -> None:
    metadata = bpe_metadata("smollm")
    unused = metadata["tokenizer.ggml.tokens"].index("[PAD999]")
    tokenizer = read(metadata)
    letter = metadata["tokenizer.ggml.tokens"].index("a")
    assert tokenizer.decode([letter, unused, letter, 10**6]) == "aa"
    assert "[PAD999]" not in tokenizer.backend.get_vocab()


@pytest.mark.parametrize(
    ("pre", "flags", "bos", "eos"),
    [
        ("smollm", {}, 0, 0),
        ("smollm", {"ggml.add_bos_token": True}, 1, 0),
        ("smollm", {"ggml.add_bos_token": True, "ggml.add_eos_token": True}, 1, 1),
        ("llama-bpe", {}, 1, 0),
        ("llama-bpe", {"ggml.add_bos_token": False}, 0, 0),
    ],
)
def test_bos_and_eos(pre: str, flags: dict[str, Any], bos: int, eos: int) -> None:
    tokenizer = read(bpe_metadata(pre, **flags))
    plain = tokenizer.encode_batch(["hello"], add_special_tokens=False)[0].tolist()
    ids = tokenizer.encode_batch(["hello"])[0].tolist()
    assert ids == [tokenizer.bos_token_id] * bos + plain + [tokenizer.eos_token_id] * eos
    # A text that brings its own keeps exactly one.
    assert tokenizer.encode_batch(["<|endoftext|>hello"])[0].tolist().count(tokenizer.bos_token_id or -1) == 1


def test_bos_to_add_but_not_named_is_an_error() -> None:
    metadata = bpe_metadata("smollm", **{"ggml.add_bos_token": True})
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(InputError, match="bos_token_id is missing"):
        read(metadata)


# SentencePiece: pieces with scores, merges implied.
PIECE_SCORES = [
    "▁t", "he", "▁the", "in", "▁a", "er", "re", "on", "▁▁",
    "at", "ing", "or", "▁the▁", "ll", "▁▁▁▁", "el", "llo", "hello",
]  # fmt: skip


def spm_metadata(**more: Any) -> dict[str, Any]:
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz", "é", "汉"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECE_SCORES, *letters]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(PIECE_SCORES) + len(letters))]
    scores = [0.0] * 259 + [-float(i) for i in range(len(PIECE_SCORES) + len(letters))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.{key}": value for key, value in more.items()}


def slow_sentencepiece(metadata: dict[str, Any], text: str, prefix: bool = True) -> list[int]:
    """Bigrams in a heap by score, leftmost first, as in SentencePiece's bpe_model.cc."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {t: i for i, t in enumerate(tokens) if metadata["tokenizer.ggml.token_type"][i] == 1}
    scores = metadata["tokenizer.ggml.scores"]
    if not text:
        return []
    symbols: list[str | None] = list(((" " if prefix else "") + text).replace(" ", "▁"))
    heap: list[tuple[float, int, int, str]] = []

    def neighbours(i: int) -> int | None:
        return next((j for j in range(i + 1, len(symbols)) if symbols[j] is not None), None)

    def push(i: int) -> None:
        j = neighbours(i)
        if j is not None and (pair := f"{symbols[i]}{symbols[j]}") in ids:
            heapq.heappush(heap, (-float(scores[ids[pair]]), i, j, pair))

    for i in range(len(symbols)):
        push(i)
    while heap:
        _, i, j, pair = heapq.heappop(heap)
        if symbols[i] is None or symbols[j] is None or f"{symbols[i]}{symbols[j]}" != pair or neighbours(i) != j:
            continue
        symbols[i], symbols[j] = pair, None
        before = next((k for k in range(i - 1, -1, -1) if symbols[k] is not None), None)
        if before is not None:
            push(before)
        push(i)
    out = []
    for symbol in symbols:
        if symbol is not None:
            out += [ids[symbol]] if symbol in ids else [tokens.index(f"<0x{b:02X}>") for b in symbol.encode()]
    return out


SPM_TEXTS = [
    "the hello",
    "  the  other",
    "retelling the thing",
    "é 汉字 🙂",
    "",
    " ",
    "a\nb\tc 12",
    "hellollo",
    "theering     on",
    "a▁b",
]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_equals_the_slow_twin(prefix: bool) -> None:
    metadata = spm_metadata(**{"ggml.add_space_prefix": prefix})
    tokenizer = read(metadata)
    rng = random.Random(1)
    words = ["the", "other", " ", "  ", "reel", "hello", "in", "eat", "oring", "é", "汉", "字", "🙂", "\n", "Q1"]
    samples = SPM_TEXTS + ["".join(rng.choices(words, k=8)) for _ in range(200)]
    for text, ids in zip(samples, tokenizer.encode_batch(samples), strict=True):
        assert ids.tolist() == [1, *slow_sentencepiece(metadata, text, prefix)], repr(text)
        assert tokenizer.decode(ids) == text.replace("▁", " ")


def test_sentencepiece_special_tokens_in_text() -> None:
    metadata = spm_metadata()
    tokenizer = read(metadata)
    ids = tokenizer.encode_batch(["the</s>he"])[0].tolist()
    assert ids == [1, *slow_sentencepiece(metadata, "the"), 2, *slow_sentencepiece(metadata, "he")]
    assert tokenizer.encode_batch(["<s>the"])[0].tolist() == [1, *slow_sentencepiece(metadata, "the")]


def test_sentencepiece_merges_equal_transformers() -> None:
    from transformers.tokenization_utils_base import generate_merges

    metadata = spm_metadata()
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"].tolist()
    tokens, scores = [*tokens, "lo", "hel"], [*scores, -3.5, -3.5]  # pieces with several splits, and equal scores
    ids = {t: i for i, t in enumerate(tokens) if i >= 259}
    theirs = generate_merges(ids, {t: scores[i] for t, i in ids.items()})
    assert sentencepiece_merges(ids, scores) == theirs
    assert len(theirs) > len(PIECE_SCORES) + 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("tokenizer.ggml.scores"), "missing key tokenizer.ggml.scores"),
        (lambda m: m.update({"tokenizer.ggml.scores": np.zeros(3, dtype=np.float32)}), "3 scores"),
        (lambda m: m["tokenizer.ggml.tokens"].__setitem__(3 + 65, "[A]"), "no byte token <0x41>"),
    ],
)
def test_sentencepiece_faults_are_named(change: Any, message: str) -> None:
    metadata = spm_metadata()
    change(metadata)
    with pytest.raises(InputError) as error:
        read(metadata)
    assert message in str(error.value)
