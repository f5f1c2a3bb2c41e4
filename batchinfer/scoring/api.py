"""Scoring from Python: texts, token ids, continuations and chats, in one list, with an engine at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from batchinfer.errors import InputError
from batchinfer.scoring.chat import ChatEncoder, Turns, is_messages
from batchinfer.scoring.encode import Bos, TextEncoder
from batchinfer.scoring.item import ScoreItem
from batchinfer.scoring.result import RowScore
from batchinfer.scoring.run import score_items
from batchinfer.scoring.windows import Window
from batchinfer.types import Messages, TokenIds

if TYPE_CHECKING:
    from batchinfer.config import EngineConfig
    from batchinfer.engine.engine import Engine
    from batchinfer.models.source import ModelSource

Ids = Sequence[int] | TokenIds
Scorable = str | Ids | tuple[str, str] | tuple[Ids, Ids] | Messages | None


def score(
    inputs: Sequence[Scorable],
    model: str | ModelSource,
    config: EngineConfig | None = None,
    **options: Any,
) -> list[RowScore]:
    """Load a model and score with it; `options` are those of Engine.score.

    To score more than once, make an Engine and keep it.
    """
    from batchinfer.engine.engine import Engine

    return Engine(model, config).score(inputs, **options)


def score_inputs(
    engine: Engine,
    inputs: Sequence[Scorable],
    *,
    turns: Turns = "assistant",
    system: str | None = None,
    bos: Bos = "auto",
    window: int | None = None,
    stride: int | None = None,
    token_logprobs: bool = True,
    entropies: bool = False,
) -> list[RowScore]:
    """See Engine.score."""
    if isinstance(inputs, (str, tuple)):
        raise ValueError("inputs must be a list of what is to be scored: wrap one text or pair in a list")
    items = _items(engine, inputs, turns, system, bos)
    cut = Window.of(window, stride, engine.max_model_len)
    return score_items(engine, items, cut, token_logprobs=token_logprobs, entropies=entropies)


def _items(engine: Engine, inputs: Sequence[Scorable], turns: Turns, system: str | None, bos: Bos) -> list[ScoreItem]:
    encoder = TextEncoder(engine.tokenizer, engine.model.spec.vocab_size, bos)
    readers: dict[str, Callable[[Sequence[Any]], list[ScoreItem]]] = {
        "text": encoder.texts,
        "pair": encoder.pairs,
        "ids": encoder.token_ids,
    }
    kinds = [_kind(one, place) for place, one in enumerate(inputs)]
    if "chat" in kinds:
        chat = ChatEncoder(engine.tokenizer, engine.eos_token_ids, turns, system)
        readers["chat"] = lambda chats: [chat.item(one) for one in chats]
    elif system is not None:
        raise InputError("system is for messages, and there are none")
    items: list[ScoreItem | None] = [None] * len(inputs)
    for kind, read in readers.items():
        places = [place for place, one in enumerate(kinds) if one == kind]
        for place, item in zip(places, read([inputs[place] for place in places]), strict=True):
            items[place] = item
    return [item for item in items if item is not None]


def _kind(one: Any, place: int) -> str:
    if one is None or isinstance(one, str):
        return "text"
    if is_messages(one):
        return "chat"
    if isinstance(one, tuple) and len(one) == 2 and not isinstance(one[0], (int, np.integer)):
        if isinstance(one[0], str) == isinstance(one[1], str):
            return "pair"
    elif isinstance(one, (list, tuple, np.ndarray)) and all(isinstance(i, (int, np.integer)) for i in one):
        return "ids"
    raise ValueError(
        f"input {place} must be a text, a list of token ids, a pair (context, continuation) of two texts or two lists "
        f"of token ids, or a list of messages, got {one!r:.100}"
    )
