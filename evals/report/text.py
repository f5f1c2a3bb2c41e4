"""Texts of models on a page: nothing hidden in them, nothing too long, and what differs between two of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import NamedTuple

from markupsafe import Markup, escape

# Characters that would not be seen, or would move what stands beside them: all controls but newline and tab, marks of
# direction, spaces of no width, lone surrogates. The joiners U+200C and U+200D stay: emoji and scripts use them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
# A CJK character is a word of its own: there are no spaces between them.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"\s+|[{_CJK}]|(?:(?![{_CJK}])\w)+|.", re.DOTALL)
#: Share of the shorter text that both must have for marks: else almost every word would be marked.
_MIN_SIMILARITY = 0.15
#: What is shown of the equal beginning of two texts that differ late.
_LEAD = 200


def visible(text: str) -> str:
    """`text` with unseen characters written out: NUL as ␀, a mark of direction as \\u202e."""
    return _UNSEEN.sub(_write_out, text)


def _write_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)  # the picture of this control character
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def one_line(text: str, max_length: int = 60) -> str:
    """For labels: visible, without line breaks, cut in the middle."""
    text = visible(" ".join(text.split()))
    if len(text) <= max_length:
        return text
    num_end = max_length // 3  # names that begin alike often end differently
    return f"{text[: max_length - num_end - 1]}…{text[len(text) - num_end :]}"


@dataclass(frozen=True, slots=True)
class Excerpt:
    """What is shown of a text.

    Attributes:
        html: escaped; words that the other side lacks are in <del> (before) or <ins> (after).
        num_left_out_before, num_left_out_after: characters.
    """

    html: Markup
    num_left_out_before: int = 0
    num_left_out_after: int = 0


class Diff(NamedTuple):
    before: Excerpt | None  # None: there is no text
    after: Excerpt | None
    is_unlike: bool  # too different for marks


def excerpt(text: str, max_length: int, *, from_end: bool = False) -> Excerpt:
    """The beginning of `text`, or its end."""
    text = visible(text)
    start = max(0, len(text) - max_length) if from_end else 0
    shown = text[start : start + max_length]
    return Excerpt(escape(shown), start, len(text) - start - len(shown))


def diff_texts(before: str | None, after: str | None, max_length: int) -> Diff:
    """At most `max_length` characters of each, from shortly before the first difference if that comes late."""
    if before is None or after is None:
        sides = [None if text is None else excerpt(text, max_length) for text in (before, after)]
        return Diff(sides[0], sides[1], False)
    before, after = visible(before), visible(after)
    start = _start_of_interest(before, after, max_length)
    shown = [text[start : start + max_length] for text in (before, after)]
    left_out = [len(text) - start - len(part) for text, part in zip((before, after), shown, strict=True)]
    marked, is_unlike = _mark(shown[0], shown[1])
    return Diff(Excerpt(marked[0], start, left_out[0]), Excerpt(marked[1], start, left_out[1]), is_unlike)


def _start_of_interest(before: str, after: str, max_length: int) -> int:
    if before == after or max(len(before), len(after)) <= max_length:
        return 0
    shorter = min(len(before), len(after))
    same = next((i for i in range(shorter) if before[i] != after[i]), shorter)
    return same - _LEAD if same > max_length // 2 else 0


def _mark(before: str, after: str) -> tuple[tuple[Markup, Markup], bool]:
    words = _WORD.findall(before), _WORD.findall(after)
    matcher = SequenceMatcher(None, *words, autojunk=False)
    blocks = matcher.get_opcodes()
    num_same = sum(_num_letters(words[0][i1:i2]) for tag, i1, i2, _, _ in blocks if tag == "equal")
    shorter = min(_num_letters(words[0]), _num_letters(words[1]))
    if shorter and num_same / shorter < _MIN_SIMILARITY:
        return (escape(before), escape(after)), True
    sides: tuple[list[str], list[str]] = [], []
    for tag, i1, i2, j1, j2 in blocks:
        for side, element, part in ((0, "del", words[0][i1:i2]), (1, "ins", words[1][j1:j2])):
            text = escape("".join(part))
            if tag != "equal" and text:
                text = Markup(f"<{element}>{text}</{element}>")
            sides[side].append(text)
    return (Markup("").join(sides[0]), Markup("").join(sides[1])), False


def _num_letters(words: Sequence[str]) -> int:
    return sum(len(word) for word in words if not word.isspace())
