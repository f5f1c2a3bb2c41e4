"""semantic: closeness in meaning, of outputs to the reference and of before to after."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchinfer.evals.metrics.embedding import INSTALL_HINT, Embeddings, embed, embedder_path
from batchinfer.evals.protocol import EvalContext, EvalOptions, MetricScores, MetricSpec, Needs, Scores
from batchinfer.evals.rows import PairedRows
from batchinfer.evals.values import RowValues

_REFERENCE = MetricSpec(
    "semantic_reference",
    "Similarity to the reference",
    "cosine",
    "continuous",
    True,
    "cosine of the embeddings of output and reference",
)
_CHANGE = MetricSpec(
    "semantic_change",
    "Similarity of before and after",
    "cosine",
    "continuous",
    None,
    "cosine of the embeddings of the outputs before and after; 1: the same",
    neutral=1.0,
)


class Semantic:
    """Cosines of sentence embeddings (Reimers and Gurevych 2019, Sentence-BERT)."""

    name = "semantic"
    title = "Semantic similarity"
    needs = Needs()
    metric_names = ("semantic_reference", "semantic_change")

    def __init__(self, options: EvalOptions) -> None:
        self._embedder = options.embedder

    def why_not(self, pairs: PairedRows, context: EvalContext) -> str | None:
        if embedder_path(self._embedder) is None:
            return INSTALL_HINT
        return self.needs.why_not(pairs, context)

    def score(self, pairs: PairedRows, context: EvalContext) -> Scores:
        texts = [text for side in (pairs.before, pairs.after) for text in side.texts if _has_words(text)]
        references = pairs.references
        texts += [text for text in references or () if _has_words(text)]
        found = embed([text for text in texts if text is not None], self._embedder, context.check_interrupt)
        metrics = [MetricScores(_CHANGE, between=_similarities(found, pairs.before.texts, pairs.after.texts))]
        if references is not None:
            before, after = (
                _similarities(found, side.texts, references, second="reference") for side in (pairs.before, pairs.after)
            )
            metrics.insert(0, MetricScores(_REFERENCE, before=before, after=after))
        return Scores(tuple(metrics), warnings=_split_warning(found))


def _has_words(text: str | None) -> bool:
    return text is not None and bool(text.strip())


def _similarities(
    found: Embeddings,
    first: Sequence[str | None],
    second_texts: Sequence[str | None],
    second: str = "output after",
) -> RowValues:
    first_name = "output" if second == "reference" else "output before"
    values: list[float | str] = []
    for a, b in zip(first, second_texts, strict=True):
        reason = _why_null(a, first_name) or _why_null(b, second)
        if reason is not None:
            values.append(reason)
        elif a == b:
            values.append(1.0)  # not 0.99999994
        else:
            values.append(float(np.dot(found.vectors[str(a)].astype(np.float64), found.vectors[str(b)])))
    return RowValues.of(values)


def _why_null(text: str | None, what: str) -> str | None:
    if text is None:
        return f"no {what}"
    return None if text.strip() else f"empty {what}"


def _split_warning(found: Embeddings) -> tuple[str, ...]:
    if not found.num_split:
        return ()
    return (
        f"{found.num_split} texts are longer than the embedder's {found.window_tokens} tokens: they were split, "
        "and the parts' embeddings averaged by their tokens",
    )
