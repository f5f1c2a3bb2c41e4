"""Token ids to text while they are generated, and stop strings in that text.

Why the pieces always add up to the decoding of all ids
-------------------------------------------------------
Decoders of two families are in use. What is called a hard border below is a place between tokens
where `decode(left + right) == decode(left) + decode(right)`, whatever comes later, except for
the space that some decoders strip from the start of a text.

Byte-level (GPT-2, Llama 3, Qwen, SmolLM): the tokens' bytes are joined and decoded as UTF-8, each
maximal broken part giving one U+FFFD. Such decoding keeps no state beyond an unfinished
character, and an unfinished character shows as a final U+FFFD. So a text that does not end in
U+FFFD ends at a hard border. If it does end in one (it may be a genuine one, or broken bytes), the
tokens are held back. So that a row of nothing but broken bytes stays cheap, a border inside the
held tokens is used as soon as `decode(left) + decode(right)` equals the decoding of both: were
`left` to end inside a character that `right` continues, the continuing bytes would give one U+FFFD
each in `decode(right)`, and the sum would be longer. At most 3 bytes precede the end of a
character, so one of any 4 borders in a row will do.

Byte fallback (SentencePiece: Llama 2, Mistral, Gemma): a run of byte tokens is one unit. If the run
as a whole is valid UTF-8 it is decoded, else each of its bytes becomes U+FFFD, those of characters
that were already complete too. So every token but a byte token ends at a hard border, and a run of
byte tokens is held back until it is over. Byte tokens are told from others by what they do to a
neighbouring byte token, see `_TokenClasses`.

The stripped space: the tokens after a border are decoded behind a few tokens before it whose text
is not empty. Whatever is stripped is stripped from those.

Tokens that decode to nothing anywhere (special tokens, ids unknown to the tokenizer) are left out.
Decoders that look ahead over any distance (WordPiece clean-up) are not covered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

_BROKEN = "\ufffd"
#: Held-back tokens from which a border is searched among them (byte-level decoders).
_MAX_HELD = 8


class Decodes(Protocol):
    """What is needed of a tokenizer."""

    def __hash__(self) -> int: ...  # by identity: facts about its ids are kept

    @property
    def num_ids(self) -> int:
        """The highest id + 1."""

    def decode(self, ids: Sequence[int], /) -> str:
        """The text of `ids`, special tokens left out; ids unknown to the tokenizer give nothing."""


@dataclass(frozen=True, slots=True)
class _TokenClass:
    is_invisible: bool  # decodes to nothing in any context
    is_fallback_byte: bool
    num_chars: int  # of the token decoded alone


class _TokenClasses:
    """What kind of token an id is, found by decoding and remembered."""

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._byte_pair = _find_fallback_pair(tokenizer)
        self._classes: dict[int, _TokenClass] = {}
        self.has_byte_fallback = self._byte_pair is not None

    def __getitem__(self, token_id: int) -> _TokenClass:
        found = self._classes.get(token_id)
        if found is None:
            found = self._classes[token_id] = _TokenClass(
                # Twice, because a lone space may be stripped.
                is_invisible=not self._tokenizer.decode([token_id, token_id]),
                is_fallback_byte=self._is_fallback_byte(token_id),
                num_chars=len(self._tokenizer.decode([token_id])),
            )
        return found

    def _is_fallback_byte(self, token_id: int) -> bool:
        if self._byte_pair is None:
            return False
        lead, follower = self._byte_pair
        if _BROKEN not in self._tokenizer.decode([token_id]):
            # An ASCII byte would be spoilt by a lead byte that nothing follows; another token would not.
            return self._tokenizer.decode([token_id, lead]).count(_BROKEN) == 2
        # A byte from 0x80 spoils a whole character behind it; a token that spells U+FFFD does not.
        return self._tokenizer.decode([lead, follower]) not in self._tokenizer.decode([token_id, lead, follower])


@lru_cache(maxsize=16)
def _token_classes(tokenizer: Decodes) -> _TokenClasses:
    """Shared by all sequences: it depends on the tokenizer alone."""
    return _TokenClasses(tokenizer)


def _find_fallback_pair(tokenizer: Decodes) -> tuple[int, int] | None:
    """Two byte tokens that make a character together, if broken bytes next to them spoil it; else None."""
    broken: list[int] = []
    for begin in range(0, tokenizer.num_ids, 256):
        ids = list(range(begin, min(begin + 256, tokenizer.num_ids)))
        # Bytes that happen to be valid in one order are not in the other: it would begin with a follower.
        if _BROKEN not in tokenizer.decode(ids) and _BROKEN not in tokenizer.decode(ids[::-1]):
            continue
        for token_id in ids:
            if tokenizer.decode([token_id]) != _BROKEN:
                continue
            for other in broken:
                for pair in ((token_id, other), (other, token_id)):
                    text = tokenizer.decode(pair)
                    if len(text) == 1 and text != _BROKEN:
                        return pair if tokenizer.decode([*pair, pair[0]]) == 3 * _BROKEN else None
            broken.append(token_id)
    return None


class IncrementalDetokenizer:
    """Decodes one sequence token by token.

    The pieces that `push` returns, and what `finish` returns, add up to `tokenizer.decode(all ids)`.
    A call decodes the new token, a few tokens before it and those that are held back: the tokens
    of an unfinished character, or of a run of byte tokens.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._classes = _token_classes(tokenizer)
        # all ids: [given out | context) [context: given out too) [held: not given out]
        self._context: list[int] = []  # ends at a hard border; its text is not empty, unless it is []
        self._num_context_chars = 0
        self._held: list[int] = []
        self._held_text: str | None = ""  # None: to be decoded

    def push(self, token_id: int) -> str:
        """Adds a token; the text that became certain."""
        token = self._classes[token_id]
        if token.is_invisible:
            return ""
        self._held.append(token_id)
        self._held_text = None
        if self._classes.has_byte_fallback:
            is_open = token.is_fallback_byte
        else:
            is_open = self.pending_text.endswith(_BROKEN)
        if not is_open:
            return self._give_out(len(self._held))
        if len(self._held) >= _MAX_HELD and not self._classes.has_byte_fallback:
            return self._give_out(self._find_border())
        return ""

    @property
    def pending_text(self) -> str:
        """The text held back, as it would be if no token followed."""
        if self._held_text is None:
            self._held_text = self._decode_in_context(self._held)
        return self._held_text

    def finish(self) -> str:
        """The text held back. Nothing can be pushed after it."""
        text = self.pending_text
        self._held, self._held_text = [], ""
        return text

    def _decode_in_context(self, ids: list[int]) -> str:
        return self._tokenizer.decode(self._context + ids)[self._num_context_chars :]

    def _find_border(self) -> int:
        """The number of held tokens before a hard border; 0: none is certain yet."""
        for num in range(len(self._held) - 1, max(0, len(self._held) - 5), -1):
            left, right = self._held[:num], self._held[num:]
            if self._decode_in_context(left) + self._decode_in_context(right) == self.pending_text:
                return num
        return 0

    def _give_out(self, num: int) -> str:
        """Gives out the text of the first `num` held tokens, which end at a hard border."""
        if num == 0:
            return ""
        given, rest = self._held[:num], self._held[num:]
        text = self._decode_in_context(given) if rest else self.pending_text
        recent = self._context + given
        for begin in range(len(recent) - 1, -1, -1):
            is_last = begin == len(recent) - 1
            num_chars = self._classes[recent[-1]].num_chars if is_last else len(self._tokenizer.decode(recent[begin:]))
            if num_chars:
                self._context, self._num_context_chars = recent[begin:], num_chars
                self._held, self._held_text = rest, None if rest else ""
                break
        # else: all of the text so far was stripped, and so would be none of what follows; keep holding it.
        return text


