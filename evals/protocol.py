"""What an evaluator is: paired rows in, one figure per row and side out.

An evaluator measures; it never compares. It gives each row a number before and a number after, or
a number between the two, or null with a reason. Means, intervals, tests and verdicts are made from
these figures in one place for all evaluators (aggregate.py, verdicts.py), so a user's own evaluator gets the same
statistics as the built-in ones.

    class WordCount:
        name = "word_count"
        title = "Words per output"
        needs = Needs()
        metric_names = ("words",)

        def why_not(self, pairs, context):
            return self.needs.why_not(pairs, context)

        def score(self, pairs, context):
            spec = MetricSpec("words", "Words", "words", "continuous", higher_is_better=None)
            count = lambda text: float(len(text.split()))
            return Scores((MetricScores.of_texts(spec, pairs, count),))

Users register theirs as an entry point of the group `batchinfer.evaluators`: a callable that takes
`EvalOptions` and returns an evaluator, such as the class itself with an `__init__(self, options)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from batchinfer.config import EngineConfig
from batchinfer.evals.models import Models
from batchinfer.evals.rows import PairedRows
from batchinfer.evals.values import RowValues

if TYPE_CHECKING:
    from batchinfer.evals.result import Curve, Table

#: binary: every value is 0 or 1. It decides the test: McNemar, or Wilcoxon and permutation.
Kind = Literal["binary", "continuous"]
#: sample: one figure per pair of rows. prompt: one per prompt, over its samples (pass@k, self-BLEU).
Level = Literal["sample", "prompt"]
#: mean: Σ w·v / Σ w. exp_mean: exp of that, which makes a perplexity out of nats per token.
Summary = Literal["mean", "exp_mean"]

ENTRY_POINT_GROUP = "batchinfer.evaluators"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """What a figure means.

    Attributes:
        name: unique; what `--gate` names and rows.parquet's columns begin with. Letters, digits, `_ . @ -`.
        title: for people, as a heading.
        unit: "share", "tokens", "nats/token", "cosine", ...
        higher_is_better: None where neither direction is (a length).
        description: one sentence: what one row's value is.
        neutral: of figures between the two sides: the value that two equal sides would give
            (KL 0, similarity 1, win rate 0.5). Paired metrics: 0, the difference of equals.
        is_derived: made from other metrics of the comparison (win rates): not tested, and not counted by Holm.
    """

    name: str
    title: str
    unit: str
    kind: Kind
    higher_is_better: bool | None
    description: str = ""
    level: Level = "sample"
    summary: Summary = "mean"
    neutral: float = 0.0
    is_derived: bool = False


@dataclass(frozen=True, slots=True)
class MetricScores:
    """The figures of one metric. Either both sides are set, or `between` alone.

    All arrays are in the order of the pairs (`spec.level` "sample", [num_pairs]) or of the prompts
    ("prompt", [num_prompts], see PairedRows.prompt_index).

    Attributes:
        before, after: each side's values.
        between: one value per pair, of both sides together, such as a KL or a similarity.
        before_weights, after_weights: what a row counts in the mean, such as its number of tokens;
            `between` uses before_weights. None: all rows count the same. Finite, >= 0.
    """

    spec: MetricSpec
    before: RowValues | None = None
    after: RowValues | None = None
    between: RowValues | None = None
    before_weights: npt.NDArray[np.float64] | None = None
    after_weights: npt.NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        is_paired = self.before is not None and self.after is not None and self.between is None
        is_between = self.before is None and self.after is None and self.between is not None
        assert is_paired or is_between, f"metric {self.spec.name}: both sides, or `between` alone"

    @property
    def is_paired(self) -> bool:
        return self.between is None

    @property
    def sides(self) -> tuple[RowValues, RowValues]:
        """(before, after); only of paired figures."""
        assert self.before is not None
        assert self.after is not None
        return self.before, self.after

    def __len__(self) -> int:
        return len(self.sides[0] if self.between is None else self.between)

    @classmethod
    def of_texts(cls, spec: MetricSpec, pairs: PairedRows, figure: Callable[[str], float | None]) -> MetricScores:
        """`figure` of each output by itself. Rows without an output are null, and so are rows where it returns None."""
        sides = [RowValues.of(_figures(side.texts, side.errors, figure)) for side in (pairs.before, pairs.after)]
        return cls(spec, before=sides[0], after=sides[1])


def _figures(
    texts: Sequence[str | None], errors: Sequence[str | None], figure: Callable[[str], float | None]
) -> list[float | str]:
    values: list[float | str] = []
    for text, error in zip(texts, errors, strict=True):
        if text is None:
            values.append(f"no output: {error}" if error else "no output")
            continue
        value = figure(text)
        values.append("not defined for this output" if value is None else value)
    return values


@dataclass(frozen=True, slots=True)
class Scores:
    """What one evaluator found: metrics, and tables or curves that the report shows as they are."""

    metrics: tuple[MetricScores, ...] = ()
    tables: tuple[Table, ...] = ()
    curves: tuple[Curve, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What the user chose for the evaluators. Checked by the evaluator that uses it, when it is made.

    Attributes:
        match: how accuracy compares output and reference; see metrics/matching.py. None: normalized.
        pattern: regular expression whose first group (else the whole match) is the answer, for match "regex".
        function: FILE.py:function, the user's own accuracy: (output, reference, row) -> bool or number.
        ks: k of pass@k and maj@k. Empty: 1 and the powers of two up to the number of samples.
        embedder: sentence-transformers model, a folder or a hub id. None: the embedded all-MiniLM-L6-v2.
        texts: file of reference texts for perplexity. None: the reference column.
        seed: of everything random in evaluation.
        more: options of users' evaluators, by name.
    """

    match: str | None = None
    pattern: str | None = None
    function: str | None = None
    ks: tuple[int, ...] = ()
    embedder: str | None = None
    texts: str | None = None
    seed: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalContext:
    """What evaluators may use beside the rows.

    Attributes:
        before_model, after_model: as `--model` takes them; None when only the outputs are at hand.
            `after_model` may be a PEFT adapter folder, whose base is `before_model` unless it names one itself.
        engine: how to run them, for evaluators that do.
        scored: the metrics of the evaluators before this one; all others for one with `needs.other_metrics`.
        progress: called with a short text for people when a long step begins.
        check_interrupt: call it often in long loops; it raises when the user wants to stop.
        models: loads the two models when they are asked for, each once for all evaluators.
    """

    options: EvalOptions = field(default_factory=EvalOptions)
    before_model: str | None = None
    after_model: str | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)
    scored: tuple[MetricScores, ...] = ()
    progress: Callable[[str], None] = lambda text: None
    check_interrupt: Callable[[], None] = lambda: None
    models: Models = field(default_factory=Models)


