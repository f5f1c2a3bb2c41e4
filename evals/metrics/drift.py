"""drift: how far the distribution over tokens has moved, on the tokens that were sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from batchinfer.errors import InputError
from batchinfer.evals.metrics.policy import CLIP, RatioStatistics, k1, k3
from batchinfer.evals.metrics.positions import by_position
from batchinfer.evals.metrics.sampling import sampling_warning
from batchinfer.evals.model_inputs import Forced, forced_outputs, identity_warnings
from batchinfer.evals.protocol import EvalContext, EvalOptions, MetricScores, MetricSpec, Needs, Scores
from batchinfer.evals.result import Curve, Table
from batchinfer.evals.rows import PairedRows
from batchinfer.evals.values import RowValues
from batchinfer.scoring.divergence import TokenDivergence

Floats = npt.NDArray[np.float64]
Figure = Callable[[TokenDivergence], npt.NDArray[np.generic]]


def _between(name: str, title: str, unit: str, description: str, neutral: float = 0.0) -> MetricSpec:
    return MetricSpec(name, title, unit, "continuous", None, description, neutral=neutral)


_ON_AFTER: list[tuple[MetricSpec, Figure]] = [
    (
        _between(
            "kl",
            "KL(after || before)",
            "nats/token",
            "divergence over the whole vocabulary at each token that was sampled after, mean of the output",
        ),
        lambda row: row.kl_after_before,
    ),
    (
        _between(
            "kl_k1",
            "KL(after || before), K1 estimate",
            "nats/token",
            "log after - log before of the tokens sampled after; an estimate of kl, negative at times",
        ),
        lambda row: k1(row.logprobs_after, row.logprobs_before),
    ),
    (
        _between(
            "kl_k3",
            "KL(after || before), K3 estimate",
            "nats/token",
            "r - 1 - log r with r = before / after, of the tokens sampled after; an estimate of kl, never negative",
        ),
        lambda row: k3(row.logprobs_after, row.logprobs_before),
    ),
]
_ON_BEFORE: list[tuple[MetricSpec, Figure]] = [
    (
        _between(
            "kl_before_after",
            "KL(before || after)",
            "nats/token",
            "divergence over the whole vocabulary at each token that was sampled before, mean of the output",
        ),
        lambda row: row.kl_before_after,
    ),
    (
        _between(
            "top1_agreement",
            "Top-1 agreement",
            "share",
            "share of the tokens sampled before at which both models find the same token most probable",
            neutral=1.0,
        ),
        lambda row: row.is_same_top,
    ),
    (
        _between(
            "clip_rate",
            "Clipped ratios",
            "share",
            f"share of the tokens sampled before whose ratio after / before lies outside 1 +- {CLIP}",
        ),
        lambda row: np.abs(np.expm1(row.logprobs_after - row.logprobs_before)) > CLIP,
    ),
]
_ENTROPY = MetricSpec(
    "token_entropy",
    "Token entropy",
    "nats/token",
    "continuous",
    None,
    "entropy of each model at the tokens that it sampled itself, mean of the output",
)


class Drift:
    """Both models on the sampled ids of both runs, teacher-forced; prompts and what follows an end are left out."""

    name = "drift"
    title = "Drift of the policy"
    needs = Needs(models=True, token_ids=True)
    metric_names = (*(spec.name for spec, _ in (*_ON_AFTER, *_ON_BEFORE)), _ENTROPY.name)

    def __init__(self, options: EvalOptions) -> None:
        pass

    def why_not(self, pairs: PairedRows, context: EvalContext) -> str | None:
        reason = self.needs.why_not(pairs, context)
        if reason is not None:
            return reason
        try:
            before, after = context.models.sources(context)
        except InputError as error:
            return str(error)
        sizes = before.spec.vocab_size, after.spec.vocab_size
        if sizes[0] != sizes[1]:
            return f"the models have vocabularies of {sizes[0]} and {sizes[1]} ids: no divergence is defined over them"
        return None

    def score(self, pairs: PairedRows, context: EvalContext) -> Scores:
        forced = forced_outputs(pairs, context)
        metrics = [_metric(spec, forced.on_after, figure) for spec, figure in _ON_AFTER]
        metrics += [_metric(spec, forced.on_before, figure) for spec, figure in _ON_BEFORE]
        metrics.append(_entropy(forced))
        return Scores(
            tuple(metrics),
            tables=(_summary(forced), _ratios(forced), *_stored(pairs, forced)),
            curves=_curves(forced),
            warnings=(*identity_warnings(pairs, context), *sampling_warning(pairs)),
        )


def _metric(spec: MetricSpec, rows: Sequence[TokenDivergence], figure: Figure) -> MetricScores:
    """Means of outputs, weighted by their tokens: the mean of all is that of all tokens."""
    return MetricScores(spec, between=_means(rows, figure), before_weights=_weights(rows))


def _entropy(forced: Forced) -> MetricScores:
    return MetricScores(
        _ENTROPY,
        before=_means(forced.on_before, lambda row: row.entropies_before),
        after=_means(forced.on_after, lambda row: row.entropies_after),
        before_weights=_weights(forced.on_before),
        after_weights=_weights(forced.on_after),
    )


def _means(rows: Sequence[TokenDivergence], figure: Figure) -> RowValues:
    return RowValues.of(
        row.error.message if row.error is not None else float(figure(row).mean(dtype=np.float64)) for row in rows
    )


def _weights(rows: Sequence[TokenDivergence]) -> Floats:
    return np.array([len(row) for row in rows], dtype=np.float64)


def _all(rows: Sequence[TokenDivergence], figure: Figure) -> Floats:
    """Of all tokens of all rows."""
    return np.concatenate([np.empty(0), *(figure(row).astype(np.float64) for row in rows)])


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


_FIGURES: list[tuple[str, Figure, Figure]] = [  # on tokens sampled before, on tokens sampled after
    ("KL(before || after)", lambda row: row.kl_before_after, lambda row: row.kl_before_after),
    ("KL(after || before)", lambda row: row.kl_after_before, lambda row: row.kl_after_before),
    (
        "K1 estimate of KL(sampled from || other)",
        lambda row: k1(row.logprobs_before, row.logprobs_after),
        lambda row: k1(row.logprobs_after, row.logprobs_before),
    ),
    (
        "K3 estimate of KL(sampled from || other)",
        lambda row: k3(row.logprobs_before, row.logprobs_after),
        lambda row: k3(row.logprobs_after, row.logprobs_before),
    ),
    ("entropy of the model before", lambda row: row.entropies_before, lambda row: row.entropies_before),
    ("entropy of the model after", lambda row: row.entropies_after, lambda row: row.entropies_after),
    ("share of equal most probable tokens", lambda row: row.is_same_top, lambda row: row.is_same_top),
]


def _summary(forced: Forced) -> Table:
    rows = [
        (name, _mean(_all(forced.on_before, on_before)), _mean(_all(forced.on_after, on_after)))
        for name, on_before, on_after in _FIGURES
    ]
    counts = ("tokens", sum(map(len, forced.on_before)), sum(map(len, forced.on_after)))
    return Table(
        "drift",
        "Both models on the same tokens",
        ("mean over tokens", "tokens sampled before", "tokens sampled after"),
        (*rows, counts),
        note="Full-vocabulary figures of the raw distributions (temperature 1), nats.",
    )


def _ratios(forced: Forced) -> Table:
    rows = [row for row in forced.on_before if row.error is None and len(row)]
    tokens = [row.logprobs_after - row.logprobs_before for row in rows]
    outputs = np.array([ratios.sum() for ratios in tokens])
    found = [
        ("tokens", RatioStatistics.of(np.concatenate([np.empty(0), *tokens]))),
        ("whole outputs", RatioStatistics.of(outputs)),
    ]
    return Table(
        "policy_ratio",
        "Importance ratios after / before, of what was sampled before",
        ("of", "number", "mean", f"outside 1 +- {CLIP}", "effective sample size", "of the number"),
        tuple(
            (name, one.num, one.mean, one.clip_rate, one.effective_sample_size, one.effective_sample_size / one.num)
            for name, one in found
            if one is not None
        ),
        note="A mean far from 1, or few effective samples: what was sampled before tells little about after.",
    )


def _stored(pairs: PairedRows, forced: Forced) -> tuple[Table, ...]:
    """How far the log-probabilities that the runs stored lie from those of the models here, if they mean the same."""
    sides = (
        ("before", pairs.before, forced.on_before, lambda row: row.logprobs_before),
        ("after", pairs.after, forced.on_after, lambda row: row.logprobs_after),
    )
    rows = []
    for name, side, found, own in sides:
        if side.logprobs is None or side.run.metadata.get("logprobs", {}).get("mode") != "raw":
            continue
        apart = [
            np.abs(stored[: len(row)] - own(row))
            for stored, row in zip(side.logprobs, found, strict=True)
            if stored is not None and row.error is None
        ]
        every = np.concatenate([np.empty(0), *apart])
        rows.append((name, len(every), _mean(every), float(every.max()) if len(every) else None))
    if not rows:
        return ()
    return (
        Table(
            "stored_logprobs",
            "Log-probabilities that the runs stored, beside those of the models here",
            ("run", "tokens", "mean difference", "largest difference"),
            tuple(rows),
            note="Sizes of differences, in nats. More than rounding says that the outputs are of another model.",
        ),
    )


def _curves(forced: Forced) -> tuple[Curve, ...]:
    kl = [
        by_position("KL(after || before), sampled after", [row.kl_after_before for row in forced.on_after]),
        by_position("KL(before || after), sampled before", [row.kl_before_after for row in forced.on_before]),
    ]
    entropy = [
        by_position("before", [row.entropies_before for row in forced.on_before]),
        by_position("after", [row.entropies_after for row in forced.on_after]),
    ]
    note = "Means over the outputs that are that long, with 95 % bands."
    return (
        Curve("kl_by_position", "KL along the output", "token of the output", "nats/token", tuple(kl), note),
        Curve(
            "entropy_by_position", "Entropy along the output", "token of the output", "nats/token", tuple(entropy), note
        ),
    )
