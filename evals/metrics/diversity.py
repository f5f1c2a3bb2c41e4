"""diversity: how much outputs repeat themselves, and how much the samples of a prompt differ.

Whether more or less is better depends on the task, so only repetition has a better direction.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from batchinfer.evals.metrics.matching import make_match
from batchinfer.evals.metrics.texts import words
from batchinfer.evals.protocol import EvalContext, EvalOptions, MetricScores, MetricSpec, Needs, Scores
from batchinfer.evals.result import Table
from batchinfer.evals.rows import PairedRows, Side
from batchinfer.evals.values import RowValues

_REPETITION_N = 4
_REPETITION = MetricSpec(
    "repetition",
    "Repetition",
    "share",
    "continuous",
    False,
    f"share of the output's {_REPETITION_N}-grams of words that occurred in it before",
)
_SELF_BLEU = MetricSpec(
    "self_bleu",
    "Self-BLEU",
    "BLEU",
    "continuous",
    None,
    "mean BLEU of each sample against the prompt's other samples; 100: all the same",
    level="prompt",
)
_ENTROPY = MetricSpec(
    "answer_entropy",
    "Answer entropy",
    "nats",
    "continuous",
    None,
    "entropy of the distribution of answers over the prompt's samples; 0: all agree",
    level="prompt",
)


def _distinct_spec(n: int) -> MetricSpec:
    return MetricSpec(
        f"distinct_{n}",
        f"Distinct-{n}",
        "share",
        "continuous",
        None,
        f"different {n}-grams of words over all of them, in the prompt's samples together; longer text repeats more",
        level="prompt",
    )


class Diversity:
    name = "diversity"
    title = "Diversity"
    needs = Needs()
    metric_names = ("repetition", "distinct_1", "distinct_2", "self_bleu", "answer_entropy")

    def __init__(self, options: EvalOptions) -> None:
        self._match = make_match(options.match, options.pattern)

    def why_not(self, pairs: PairedRows, context: EvalContext) -> str | None:
        return self.needs.why_not(pairs, context)

    def score(self, pairs: PairedRows, context: EvalContext) -> Scores:
        metrics = [
            MetricScores.of_texts(_REPETITION, pairs, repetition),
            *(_of_prompts(_distinct_spec(n), pairs, partial(distinct_n, n=n), context) for n in (1, 2)),
        ]
        if pairs.max_samples > 1:
            metrics.append(_of_prompts(_SELF_BLEU, pairs, self_bleu, context, min_samples=2))
            metrics.append(_of_prompts(_ENTROPY, pairs, self._answer_entropy, context, min_samples=2))
        return Scores(tuple(metrics), tables=(_corpus_table(pairs),))

    def _answer_entropy(self, texts: Sequence[str]) -> float:
        return entropy([self._match.answer(text) for text in texts])


def ngrams(tokens: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def repetition(text: str) -> float | None:
    """1 - different 4-grams / all 4-grams: seq-rep-4 of Welleck et al. 2019, Neural Text Generation with Unlikelihood
    Training, over words. None below four words.
    """
    found = ngrams(words(text), _REPETITION_N)
    return 1 - len(set(found)) / len(found) if found else None


def distinct_n(texts: Sequence[str], n: int) -> float | None:
    """Different n-grams over all n-grams (Li et al. 2016, A Diversity-Promoting Objective Function, 5), if any."""
    found = [gram for text in texts for gram in ngrams(words(text), n)]
    return len(set(found)) / len(found) if found else None


def self_bleu(texts: Sequence[str]) -> float | None:
    """0 to 100: mean of sacrebleu's sentence BLEU of each text against the others (Zhu et al. 2018, Texygen).

    Texts without a word are left out; None if fewer than two are left.
    """
    from sacrebleu.metrics.bleu import BLEU

    bleu = BLEU(effective_order=True, tokenize="13a")
    texts = [text for text in texts if text.strip()]
    if len(texts) < 2:
        return None
    if len(set(texts)) == 1:
        return 100.0
    scores = [
        bleu.sentence_score(text, list(dict.fromkeys(texts[:i] + texts[i + 1 :]))).score for i, text in enumerate(texts)
    ]
    return sum(scores) / len(scores)


def entropy(answers: Sequence[str | None]) -> float:
    """Nats, of the observed frequencies: at most log of the number of samples. No answer is an answer of its own."""
    counts = Counter(answers)
    total = sum(counts.values())
    return math.log(total) - sum(count * math.log(count) for count in counts.values()) / total


def _of_prompts(
    spec: MetricSpec,
    pairs: PairedRows,
    figure: Callable[[Sequence[str]], float | None],
    context: EvalContext,
    min_samples: int = 1,
) -> MetricScores:
    def values(side: Side) -> RowValues:
        figures: list[float | str] = []
        for rows in pairs.prompt_ranges:
            context.check_interrupt()
            texts = [text for text in side.texts[rows.start : rows.stop] if text is not None]
            if len(texts) < min_samples or not texts:
                figures.append("no output" if not texts else f"fewer than {min_samples} samples")
                continue
            value = figure(texts)
            figures.append("too few words" if value is None else value)
        return RowValues.of(figures)

    return MetricScores(spec, before=values(pairs.before), after=values(pairs.after))


def _corpus_table(pairs: PairedRows) -> Table:
    """Over all outputs together, where it depends on how many there are: no interval, one corpus each."""
    texts = [[text for text in side.texts if text is not None] for side in (pairs.before, pairs.after)]
    rows = [(f"distinct-{n}", distinct_n(texts[0], n), distinct_n(texts[1], n)) for n in (1, 2, 3)]
    different = [len(set(side)) for side in texts]
    return Table(
        "corpus_diversity",
        "Diversity of all outputs together",
        ("figure", "before", "after"),
        (*rows, ("different outputs", *different), ("outputs", len(texts[0]), len(texts[1]))),
        note="Over the whole corpus, so it falls with the number of outputs; no interval.",
    )
