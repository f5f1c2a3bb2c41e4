"""Texts -> tokens to score, under one policy for the beginning-of-sequence token.

What the tokenizer puts in front of a text (BOS) is context: it is read and never scored. What it puts
behind a text is left out. Without a BOS the first token has no context and is not scored either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from batchinfer.dataset.row_input_error import RowInputError, check_text
from batchinfer.dataset.token_ids import checked_token_ids
from batchinfer.errors import InputError
from batchinfer.scoring.item import ScoreItem
from batchinfer.types import ErrorCode, TokenIds

Bos = Literal["auto", "always", "never"]
BOS_CHOICES: tuple[str, ...] = get_args(Bos)

# Bounds what a tokenizer's offsets and token strings take before they are made arrays.
_BATCH_TEXTS = 1024
_BATCH_CHARS = 4_000_000

_T = TypeVar("_T")
_Encoded = tuple[TokenIds, npt.NDArray[np.int32]]


class ScoreTokenizer(Protocol):
    """What is needed of a tokenizer here; see models/tokenizer.py."""

    @property
    def num_ids(self) -> int: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[TokenIds]: ...

    def encode_with_ends(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[_Encoded]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def render_chat(self, messages: Any, *, add_generation_prompt: bool = True) -> str: ...

    def render_chat_turns(self, messages: Any) -> tuple[str, list[tuple[int, int]]] | None: ...


class TextEncoder:
    """Tokenizes what is to be scored.

    Args:
        bos: "auto": as the tokenizer does; "always": the tokenizer's BOS goes in front even if it
            adds none; "never": no special tokens are added.
    Raises:
        InputError: "always", and the tokenizer has no BOS.
    """

    def __init__(self, tokenizer: ScoreTokenizer, vocab_size: int, bos: Bos = "auto") -> None:
        if bos not in BOS_CHOICES:
            raise InputError(f"--bos must be one of {', '.join(BOS_CHOICES)}, got {bos!r}")
        if bos == "always" and tokenizer.bos_token_id is None:
            raise InputError("--bos always: the model's tokenizer has no beginning-of-sequence token")
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.bos = bos

    @cached_property
    def _frame(self) -> tuple[int, int]:
        """Number of special tokens that the tokenizer puts in front of a text and behind it."""
        if self.bos == "never":
            return 0, 0
        framed = self.tokenizer.encode_batch(["a"])[0].tolist()
        plain = self.tokenizer.encode_batch(["a"], add_special_tokens=False)[0].tolist()
        before = next((i for i in range(len(framed)) if framed[i : i + len(plain)] == plain), 0)
        return before, max(0, len(framed) - before - len(plain))

    @property
    def adds_bos(self) -> bool:
        """Whether every text begins with context that is not its own."""
        return self.bos == "always" or self._frame[0] > 0

    @property
    def _num_context(self) -> int:
        """Leading tokens of a text that are not scored."""
        return max(1, self._frame[0])

    def _trimmed(self, ids: TokenIds) -> TokenIds:
        """Without what the tokenizer puts behind a text; with the BOS that is asked for."""
        before, behind = self._frame
        ids = ids[: len(ids) - behind]
        bos = self.tokenizer.bos_token_id
        if self.bos == "always" and not before and (not len(ids) or ids[0] != bos):
            assert bos is not None
            ids = np.concatenate((np.array([bos], dtype=np.int32), ids))
        return ids

    def _framed(self, encoded: _Encoded) -> _Encoded:
        """As _trimmed, with the ends to match: a BOS ends before the text begins."""
        ids, ends = self._trimmed(encoded[0]), encoded[1][: len(encoded[0]) - self._frame[1]]
        return ids, np.concatenate((np.zeros(len(ids) - len(ends), dtype=np.int32), ends))

    def texts(self, texts: Sequence[Any]) -> list[ScoreItem]:
        """Items of whole texts, each scored from its first token that has a context. None is a row's error."""
        return _each(texts, self._check_text, len, self._texts)

    def _texts(self, texts: Sequence[str]) -> list[ScoreItem]:
        encoded = self.tokenizer.encode_with_ends(texts, add_special_tokens=self.bos != "never")
        return [self._text_item(text, *self._framed(one)) for text, one in zip(texts, encoded, strict=True)]

    def _text_item(self, text: str, ids: TokenIds, ends: npt.NDArray[np.int32]) -> ScoreItem:
        first = self._num_context
        if not text:
            return ScoreItem.empty("the text is empty")
        if len(ids) <= first:
            return ScoreItem.empty("the text is one token, which has no context: --bos always gives it one")
        return ScoreItem.of_text(text, ids, ends, ((first, len(ids)),), self.tokenizer.special_ids)

    def pairs(self, pairs: Sequence[tuple[Any, Any]]) -> list[ScoreItem]:
        """Items of (context, continuation), of which the continuation is scored: texts, or both token ids.

        Texts are tokenized together. Scored are the tokens from the first that differs from those of the
        context alone: where a token reaches over the border, it belongs to the continuation.
        """
        return _each(pairs, self._check_pair, lambda pair: len(pair[0]) + len(pair[1]), self._pairs)

    def _pairs(self, pairs: Sequence[tuple[Any, Any]]) -> list[ScoreItem]:
        texts = [pair for pair in pairs if isinstance(pair[0], str)]
        from_texts = iter(self._text_pairs(texts))
        return [next(from_texts) if isinstance(pair[0], str) else self.continued(*pair) for pair in pairs]

    def _text_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[ScoreItem]:
        add = self.bos != "never"
        contexts = list(dict.fromkeys(context for context, _ in pairs))
        ids_of = dict(zip(contexts, map(self._trimmed, self.tokenizer.encode_batch(contexts, add)), strict=True))
        wholes = self.tokenizer.encode_batch([context + continuation for context, continuation in pairs], add)
        return [
            self._pair_item(context, continuation, ids_of[context], self._trimmed(whole))
            for (context, continuation), whole in zip(pairs, wholes, strict=True)
        ]

    def _pair_item(self, context: str, continuation: str, context_ids: TokenIds, ids: TokenIds) -> ScoreItem:
        if not continuation:
            return ScoreItem.empty("the continuation is empty")
        num_shared = common_prefix(context_ids, ids)
        first = max(num_shared, self._num_context)
        if first >= len(ids):
            return ScoreItem.empty("the continuation has no token with a context: --bos always gives it one")
        spans = ((first, len(ids)),)
        if first == num_shared == len(context_ids) and not self.tokenizer.special_ids.intersection(
            ids[first:].tolist()
        ):
            return ScoreItem(ids, spans, len(continuation.encode()), len(continuation.split()))
        text = context + continuation
        _, ends = self._framed(self.tokenizer.encode_with_ends([text], self.bos != "never")[0])
        return ScoreItem.of_text(text, ids, ends, spans, self.tokenizer.special_ids)

    def continued(self, context: TokenIds, continuation: TokenIds) -> ScoreItem:
        """Token ids as they are, of which the continuation is scored (but never the first token of all)."""
        ids = np.concatenate((context, continuation)).astype(np.int32)
        first = max(1, len(context))
        if first >= len(ids):
            return ScoreItem.empty("there is no token with a context to score")
        text = self._bytes_of(ids[first:])
        return ScoreItem(ids, ((first, len(ids)),), len(text), len(text.decode(errors="replace").split()))

    def _bytes_of(self, ids: TokenIds) -> bytes:
        """Not by decoding, which drops the space before a first token and writes a cut character as three bytes."""
        special = self.tokenizer.special_ids
        return b"".join(self.tokenizer.token_bytes(token) for token in ids.tolist() if token not in special)

    def token_ids(self, rows: Sequence[Any]) -> list[ScoreItem]:
        """Items of lists of token ids, scored from the second on, as they are: no BOS is put in front."""
        return _each(rows, self._check_ids, len, lambda ids: [self.continued(one[:1], one[1:]) for one in ids])

    def _check_text(self, text: Any) -> str:
        return as_text(text, "the text")

    def _check_pair(self, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        if any(part is None or isinstance(part, (str, bytes)) for part in pair):
            return as_text(pair[0], "the context"), as_text(pair[1], "the continuation")
        return self._check_ids(pair[0]), self._check_ids(pair[1])

    def _check_ids(self, values: Any) -> TokenIds:
        if values is None:
            raise RowInputError(ErrorCode.PROMPT_NULL, "the token ids are null")
        return checked_token_ids(values, self.vocab_size)


def as_text(value: Any, what: str) -> str:
    """Raises RowInputError for null and for what is not valid Unicode."""
    if value is None:
        raise RowInputError(ErrorCode.PROMPT_NULL, f"{what} is null")
    if isinstance(value, bytes):
        raise RowInputError(ErrorCode.INVALID_PROMPT, f"{what} is not valid UTF-8")
    return check_text(value, what)


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """Number of leading tokens that are equal."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


def _each(
    values: Sequence[Any],
    check: Callable[[Any], _T],
    size: Callable[[_T], int],
    build: Callable[[Sequence[_T]], list[ScoreItem]],
) -> list[ScoreItem]:
    """One item per value: its error, or what `build` makes of it in batches of not too much text."""
    items: list[ScoreItem | None] = [None] * len(values)
    good: list[tuple[int, _T]] = []
    for row, value in enumerate(values):
        try:
            good.append((row, check(value)))
        except RowInputError as error:
            items[row] = ScoreItem(error=error.error)
    for batch in _batches(good, size):
        for (row, _), item in zip(batch, _built([value for _, value in batch], build), strict=True):
            items[row] = item
    return [item for item in items if item is not None]


def _built(values: Sequence[_T], build: Callable[[Sequence[_T]], list[ScoreItem]]) -> list[ScoreItem]:
    try:
        return build(values)
    except Exception as error:  # the tokenizers package raises plain Exception, e.g. for a missing unknown token
        if len(values) == 1:
            return [ScoreItem.failed(ErrorCode.INVALID_PROMPT, f"the tokenizer refused the text: {error}")]
    return [item for value in values for item in _built([value], build)]


def _batches(rows: Sequence[tuple[int, _T]], size: Callable[[_T], int]) -> Iterator[list[tuple[int, _T]]]:
    batch: list[tuple[int, _T]] = []
    num_chars = 0
    for row in rows:
        batch.append(row)
        num_chars += size(row[1])
        if len(batch) == _BATCH_TEXTS or num_chars > _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch
