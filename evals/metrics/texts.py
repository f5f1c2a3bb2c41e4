"""Texts as metrics see them: normalized answers and words."""

from __future__ import annotations

import re
import string
import unicodedata

_ARTICLES = re.compile(r"\b(a|an|the)\b")
# Punctuation that holds a number together (1.5, 1,000, 3-4) is part of it.
_PUNCTUATION = re.compile(rf"(?<!\d)[{re.escape(string.punctuation)}]|[{re.escape(string.punctuation)}](?!\d)")
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+|[^\w\s]")


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, English articles and superfluous whitespace.

    As for SQuAD (Rajpurkar et al. 2016, evaluation script), with Unicode's compatibility forms made equal and
    punctuation inside numbers kept. A text of nothing else, such as "!", stays as it is.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    bare = " ".join(_ARTICLES.sub(" ", _PUNCTUATION.sub(" ", folded)).split())
    return bare or " ".join(folded.split())


def words(text: str) -> list[str]:
    """Lower-case words and punctuation marks; Chinese and Japanese character by character."""
    return _WORD.findall(text.casefold())
