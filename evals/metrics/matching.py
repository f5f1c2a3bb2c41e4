"""How an output is held against its reference: what counts as its answer, and when two answers agree."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from batchinfer.errors import InputError
from batchinfer.evals.metrics.texts import normalize_answer

_NUMBER = re.compile(r"(?:(?<![\w.)\]])[-+\u2212])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?")
_CHOICE_SAID = re.compile(
    r"(?i:answer|choice|option)\b(?i:\s+is)?[\s*]*(?:[\s:*]*[(\[]?([A-J])\b|:[\s*]*([a-j])\b|[(\[]([a-j])[)\]])"
)
_CHOICE_FIRST = re.compile(r"\s*[(\[*]*([A-J])(?:[)\].:*]|\s*(?:\n|$))")
_CHOICE_MARKED = re.compile(r"[(\[]([A-J])[)\]]")


@dataclass(frozen=True, slots=True)
class Match:
    """Attributes:
    answer: what of an output counts; None where there is no answer in it, which is wrong.
    right: what of a reference counts.
    needs_reference: False: having an answer at all is being right.
    meaning: one sentence for the report.
    """

    name: str
    answer: Callable[[str], str | None]
    right: Callable[[str], str | None]
    meaning: str
    needs_reference: bool = True

    def is_correct(self, output: str, reference: str | None) -> bool:
        found = self.answer(output)
        if found is None or not self.needs_reference:
            return found is not None
        assert reference is not None
        return found == self.right(reference)

    def why_not(self, reference: str | None) -> str | None:
        """Why a row with this reference cannot be judged; None when it can."""
        if not self.needs_reference:
            return None
        if reference is None:
            return "no reference"
        return None if self.right(reference) is not None else f"the reference has no answer of kind {self.name!r}"


def make_match(name: str | None, pattern: str | None) -> Match:
    """By the name that `--match` takes; None: "regex" with a pattern, else "normalized". Raises InputError."""
    name = name or ("regex" if pattern else "normalized")
    if (pattern is not None) != (name == "regex"):
        raise InputError(f"--match {name} {'needs' if name == 'regex' else 'takes no'} --pattern")
    if pattern is not None:
        return _regex_match(pattern)
    if name not in MATCHES:
        raise InputError(f"--match {name}: there is no such way; there are {', '.join([*MATCHES, 'regex'])}")
    return MATCHES[name]


def last_number(text: str) -> str | None:
    """The last number of a text, in one spelling: 1,200.50 and 1200.5 agree."""
    found = [match for match in _NUMBER.findall(text) if any(c.isdigit() for c in match)]
    if not found:
        return None
    number = float(found[-1].replace(",", "").replace("\u2212", "-"))
    return f"{number:.12g}" if math.isfinite(number) else None


def choice_letter(text: str) -> str | None:
    """The letter, A to J, of a multiple choice: after "answer is", at the start, or the last one in brackets."""
    said = list(_CHOICE_SAID.finditer(text))
    if said:
        return next(letter for letter in said[-1].groups() if letter).upper()
    first = _CHOICE_FIRST.match(text)
    if first:
        return first[1]
    marked = _CHOICE_MARKED.findall(text)
    return marked[-1] if marked else None


def valid_json(text: str) -> str | None:
    """One spelling of a text that is one JSON value, by RFC 8259: NaN and text around it are not."""
    try:
        value: Any = json.loads(text, parse_constant=_refuse_constant)
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _regex_match(pattern: str) -> Match:
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise InputError(f"--pattern {pattern!r} is not a regular expression: {error}") from error

    def answer(text: str) -> str | None:
        found = list(regex.finditer(text))
        if not found:
            return None
        groups = [group for group in found[-1].groups() if group is not None]
        return (groups[0] if groups else found[-1][0]).strip()

    def right(reference: str) -> str:
        return answer(reference) or reference.strip()

    return Match("regex", answer, right, f"what {pattern!r} finds last equals the reference, or what it finds there")


MATCHES = {
    match.name: match
    for match in (
        Match("exact", str.strip, str.strip, "the output equals the reference, but for whitespace around it"),
        Match(
            "normalized",
            normalize_answer,
            normalize_answer,
            "equal after lower-casing and dropping punctuation and articles",
        ),
        Match(
            "numeric", last_number, last_number, "the last number of the output equals the last one of the reference"
        ),
        Match("choice", choice_letter, choice_letter, "the letter that the output chooses equals the reference's"),
        Match("json", valid_json, valid_json, "the output is valid JSON", needs_reference=False),
    )
}