class OutputText:
    """The ids and the text of one completion, and its stop strings.

    Stop strings are matched on the decoded output alone: never in the prompt, nor across its end.
    They may span tokens, or begin or end inside one. Of several, the one whose last character
    comes first wins, among those the longest: what one would get if text came a character at a
    time, so it does not depend on where tokens end. Bytes of an unfinished character count as
    U+FFFD until it is complete.

    Without stop strings nothing is decoded before `finish`.
    """

    def __init__(self, tokenizer: Decodes, stop: tuple[str, ...] = (), include_stop: bool = False) -> None:
        self.token_ids: list[int] = []  # every id pushed
        self._tokenizer = tokenizer
        self._stop = stop
        self._include_stop = include_stop
        self._max_overlap = max(map(len, stop), default=1) - 1
        self._detokenizer = IncrementalDetokenizer(tokenizer) if stop else None
        self._tail = ""  # the last characters of the certain text, up to _max_overlap
        self._num_chars = 0  # of the certain text
        self._num_exempt_chars = 0  # matches must end after these
        self._cut: int | None = None  # characters kept, once a stop string is matched

    def push(self, token_id: int, *, check_stop: bool = True) -> str | None:
        """Adds a token; the stop string that it completed, if any.

        With check_stop=False (before `min_tokens`) none is honoured, nor will one be later that was
        complete by then; one that began by then and ends later is. After a match nothing more can
        be pushed.
        """
        assert self._cut is None, "a token was pushed after the stop string"
        self.token_ids.append(token_id)
        if self._detokenizer is None:
            return None
        piece = self._detokenizer.push(token_id)
        pending = self._detokenizer.pending_text
        num_chars_before = self._num_chars
        text = self._tail + piece + pending
        text_begin = num_chars_before - len(self._tail)  # where `text` lies in the whole

        certain = self._tail + piece
        self._tail = certain[max(0, len(certain) - self._max_overlap) :]
        self._num_chars += len(piece)
        if not check_stop:
            # Not more than what is complete: an unfinished character will end later.
            complete = self._num_chars + len(pending.rstrip(_BROKEN))
            self._num_exempt_chars = max(self._num_exempt_chars, complete)
            return None
        return self._match(text, text_begin, max(num_chars_before, self._num_exempt_chars))

    def finish(self) -> str:
        """The text: the decoding of all ids, cut before the stop string (after it with include_stop)."""
        text = self._tokenizer.decode(self.token_ids)
        return text if self._cut is None else text[: self._cut]

    def _match(self, text: str, text_begin: int, least_end: int) -> str | None:
        """Looks for stop strings in `text`, from character `text_begin` of the whole, that end after `least_end`."""
        matched: tuple[int, int, str] | None = None  # (end, begin, stop string): the least is the one to take
        for stop in self._stop:
            at = text.find(stop, max(0, least_end + 1 - len(stop) - text_begin))
            if at >= 0 and (matched is None or (at + len(stop), at) < matched[:2]):
                matched = (at + len(stop), at, stop)
        if matched is None:
            return None
        end, begin, stop = matched
        self._cut = text_begin + (end if self._include_stop else begin)
        return stop
