"""The rows worth reading: those that lost or gained most."""

from __future__ import annotations

import numpy as np

from batchinfer.evals.protocol import MetricScores
from batchinfer.evals.result import RowExample
from batchinfer.evals.rows import PairedRows

MAX_EXAMPLES = 20


def worst_and_best(scores: MetricScores, pairs: PairedRows) -> tuple[tuple[RowExample, ...], tuple[RowExample, ...]]:
    """(worst regressions, best gains), the largest first, rows without a change left out.

    With no better direction the largest decreases and increases. Figures between the two sides have a worst end
    only: the rows furthest from neutral.
    """
    pair_of = pairs.first_pair_of_prompt if scores.spec.level == "prompt" else np.arange(len(pairs))
    if scores.is_paired:
        before, after = scores.sides
        with np.errstate(invalid="ignore"):  # of infinite values
            difference = after.values - before.values
        gain = -difference if scores.spec.higher_is_better is False else difference
    else:
        assert scores.between is not None
        difference = scores.between.values - scores.spec.neutral
        gain = -np.abs(difference)
    order = np.argsort(gain, kind="stable")  # NaN last
    worst = [row for row in order[:MAX_EXAMPLES] if gain[row] < 0]
    order = np.argsort(-gain, kind="stable")
    best = [row for row in order[:MAX_EXAMPLES] if gain[row] > 0]
    return (
        tuple(_example(scores, pairs, int(row), int(pair_of[row]), float(difference[row])) for row in worst),
        tuple(_example(scores, pairs, int(row), int(pair_of[row]), float(difference[row])) for row in best),
    )


def prompt_text(pairs: PairedRows, pair: int) -> str | None:
    """The prompt as a person reads it. None where it is not known, or is token ids."""
    if pairs.prompt_column is None:
        return None
    value = pairs.inputs.column(pairs.prompt_column)[pair].as_py()
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in value)
    return None


def _example(scores: MetricScores, pairs: PairedRows, row: int, pair: int, difference: float) -> RowExample:
    id_ = pairs.ids[pair]
    return RowExample(
        metric=scores.spec.name,
        id=id_ if isinstance(id_, (str, int)) else str(id_),
        sample_index=int(pairs.sample_index[pair]),
        before=None if scores.before is None else float(scores.before.values[row]),
        after=None if scores.after is None else float(scores.after.values[row]),
        difference=difference,
        prompt=prompt_text(pairs, pair),
        reference=None if pairs.references is None else pairs.references[pair],
        before_text=pairs.before.texts[pair],
        after_text=pairs.after.texts[pair],
    )
