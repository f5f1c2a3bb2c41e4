"""Which evaluators there are: those of this package, and those that installed packages register.

A package adds its own in its pyproject.toml; the name is what `--metrics` picks:

    [project.entry-points."batchinfer.evaluators"]
    word_count = "my_package.metrics:WordCount"
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import NoReturn

from batchinfer.errors import InputError
from batchinfer.evals.protocol import ENTRY_POINT_GROUP, EvalContext, EvalOptions, Evaluator, EvaluatorFactory, Needs
from batchinfer.evals.rows import PairedRows

#: name -> module:attribute, in the order in which reports show them. Imported only when made.
BUILTIN: dict[str, str] = {
    "accuracy": "batchinfer.evals.metrics.accuracy:Accuracy",
    "semantic": "batchinfer.evals.metrics.semantic:Semantic",
    "perplexity": "batchinfer.evals.metrics.perplexity:Perplexity",
    "drift": "batchinfer.evals.metrics.drift:Drift",
    "diversity": "batchinfer.evals.metrics.diversity:Diversity",
    "length": "batchinfer.evals.metrics.length:Length",
    "win_rate": "batchinfer.evals.metrics.win_rate:WinRate",
}


def evaluator_names() -> list[str]:
    """Built-in ones first, then those of other packages."""
    return [*BUILTIN, *sorted(set(_entry_points()) - set(BUILTIN))]


def make_evaluators(names: Sequence[str] | None, options: EvalOptions) -> list[Evaluator]:
    """The evaluators of these names, each once; None: all. Those that read other metrics come last.

    Of all, one of another package that cannot be loaded is left out with the reason: nobody asked for it.

    Raises InputError for a name that does not exist, an evaluator that cannot be loaded, or options
    that one of them refuses.
    """
    known = evaluator_names()
    for name in names or ():
        if name not in known:
            raise InputError(f"--metrics: there is no evaluator {name!r}{_hint(name, known)}")
    if names is None:
        others = [_loaded_or_not(name, options) for name in known if name not in BUILTIN]
        return in_order([*(_factory(name)(options) for name in BUILTIN), *others])
    return in_order(_factory(name)(options) for name in dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class _NotLoaded:
    """Stands for an evaluator in the list of those that were left out."""

    name: str
    reason: str
    title: str = ""
    needs: Needs = field(default_factory=Needs)
    metric_names: tuple[str, ...] = ()

    def why_not(self, pairs: PairedRows, context: EvalContext) -> str:
        return self.reason

    def score(self, pairs: PairedRows, context: EvalContext) -> NoReturn:
        raise AssertionError(self.reason)


def _loaded_or_not(name: str, options: EvalOptions) -> Evaluator:
    try:
        return _factory(name)(options)
    except InputError as error:
        return _NotLoaded(name, str(error))


def in_order(evaluators: Iterable[Evaluator]) -> list[Evaluator]:
    return sorted(evaluators, key=lambda evaluator: evaluator.needs.other_metrics)  # stable


def _factory(name: str) -> EvaluatorFactory:
    try:
        if name in BUILTIN:
            module, attribute = BUILTIN[name].split(":")
            return getattr(importlib.import_module(module), attribute)
        return _entry_points()[name].load()
    except (ImportError, AttributeError) as error:
        raise InputError(f"evaluator {name!r} cannot be loaded: {error}") from error


def _entry_points() -> dict[str, EntryPoint]:
    """A name of this package's own is not replaced by another package's."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _hint(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
