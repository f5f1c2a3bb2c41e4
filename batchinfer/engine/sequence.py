"""One running sample: its tokens, its blocks, how far its KV is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from batchinfer.engine.detokenizer import OutputText
from batchinfer.types import Prompt, SamplingParams, TokenIds, TokenScores


class Owner(NamedTuple):
    """A sample that takes a sequence's result."""

    row_index: int
    sample_index: int
    num_cached: int  # prompt tokens that sequences before it have too, by the plan


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and what has been generated after it.

    There are no phases: `num_computed` catches up with `num_tokens`.

        [0, num_cached) KV shared with a node · [num_cached, num_computed) computed here · rest to come
        [0, num_known) the host has the ids · [num_known, num_tokens) drawn, the ids are on the device
    """

    prompt: Prompt
    sample_index: int
    order: int  # place in the order of execution; lower goes first
    path: tuple[int, ...]  # tree nodes above the row that other sequences need too, from the root down
    text: OutputText
    stream_key: int
    max_tokens: int  # params.max_tokens cut to what max_model_len leaves; 0 for a row that only scores
    #: Who takes the result: the row's own sample, unless it is done, and exact duplicates.
    owners: list[Owner] = field(default_factory=list)
    window: int = 0  # which of the run's windows it came with

    tokens: TokenIds = field(init=False)  # [capacity] int32; the first num_known count
    num_tokens: int = field(init=False)
    num_known: int = field(init=False)
    num_computed: int = 0
    num_cached: int = 0  # at the latest admission
    blocks: list[int] = field(default_factory=list)
    is_running: bool = False  # the scheduler's
    has_ended: bool = False  # it has its last token or its error; what was drawn after that is of no use
    slot: int = -1  # the persistent batch's row; -1: none
    num_preempted: int = 0
    is_finite: bool = True  # False: a hidden state was NaN or infinite, so its KV is not for others

    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    stop_reason: str | int | None = None
    wanted: npt.NDArray[np.bool_] | None = None  # [num_prompt + 1] tokens to score, here or for a node; None: none
    scores: TokenScores | None = None  # [num_prompt + 1], filled where wanted
    hidden: list[Tensor] = field(default_factory=list)  # of the scored tokens, see ScoreRequest.keeps_hidden
    penalties: Penalties | None = None

    def __post_init__(self) -> None:
        # Waiting rows hold no copy of their prompt: a window has tens of thousands of them.
        self.tokens = self.prompt.token_ids
        self.num_tokens = self.num_known = len(self.tokens)

    @property
    def params(self) -> SamplingParams:
        return self.prompt.params

    @property
    def scored_spans(self) -> tuple[tuple[int, int], ...]:
        """Ranges of positions whose tokens this row wants scored."""
        score = self.prompt.score
        if score is not None:
            return score.spans
        return ((1, self.num_prompt),) if self.params.prompt_logprobs and self.num_prompt > 1 else ()

    @property
    def keeps_hidden(self) -> bool:
        return self.prompt.score is not None and self.prompt.score.keeps_hidden

    def token_at(self, positions: npt.NDArray[np.int64]) -> TokenIds:
        """Tokens of the prompt and, at num_prompt, the one that is scored behind it."""
        ids = self.prompt.token_ids[np.minimum(positions, self.num_prompt - 1)]
        if self.prompt.score is not None:
            ids[positions == self.num_prompt] = self.prompt.score.next_id
        return ids

    @property
    def num_prompt(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def num_output(self) -> int:
        """Output tokens that the host knows."""
        return self.num_known - self.num_prompt

    @property
    def num_drawn(self) -> int:
        """Output tokens, those among them that the host has not read."""
        return self.num_tokens - self.num_prompt

    @property
    def has_all_scores(self) -> bool:
        """It only scores, and its last token has been computed."""
        return self.prompt.score is not None and self.num_computed == self.num_prompt

    @property
    def is_plain(self) -> bool:
        """The next token is the argmax of the raw logits, and nothing but its logprob is asked for.

        It depends on the row alone: a row takes the same way through the head in any company.
        """
        params = self.params
        return (
            params.temperature == 0
            and self.num_drawn >= params.min_tokens
            and params.repetition_penalty == 1
            and not params.presence_penalty
            and not params.frequency_penalty
            and (params.logprobs is None or (params.logprobs == 0 and params.logprobs_mode == "raw"))
        )

    def draw(self) -> None:
        """Its next token is being drawn: it counts, and has a place; `append` says later which it is."""
        if self.num_tokens == len(self.tokens):
            grown = np.full(min(self.num_prompt + self.max_tokens, 2 * self.num_tokens + 64), -1, dtype=np.int32)
            grown[: self.num_tokens] = self.tokens
            self.tokens = grown
        self.num_tokens += 1

    def append(self, token_id: int) -> None:
        """The first drawn token that the host did not know; one more, if it knew all."""
        if self.num_known == self.num_tokens:
            self.draw()
        self.tokens[self.num_known] = token_id
        self.num_known += 1
        if self.penalties is not None:
            self.penalties.add(token_id)

    def forget_unread(self) -> None:
        """What was drawn and not read is to be drawn again."""
        self.num_tokens = self.num_known

    def penalised(self) -> Penalties | None:
        """What penalties need of the known tokens, built when first asked for; None if the row has none."""
        params = self.params
        if self.penalties is None and (
            params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        ):
            self.penalties = Penalties.of(self.prompt.token_ids)
        return self.penalties


@dataclass(slots=True)
class Penalties:
    """Distinct ids of prompt and output, and how often each occurs in the output."""

    place: dict[int, int]
    ids: npt.NDArray[np.int64]  # [capacity]; the first num_ids count
    counts: npt.NDArray[np.int32]  # [capacity] occurrences in the output
    num_ids: int

    @classmethod
    def of(cls, prompt: TokenIds) -> Penalties:
        ids = np.unique(prompt).astype(np.int64)
        return cls({int(i): k for k, i in enumerate(ids)}, ids, np.zeros(len(ids), dtype=np.int32), len(ids))

    def add(self, token_id: int) -> None:
        place = self.place.get(token_id)
        if place is None:
            place = self.place[token_id] = self.num_ids
            if place == len(self.ids):
                self.ids = np.resize(self.ids, 2 * place + 8)
                self.counts = np.resize(self.counts, 2 * place + 8)
            self.ids[place], self.counts[place] = token_id, 0
            self.num_ids += 1
        self.counts[place] += 1
