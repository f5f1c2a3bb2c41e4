"""Rows worth reading, with what differs between their two texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchinfer.evals.report.numbers import figure
from batchinfer.evals.report.text import Excerpt, diff_texts, excerpt
from batchinfer.evals.report.verdicts import SIGNS, main_metrics
from batchinfer.evals.result import ComparisonResult, MetricResult, RowExample, Verdict

#: Rows shown of each end of a metric; report.json has 20.
MAX_ROWS = 8
#: Characters shown of an output, and of a prompt or reference.
MAX_TEXT = 1_500
MAX_CONTEXT = 600
#: Characters of all texts together: with more metrics, the later ones show fewer rows.
MAX_TOTAL = 600_000


@dataclass(frozen=True, slots=True)
class ExampleTexts:
    """Attributes:
    is_same: the outputs are equal.
    is_unlike: too different for marks.
    """

    before: Excerpt | None
    after: Excerpt | None
    prompt: Excerpt | None
    reference: Excerpt | None
    is_same: bool
    is_unlike: bool


@dataclass(frozen=True, slots=True)
class ExampleRow:
    """Attributes:
    key: of the row's texts on this page.
    texts: None where they are shown already, under another metric.
    """

    id: str
    sample_index: int
    key: str
    before: str | None
    after: str | None
    difference: str
    texts: ExampleTexts | None


@dataclass(frozen=True, slots=True)
class ExampleList:
    heading: str
    rows: list[ExampleRow]
    num_left_out: int

    @property
    def has_references(self) -> bool:
        return any(row.texts is not None and row.texts.reference is not None for row in self.rows)


@dataclass(frozen=True, slots=True)
class MetricExamples:
    title: str
    verdict: str
    sign: str
    unit: str
    is_open: bool
    lists: list[ExampleList]


class _Texts:
    """Gives each row's texts once, until there are too many characters."""

    def __init__(self) -> None:
        self._keys: dict[tuple[object, int], str] = {}
        self._num_left = MAX_TOTAL

    @property
    def is_full(self) -> bool:
        return self._num_left <= 0

    def show(self, example: RowExample) -> tuple[str, ExampleTexts | None]:
        identity = (example.id, example.sample_index)
        if identity in self._keys:
            return self._keys[identity], None
        key = self._keys[identity] = f"row-{len(self._keys)}"
        texts = _texts(example)
        shown = (texts.before, texts.after, texts.prompt, texts.reference)
        self._num_left -= sum(len(one.html) for one in shown if one is not None)
        return key, texts


def metric_examples(result: ComparisonResult) -> list[MetricExamples]:
    """Metrics that changed first, the first of them open."""
    order = (Verdict.WORSE, Verdict.BETTER, Verdict.CHANGED, Verdict.NO_CHANGE, Verdict.NOT_TESTED)
    metrics = sorted(main_metrics(result), key=lambda metric: order.index(metric.verdict))
    texts = _Texts()
    found: list[MetricExamples] = []
    for metric in metrics:
        worst_heading, best_heading = _headings(metric)
        ends = ((worst_heading, result.worst), (best_heading, result.best))
        lists = [_list(heading, by_metric.get(metric.name, ()), metric, texts) for heading, by_metric in ends]
        lists = [one for one in lists if one.rows]
        if lists:
            verdict, spec = metric.verdict, metric.spec
            is_open = not found
            found.append(MetricExamples(spec.title, str(verdict), SIGNS[verdict], spec.unit, is_open, lists))
    return found


def _headings(metric: MetricResult) -> tuple[str, str]:
    if not metric.is_paired:
        return "Furthest from equal", ""
    if metric.spec.higher_is_better is None:
        return "Largest decreases", "Largest increases"
    return "Worst regressions", "Best gains"


def _list(heading: str, examples: Sequence[RowExample], metric: MetricResult, texts: _Texts) -> ExampleList:
    rows = []
    for example in examples[:MAX_ROWS]:
        if texts.is_full:
            break
        rows.append(_row(example, metric, texts))
    return ExampleList(heading, rows, len(examples) - len(rows))


def _row(example: RowExample, metric: MetricResult, texts: _Texts) -> ExampleRow:
    key, shown = texts.show(example)
    difference = example.difference + (0.0 if metric.is_paired else metric.spec.neutral)
    return ExampleRow(
        id=str(example.id),
        sample_index=example.sample_index,
        key=key,
        before=None if example.before is None else figure(example.before),
        after=None if example.after is None else figure(example.after),
        difference=figure(difference, is_signed=metric.is_paired),
        texts=shown,
    )


def _texts(example: RowExample) -> ExampleTexts:
    diff = diff_texts(example.before_text, example.after_text, MAX_TEXT)
    # A prompt ends with what is asked; before that there often are examples that all rows share.
    prompt = None if example.prompt is None else excerpt(example.prompt, MAX_CONTEXT, from_end=True)
    reference = None if example.reference is None else excerpt(example.reference, MAX_CONTEXT)
    is_same = example.before_text is not None and example.before_text == example.after_text
    return ExampleTexts(diff.before, diff.after, prompt, reference, is_same, diff.is_unlike)
