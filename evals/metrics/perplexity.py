"""perplexity: how well each model predicts reference texts, and its own and the other's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from batchinfer.errors import InputError
from batchinfer.evals.metrics.reference_texts import TextScores, read_texts, reference_items, texts_table
from batchinfer.evals.model_inputs import forced_outputs, identity_warnings, output_items
from batchinfer.evals.models import EnginePair
from batchinfer.evals.protocol import EvalContext, EvalOptions, MetricScores, MetricSpec, Needs, Scores
from batchinfer.evals.result import Table
from batchinfer.evals.rows import PairedRows, Side
from batchinfer.evals.values import RowValues
from batchinfer.scoring.divergence import TokenDivergence
from batchinfer.scoring.item import ScoreItem
from batchinfer.scoring.result import CorpusScore, RowScore
from batchinfer.scoring.run import score_items
from batchinfer.scoring.windows import Window

if TYPE_CHECKING:
    from batchinfer.engine.engine import Engine

Floats = npt.NDArray[np.float64]

_REFERENCE = MetricSpec(
    "reference_perplexity",
    "Perplexity of the reference",
    "nats/token",
    "continuous",
    False,
    "mean negative log-probability of the reference's tokens after the prompt",
    level="prompt",
    summary="exp_mean",
)
_OUTPUTS = {
    side: MetricSpec(
        f"output_perplexity_{side}",
        f"Perplexity of the outputs, by the model {side}",
        "nats/token",
        "continuous",
        None,
        f"mean negative log-probability of the output's tokens under the model {side}, whoever wrote them",
        summary="exp_mean",
    )
    for side in ("before", "after")
}


class Nlls(NamedTuple):
    """Of each row under one model."""

    values: RowValues  # nats per token
    weights: Floats  # tokens

    @property
    def perplexity(self) -> float | None:
        """exp(sum of nll / tokens)"""
        nll = float(np.nansum(self.values.values * self.weights))
        total = float(self.weights.sum())
        corpus = CorpusScore(num_rows=1, num_tokens=int(total), nll=nll)
        return corpus.perplexity

    @classmethod
    def of_scores(cls, rows: Sequence[RowScore]) -> Nlls:
        values = [
            (row.error.message if row.error else "nothing to score")
            if row.nll is None
            else row.nll / row.num_scored_tokens
            for row in rows
        ]
        return cls(RowValues.of(values), np.array([row.num_scored_tokens for row in rows], dtype=np.float64))

    @classmethod
    def of_divergences(cls, rows: Sequence[TokenDivergence], side: str) -> Nlls:
        logprobs = [row.logprobs_before if side == "before" else row.logprobs_after for row in rows]
        values = [
            row.error.message if row.error is not None else -float(found.mean())
            for row, found in zip(rows, logprobs, strict=True)
        ]
        return cls(RowValues.of(values), np.array([len(row) for row in rows], dtype=np.float64))


class Perplexity:
    """Both models on `--texts`, on the references after their prompts, and on the outputs of both runs."""

    name = "perplexity"
    title = "Perplexity"
    needs = Needs(models=True)
    metric_names = (_REFERENCE.name, *(spec.name for spec in _OUTPUTS.values()))

    def __init__(self, options: EvalOptions) -> None:
        self._texts = None if options.texts is None else read_texts(options.texts)

    def why_not(self, pairs: PairedRows, context: EvalContext) -> str | None:
        reason = self.needs.why_not(pairs, context)
        if reason is not None:
            return reason
        try:
            context.models.sources(context)
        except InputError as error:
            return str(error)
        return None

    def score(self, pairs: PairedRows, context: EvalContext) -> Scores:
        engines = context.models.engines(context)
        on_before, on_after = _outputs(pairs, context, engines)
        metrics = [
            _paired(_OUTPUTS[model], getattr(on_before, model), getattr(on_after, model))
            for model in ("before", "after")
        ]
        tables = [_two_by_two(on_before, on_after)]
        if pairs.references is not None:
            items = [reference_items(pairs, side, engine) for side, engine in _sides(pairs, engines)]
            found = [Nlls.of_scores(score(engine, one, context)) for engine, one in zip(engines, items, strict=True)]
            metrics.insert(0, _paired(_REFERENCE, *found))
        if self._texts is not None:
            scores = [_score_texts(engine, self._texts, context) for engine in engines]
            tables.append(texts_table(scores[0], scores[1], context.options.seed))
        return Scores(tuple(metrics), tables=tuple(tables), warnings=identity_warnings(pairs, context))


def _sides(pairs: PairedRows, engines: EnginePair) -> list[tuple[Side, Engine]]:
    return [(pairs.before, engines.before), (pairs.after, engines.after)]


def _paired(spec: MetricSpec, before: Nlls, after: Nlls) -> MetricScores:
    return MetricScores(
        spec,
        before=before.values,
        after=after.values,
        before_weights=before.weights,
        after_weights=after.weights,
    )


class _ByModel(NamedTuple):
    """One side's outputs under each model."""

    before: Nlls
    after: Nlls


def _outputs(pairs: PairedRows, context: EvalContext, engines: EnginePair) -> tuple[_ByModel, _ByModel]:
    if engines.have_same_tokenizer:
        forced = forced_outputs(pairs, context)
        one, two = (_ByModel(*(Nlls.of_divergences(rows, model) for model in ("before", "after"))) for rows in forced)
        return one, two
    # Each model reads the texts in its own tokens.
    one, two = (
        _ByModel(*(Nlls.of_scores(score(engine, _own_items(pairs, side, own, engine), context)) for engine in engines))
        for side, own in _sides(pairs, engines)
    )
    return one, two


def _own_items(pairs: PairedRows, side: Side, own: Engine, engine: Engine) -> list[ScoreItem]:
    """The side's sampled ids for the model that wrote them; for another tokenizer the texts, tokenized again."""
    if engine is own:
        return output_items(pairs, side, engine)
    from dataclasses import replace

    return output_items(pairs, replace(side, token_ids=None), engine)


def score(engine: Engine, items: Sequence[ScoreItem], context: EvalContext) -> list[RowScore]:
    window = Window.of(None, None, engine.max_model_len)
    return score_items(engine, items, window, on_step=lambda stats: context.check_interrupt())


def _score_texts(engine: Engine, texts: Sequence[str | None], context: EvalContext) -> TextScores:
    from batchinfer.scoring.encode import TextEncoder

    context.progress(f"reading {len(texts):,} reference texts")
    items = TextEncoder(engine.tokenizer, engine.model.spec.vocab_size).texts(texts)
    return TextScores.of(score(engine, items, context))


def _two_by_two(on_before: _ByModel, on_after: _ByModel) -> Table:
    return Table(
        "perplexity_2x2",
        "Perplexity of both models' outputs by both models",
        ("outputs of", "by the model before", "by the model after"),
        (
            ("before", on_before.before.perplexity, on_before.after.perplexity),
            ("after", on_after.before.perplexity, on_after.after.perplexity),
        ),
        note="exp(sum of nll / tokens) of the outputs' tokens, each after its own run's prompt.",
    )