@dataclass(frozen=True, slots=True)
class Needs:
    """What an evaluator cannot do without."""

    reference: bool = False  # a reference column
    texts_or_reference: bool = False  # --texts, or a reference column
    token_ids: bool = False  # the sampled ids, which plain text inputs lack
    logprobs: bool = False  # of the sampled tokens, with one meaning on both sides
    models: bool = False  # both models, to run them
    min_samples: int = 1  # samples of at least one prompt
    other_metrics: bool = False  # runs last, over the figures of the others

    def why_not(self, pairs: PairedRows, context: EvalContext) -> str | None:
        """What is missing and what to do about it, in one sentence; None if nothing is."""
        if self.reference and pairs.references is None:
            return "there is no reference column: name one with --reference-column"
        if self.texts_or_reference and pairs.references is None and context.options.texts is None:
            return "there are no reference texts: give --texts or --reference-column"
        if self.models and (context.before_model is None or context.after_model is None):
            return "it runs both models: give --before and --after"
        if self.token_ids and not pairs.have_token_ids:
            return "the inputs hold no output_token_ids: they were not written by `batchinfer run`"
        if self.logprobs and not pairs.have_logprobs:
            return "the inputs hold no logprobs of one meaning: run both with --logprobs 0"
        if pairs.max_samples < self.min_samples:
            return f"it needs {self.min_samples} samples of a prompt: run both with --n {self.min_samples} or more"
        if self.other_metrics and not context.scored:
            return "there is no other metric to derive it from"
        return None


@runtime_checkable
class Evaluator(Protocol):
    """One way to measure outputs; one short file each.

    `score` gives every metric one value per pair (or per prompt), in the order of `pairs`, a null with its
    reason where there is none. It changes nothing, is deterministic in its arguments, and is called only
    after `why_not` returned None. It may raise InputError for what is the user's to fix.
    """

    @property
    def name(self) -> str:
        """What --metrics picks it by."""

    @property
    def title(self) -> str: ...

    @property
    def needs(self) -> Needs: ...

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Glob patterns of what it can give; --gate is checked against them before any work."""

    def why_not(self, pairs: PairedRows, context: EvalContext) -> str | None:
        """Why it cannot run on these inputs, in a sentence that says what to do; None when it can."""
        ...

    def score(self, pairs: PairedRows, context: EvalContext) -> Scores: ...


EvaluatorFactory = Callable[[EvalOptions], Evaluator]
