"""The two models of a comparison, for evaluators that run them: each is loaded once, and reads the outputs once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from batchinfer.engine.engine import Engine
    from batchinfer.evals.protocol import EvalContext
    from batchinfer.models.source import ModelSource

_T = TypeVar("_T")


class EnginePair(NamedTuple):
    before: Engine
    after: Engine

    @property
    def have_same_tokenizer(self) -> bool:
        """Equal ids mean equal texts, and distributions are over the same tokens."""
        one, two = self
        same_size = one.model.spec.vocab_size == two.model.spec.vocab_size
        return same_size and one.tokenizer.digest() == two.tokenizer.digest()


class Models:
    """What evaluators of one comparison share. Loads nothing until it is asked."""

    def __init__(self) -> None:
        self._sources: dict[tuple[str, str | None], ModelSource] = {}
        self._engines: dict[tuple[str, str | None], Engine] = {}
        self._results: dict[Any, Any] = {}

    def sources(self, context: EvalContext) -> tuple[ModelSource, ModelSource]:
        """The models, found and understood, without weights. Raises InputError if they cannot be used."""
        return self._source(context.before_model, None), self._source(context.after_model, context.before_model)

    def _source(self, name: str | None, default_base: str | None) -> ModelSource:
        from batchinfer.models.source import resolve_model

        assert name is not None, "the evaluator needs models"
        key = (name, default_base)
        if key not in self._sources:
            self._sources[key] = resolve_model(name, default_base=default_base)
        return self._sources[key]

    def engines(self, context: EvalContext) -> EnginePair:
        """Both models, loaded; one engine if they are the same. Raises InputError if they cannot be used."""
        from batchinfer.engine.engine import Engine

        pair = []
        for source in self.sources(context):
            key = (str(source.path), None if source.adapter is None else str(source.adapter.folder))
            if key not in self._engines:
                context.progress(f"loading {source.name}")
                self._engines[key] = Engine(source, context.engine)
            pair.append(self._engines[key])
        return EnginePair(*pair)

    def once(self, key: Any, make: Callable[[], _T]) -> _T:
        """`make()` the first time; the same object for the same key after that."""
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]
