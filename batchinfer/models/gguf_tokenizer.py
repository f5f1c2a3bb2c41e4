"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library.

Only pre-tokenizers that are known to give the ids of the model's own tokenizer are in the table; guessing one
changes ids silently, so any other name is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.errors import InputError
from batchinfer.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How a byte-level BPE tokenizer cuts text before merging."""

    build: Callable[[], Any]  # -> tokenizers.pre_tokenizers.PreTokenizer
    ignore_merges: bool = False  # a whole piece that is a token is taken as it is
    nfc: bool = False
    adds_bos: bool = False  # when the file does not say


def _gpt2() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], Any]:
    def build() -> Any:
        from tokenizers import Regex, pre_tokenizers

        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "gpt-2": _PreTokenizer(_gpt2),
    "smollm": _PreTokenizer(_smollm),
    # The same pre-tokenizer under the names that converters of different times wrote.
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3"),
        _PreTokenizer(_split(_LLAMA3_SPLIT), ignore_merges=True, adds_bos=True),
    ),
    "qwen2": _PreTokenizer(_split(_QWEN2_SPLIT), nfc=True),
}


def read_gguf_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Raises InputError naming a missing key, an unknown tokenizer model or an unknown pre-tokenizer."""
    model = str(metadata.get("tokenizer.ggml.model"))
    if model not in _BUILDERS:
        raise InputError(
            f"{path}: tokenizer.ggml.model = {model!r} is not supported; supported: {', '.join(_BUILDERS)}"
        )
    vocab = _Vocab.read(metadata, path)
    backend, adds_bos = _BUILDERS[model](vocab)
    _add_special_tokens(backend, vocab)
    named = _named_tokens(vocab)
    _add_post_processor(backend, vocab, named, adds_bos)
    return Tokenizer(backend, named, metadata.get("tokenizer.chat_template"))


@dataclass(slots=True)
class _Vocab:
    metadata: Mapping[str, Any]
    path: Path
    tokens: list[str]
    types: list[int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any], path: Path) -> _Vocab:
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens:
            raise InputError(f"{path}: missing key tokenizer.ggml.tokens")
        types = metadata.get("tokenizer.ggml.token_type")
        types = [_NORMAL] * len(tokens) if types is None else types.tolist()
        if len(types) != len(tokens):
            raise InputError(f"{path}: {len(types)} token types for {len(tokens)} tokens")
        return cls(metadata, path, tokens, types)

    def ids(self) -> dict[str, int]:
        """Token -> id; placeholders for unused ids are left out, so that they decode to nothing."""
        ids = {token: i for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)) if kind != _UNUSED}
        if len(ids) != len(self.tokens) - self.types.count(_UNUSED):
            raise InputError(f"{self.path}: tokenizer.ggml.tokens has the same token twice")
        return ids

    def required(self, key: str) -> Any:
        if f"tokenizer.ggml.{key}" not in self.metadata:
            raise InputError(f"{self.path}: missing key tokenizer.ggml.{key}")
        return self.metadata[f"tokenizer.ggml.{key}"]


