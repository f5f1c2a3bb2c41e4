"""A step that was launched: what the device works out, and what the host reads of it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
from torch import Tensor

from batchinfer.engine.draws import LaunchedDraws
from batchinfer.engine.pending import PendingTokens
from batchinfer.engine.prompt_scores import LaunchedScores
from batchinfer.engine.scheduler import Step
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.staging import Fetched, Staging


@dataclass(slots=True)
class Flight:
    """Between the launch of a step and the moment when the host takes its results."""

    step: Step
    hidden: Tensor  # [num_tokens, hidden_size]
    scores: LaunchedScores | None
    draws: LaunchedDraws
    fetched: Fetched
    is_ahead: bool  # the next step is launched before this one is taken
    pending: PendingTokens | None  # what the next step needs of this one
    finished: list[Sequence] = field(default_factory=list)  # that left the scheduler with this step
    scored: list[Sequence] = field(default_factory=list)  # of these, the ones that have nothing to generate

    @classmethod
    def of(
        cls,
        step: Step,
        hidden: Tensor,
        total: Tensor,
        scores: LaunchedScores | None,
        draws: LaunchedDraws,
        staging: Staging,
        *,
        is_ahead: bool,
    ) -> Flight:
        """Whatever the host will read sets out in one copy. `total`: the sum of all hidden states."""
        tensors = [total]
        if scores is not None:
            tensors += scores.tensors()
        fetched = staging.fetch(tensors + draws.tensors())
        return cls(step, hidden, scores, draws, fetched, is_ahead, draws.pending() if is_ahead else None)

    def results(self) -> Iterator[npt.NDArray[Any]]:
        """The sum of all hidden states, then what `scores` and `draws` read. Waits for the step, not for later ones."""
        return iter(self.fetched.arrays())
