"""Items through an engine: windows out, sums back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, Protocol

from batchinfer.scoring.item import ScoreItem
from batchinfer.scoring.result import RowScore, RowSum
from batchinfer.scoring.windows import Window
from batchinfer.types import Completion, Prompt, SamplingParams

_PARAMS = SamplingParams()


class RunningEngine(Protocol):
    """What is needed of an engine here; see Engine.run."""

    def run(self, prompts: Sequence[Prompt], on_step: Callable[[Any], None] | None = None) -> Iterator[Completion]: ...


def score_items(
    engine: RunningEngine,
    items: Sequence[ScoreItem],
    window: Window,
    *,
    token_logprobs: bool = False,
    entropies: bool = False,
    on_step: Callable[[Any], None] | None = None,
    first_row_index: int = 0,
) -> list[RowScore]:
    """The scores of `items`, in order, all planned together: what they have in common is computed once.

    Args:
        token_logprobs, entropies: keep these figures of each token.
        on_step: called after each step of the engine with its stats.
        first_row_index: of the first item.
    """
    prompts: list[Prompt] = []
    owners: list[tuple[int, int]] = []  # (place of the item, window)
    sums: list[RowSum] = []
    for place, item in enumerate(items):
        pieces = list(window.pieces(item))
        for number, (token_ids, request) in enumerate(pieces):
            prompts.append(Prompt(len(prompts), token_ids, _PARAMS, score=request))
            owners.append((place, number))
        sums.append(RowSum(len(pieces)))
    with closing(engine.run(prompts, on_step)) as finished:  # type: ignore[type-var]
        for completion in finished:
            place, number = owners[completion.row_index]
            sums[place].add(number, completion.scores, completion.error, keeps_tokens=token_logprobs or entropies)
    assert all(not row.num_windows for row in sums), "the engine lost a window"
    return [
        _row_score(first_row_index + place, item, sums[place], window, token_logprobs, entropies)
        for place, item in enumerate(items)
    ]


def _row_score(
    row_index: int, item: ScoreItem, row: RowSum, window: Window, token_logprobs: bool, entropies: bool
) -> RowScore:
    error = item.error or row.error
    if error is not None:
        return RowScore(row_index, error=error)
    return RowScore(
        row_index,
        num_scored_tokens=item.num_scored,
        num_scored_bytes=item.num_bytes,
        num_scored_words=item.num_words,
        nll=row.total_nll(),
        is_greedy=row.is_greedy,
        sees_all=window.sees_all(item),
        token_ids=item.scored_ids if token_logprobs or entropies else None,
        token_logprobs=row.logprobs() if token_logprobs else None,
        token_entropies=row.entropies() if entropies else None,
    )