def _byte_level_bpe(vocab: _Vocab) -> tuple[tokenizers.Tokenizer, bool]:
    import tokenizers
    from tokenizers import decoders, models, normalizers

    name = vocab.required("pre")
    if name not in PRE_TOKENIZERS:
        raise InputError(
            f"{vocab.path}: unknown pre-tokenizer tokenizer.ggml.pre = {name!r}; known: {', '.join(PRE_TOKENIZERS)}. "
            "Use the model in Hugging Face layout, which brings its own tokenizer.json"
        )
    pre = PRE_TOKENIZERS[name]
    merges = [_pair(merge, vocab.path) for merge in vocab.required("merges")]
    try:
        model = models.BPE(vocab=vocab.ids(), merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as e:  # tokenizers raises plain Exception
        raise InputError(f"{vocab.path}: the merges do not fit the tokens: {e}") from e
    backend = tokenizers.Tokenizer(model)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _pair(merge: str, path: Path) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right or " " in right:
        raise InputError(f"{path}: {merge!r} in tokenizer.ggml.merges is not a pair of tokens")
    return left, right


def _sentencepiece_bpe(vocab: _Vocab) -> tuple[tokenizers.Tokenizer, bool]:
    """Llama 2's tokenizer, as transformers' converter builds it: BPE over pieces with bytes to fall back on.

    As in SentencePiece and llama.cpp, a space is put before every stretch of text between special tokens, also
    before text that starts with one, unless the file says `add_space_prefix` false.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers

    scores = vocab.required("scores").tolist()
    if len(scores) != len(vocab.tokens):
        raise InputError(f"{vocab.path}: {len(scores)} scores for {len(vocab.tokens)} tokens")
    missing = [b for b in range(256) if f"<0x{b:02X}>" not in vocab.tokens]
    if missing:
        raise InputError(f"{vocab.path}: tokenizer.ggml.tokens has no byte token <0x{missing[0]:02X}> to fall back on")
    unknown = vocab.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    ids = vocab.ids()
    merges = sentencepiece_merges({t: i for t, i in ids.items() if vocab.types[i] in (_NORMAL, _USER_DEFINED)}, scores)
    model = models.BPE(vocab=ids, merges=merges, unk_token=vocab.tokens[unknown], fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    prefix = bool(vocab.metadata.get("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend, True


def sentencepiece_merges(ids: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Merges that a SentencePiece vocabulary implies: every split of a piece into two pieces, best score first."""
    merges: list[tuple[float, str, str]] = []
    for piece, piece_id in ids.items():
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        merges += [(scores[piece_id], *pair) for pair in sorted(known, key=lambda p: (ids[p[0]], ids[p[1]]))]
    # The order among equals is that of transformers' converter.
    merges.sort(key=lambda m: (m[0], len(m[1]), len(m[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


_BUILDERS: Mapping[str, Callable[[_Vocab], tuple[Any, bool]]] = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}


def _add_special_tokens(backend: tokenizers.Tokenizer, vocab: _Vocab) -> None:
    from tokenizers import AddedToken

    for kinds, special in (((_UNKNOWN, _CONTROL), True), ((_USER_DEFINED,), False)):
        tokens = [t for t, kind in zip(vocab.tokens, vocab.types, strict=True) if kind in kinds and t]
        added = [AddedToken(t, normalized=False, special=special) for t in tokens]
        if special:
            backend.add_special_tokens(added)
        else:
            backend.add_tokens(added)


_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def _named_tokens(vocab: _Vocab) -> dict[str, str]:
    named = {}
    for role, key in _NAMED_TOKENS.items():
        token_id = vocab.metadata.get(f"tokenizer.ggml.{key}")
        if token_id is None:
            continue
        if not 0 <= token_id < len(vocab.tokens):
            raise InputError(f"{vocab.path}: tokenizer.ggml.{key} = {token_id} is not one of {len(vocab.tokens)} ids")
        named[role] = vocab.tokens[token_id]
    return named


def _add_post_processor(backend: tokenizers.Tokenizer, vocab: _Vocab, named: Mapping[str, str], adds_bos: bool) -> None:
    from tokenizers import processors

    used = []
    for role, default in (("bos_token", adds_bos), ("eos_token", False)):
        if not vocab.metadata.get(f"tokenizer.ggml.add_{role}", default):
            continue
        if role not in named:
            raise InputError(f"{vocab.path}: a {role} is to be added, but tokenizer.ggml.{role}_id is missing")
        used.append(role)
    if used:
        single = [named[r] for r in used if r == "bos_token"] + ["$A"] + [named[r] for r in used if r == "eos_token"]
        pairs = [(named[r], int(vocab.metadata[f"tokenizer.ggml.{r}_id"])) for r in used]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=pairs)
