"""accuracy: the share of right outputs; pass@k and maj@k where a prompt has several samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from batchinfer.errors import InputError
from batchinfer.evals.metrics.matching import Match, make_match
from batchinfer.evals.metrics.texts import normalize_answer
from batchinfer.evals.metrics.user_function import call, load_function
from batchinfer.evals.protocol import EvalContext, EvalOptions, MetricScores, MetricSpec, Needs, Scores
from batchinfer.evals.rows import PairedRows, Side
from batchinfer.evals.stats.samples import majority_at_k, pass_at_k
from batchinfer.evals.values import RowValues

#: (answers, is_correct) of a prompt's samples -> figure
_OfSamples = Callable[[Sequence[str | None], Sequence[bool]], float]


class Accuracy:
    """Right or wrong by `--match`, or a figure by the user's function. Empty outputs are wrong, failed rows null."""

    name = "accuracy"
    title = "Accuracy"
    metric_names = ("accuracy", "pass@*", "maj@*")

    def __init__(self, options: EvalOptions) -> None:
        self._options = options
        self._function = None if options.function is None else load_function(options.function)
        if self._function is not None and (options.match or options.pattern):
            raise InputError("give --score-function, or --match and --pattern, not both")
        if any(k < 1 for k in options.ks):
            raise InputError(f"--k must be at least 1, got {min(options.ks)}")
        self._match = make_match(options.match, options.pattern)
        self.needs = Needs(reference=self._function is None and self._match.needs_reference)

    def why_not(self, pairs: PairedRows, context: EvalContext) -> str | None:
        return self.needs.why_not(pairs, context)

    def score(self, pairs: PairedRows, context: EvalContext) -> Scores:
        values = [self._judge(side, pairs, context) for side in (pairs.before, pairs.after)]
        found = np.concatenate([side.values for side in values])
        is_binary = bool(np.isin(found[~np.isnan(found)], (0.0, 1.0)).all())
        meaning = f"the value of {self._options.function}" if self._function else self._match.meaning
        spec = MetricSpec(
            "accuracy",
            "Accuracy" if is_binary else "Score",
            "share" if is_binary else "",
            "binary" if is_binary else "continuous",
            higher_is_better=True,
            description=f"1 where {meaning}" if is_binary and not self._function else meaning,
        )
        metrics = [MetricScores(spec, before=values[0], after=values[1])]
        if is_binary and pairs.max_samples > 1:
            metrics += self._of_samples(pairs, values)
        return Scores(tuple(metrics))

    def _judge(self, side: Side, pairs: PairedRows, context: EvalContext) -> RowValues:
        rows = pairs.inputs.to_pylist() if self._function else []
        figures: list[float | str] = []
        for row, text in enumerate(side.texts):
            context.check_interrupt()
            reference = None if pairs.references is None else pairs.references[row]
            if text is None:
                figures.append(f"no output: {side.errors[row]}" if side.errors[row] else "no output")
            elif self._function:
                figures.append(call(self._function, text, reference, rows[row]))
            else:
                figures.append(_match_figure(self._match, text, reference))
        return RowValues.of(figures)

    def _of_samples(self, pairs: PairedRows, values: Sequence[RowValues]) -> list[MetricScores]:
        metrics = []
        for k in self._options.ks or _usual_ks(pairs.max_samples):
            metrics.append(self._over_samples(_pass_spec(k), pairs, values, k, _passes(k)))
            if k > 2 and self._can_agree:  # of two, one chosen fairly is as right as one alone
                metrics.append(
                    self._over_samples(_majority_spec(k), pairs, values, k, _majority(k, self._options.seed))
                )
        return metrics

    def _over_samples(
        self, spec: MetricSpec, pairs: PairedRows, values: Sequence[RowValues], k: int, figure: _OfSamples
    ) -> MetricScores:
        sides = (pairs.before, pairs.after)
        before, after = (self._side(side, pairs, value, k, figure) for side, value in zip(sides, values, strict=True))
        return MetricScores(spec, before=before, after=after)

    def _side(self, side: Side, pairs: PairedRows, value: RowValues, k: int, figure: _OfSamples) -> RowValues:
        figures: list[float | str] = []
        for prompt in pairs.prompt_ranges:
            rows = [row for row in prompt if not np.isnan(value.values[row])]
            if len(rows) < k:
                figures.append(f"fewer than {k} samples with a value")
                continue
            answers = [self._answer(side.texts[row] or "") for row in rows]
            figures.append(figure(answers, [bool(value.values[row]) for row in rows]))
        return RowValues.of(figures)

    @property
    def _can_agree(self) -> bool:
        """Whether samples can agree on an answer."""
        return self._function is not None or self._match.needs_reference

    def _answer(self, text: str) -> str | None:
        return normalize_answer(text) if self._function else self._match.answer(text)


def _match_figure(match: Match, text: str, reference: str | None) -> float | str:
    return match.why_not(reference) or float(match.is_correct(text, reference))


def _pass_spec(k: int) -> MetricSpec:
    return _spec(f"pass@{k}", f"share of choices of {k} samples with a right one among them")


def _majority_spec(k: int) -> MetricSpec:
    return _spec(f"maj@{k}", f"share of choices of {k} samples whose most frequent answer is right")


def _spec(name: str, description: str) -> MetricSpec:
    return MetricSpec(name, name, "share", "continuous", higher_is_better=True, description=description, level="prompt")


def _usual_ks(num_samples: int) -> list[int]:
    """Powers of two from 2 up to the number of samples, and that number. k = 1 is accuracy itself."""
    powers = [2**i for i in range(1, num_samples.bit_length()) if 2**i <= num_samples]
    return sorted({*powers, num_samples})


def _passes(k: int) -> _OfSamples:
    return lambda answers, is_correct: pass_at_k(len(is_correct), sum(is_correct), k)


def _majority(k: int, seed: int) -> _OfSamples:
    # Each prompt and side the same choices: equal samples give equal figures.
    return lambda answers, is_correct: majority_at_k(answers, is_correct, k, np.random.default_rng(seed))
