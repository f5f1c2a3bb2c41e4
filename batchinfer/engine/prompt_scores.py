"""Scores of prompt tokens: log-probability, entropy, whether the token is the most probable one.

The token at position p is predicted from the hidden state at p - 1. Scores of a shared span are kept
with its node, and so is the hidden state of the node's last token, from which each row below gets the
score of its own next one. Only positions that somebody wants go through the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer.engine.scheduler import Step
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.staging import Staging
from batchinfer.engine.tree_cache import Match, SharedNode, TreeCache
from batchinfer.kernels.reference import TargetLogprobs
from batchinfer.models.decoder import LanguageModel
from batchinfer.types import TokenScores


class _Rows(NamedTuple):
    """Scored tokens of one sequence in this step."""

    seq: Sequence
    positions: npt.NDArray[np.int64]
    hidden: Tensor  # [num_positions, hidden_size]


@dataclass(frozen=True, slots=True)
class LaunchedScores:
    """Scores of a step, on the device; none, where only hidden states were kept."""

    rows: list[_Rows]
    targets: npt.NDArray[np.int64]  # [positions of all rows]
    found: TargetLogprobs | None

    def tensors(self) -> list[Tensor]:
        """All there is to bring to the host."""
        return [] if self.found is None else [self.found.logprob, self.found.entropy, self.found.argmax]

    def fill(self, arrays: Iterator[npt.NDArray[Any]]) -> None:
        """Give the sequences their scores, with the values of `tensors` taken off the front of `arrays`."""
        if self.found is None:
            return
        values = TokenScores(next(arrays), next(arrays), next(arrays) == self.targets)
        at = 0
        for seq, positions, _ in self.rows:
            assert seq.scores is not None
            seq.scores[positions] = values[at : at + len(positions)]
            at += len(positions)


class PromptScorer:
    """Fills `scores` of the sequences that want them, or that compute a node for those who do."""

    def __init__(self, model: LanguageModel, cache: TreeCache, staging: Staging) -> None:
        self.model = model
        self.cache = cache
        self.staging = staging
        self._borders: list[_Rows] = []  # predicted from a node's last hidden state; scored with the next step

    def admit(self, seq: Sequence, match: Match) -> None:
        """Note what the sequence wants, and take what the shared nodes keep of its cached part."""
        seq.hidden.clear()  # of before a preemption
        seq.wanted = self._wanted(seq)
        if seq.wanted is None:
            return
        if seq.scores is None:
            seq.scores = TokenScores.empty(seq.num_prompt + 1)
        for span in match.spans:
            if span.scores is not None:
                seq.scores[span.start : span.end] = span.scores
        end = match.num_cached
        if match.spans and end == match.spans[-1].end and seq.wanted[end]:
            last = match.spans[-1].last_hidden
            assert last is not None
            self._borders.append(_Rows(seq, np.array([end]), last[None]))

    def _wanted(self, seq: Sequence) -> npt.NDArray[np.bool_] | None:
        """[num_prompt + 1] whether each token is to be scored; None: none is."""
        spans = seq.scored_spans
        computed = [(node.start, node.scored) for node in self._computing(seq) if node.scored is not None]
        if not spans and not computed:
            return None
        wanted = np.zeros(seq.num_prompt + 1, dtype=np.bool_)
        for begin, end in spans:
            wanted[begin:end] = True
        for start, scored in computed:
            wanted[start : start + len(scored)] |= scored
        return wanted

    def _computing(self, seq: Sequence) -> list[SharedNode]:
        nodes = (self.cache.nodes[index] for index in seq.path)
        return [node for node in nodes if node.computing is seq]

    def used(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Which of the next tokens [0, num_tokens) `score` needs the final hidden states of, ascending."""
        begin = seq.num_computed
        used: set[int] = set()
        if seq.wanted is not None:
            used.update(np.flatnonzero(seq.wanted[begin + 1 : begin + 1 + num_tokens]).tolist())
        for node in self._computing(seq):
            if node.keeps_hidden and begin < node.end <= begin + num_tokens:
                used.add(node.end - 1 - begin)
        return sorted(used)

    def launch(self, step: Step, hidden: Tensor) -> LaunchedScores | None:
        """Score the tokens that this step's hidden states [num_tokens, hidden_size] predict; None: nobody asks."""
        rows, self._borders = self._borders, []
        keeps = False
        at = 0
        for seq, num_tokens in step.scheduled:
            begin = seq.num_computed
            if begin < seq.num_prompt:  # what comes behind the prompt was sampled
                part = hidden[at : at + num_tokens]
                rows += self._predicted(seq, begin, part)
                keeps |= self._keep_last_hidden(seq, begin, part)
            at += num_tokens
        if not rows and not keeps:
            return None
        rows = [scored for row in rows if len((scored := _after_keeping(row)).positions)]
        if not rows:
            return LaunchedScores([], np.empty(0, np.int64), None)
        targets = np.concatenate([row.seq.token_at(row.positions) for row in rows]).astype(np.int64)
        picked = torch.cat([row.hidden for row in rows])
        return LaunchedScores(rows, targets, self.model.target_logprobs(picked, self.staging.put([targets])[0]))

    def start_over(self) -> None:
        """All sequences will be admitted again."""
        self._borders.clear()

    def _predicted(self, seq: Sequence, begin: int, hidden: Tensor) -> list[_Rows]:
        """The wanted tokens behind positions [begin, begin + len(hidden))."""
        if seq.wanted is None:
            return []
        places = np.flatnonzero(seq.wanted[begin + 1 : begin + 1 + len(hidden)])
        if not len(places):
            return []
        is_whole = len(places) == places[-1] - places[0] + 1
        picked = hidden[places[0] : places[-1] + 1] if is_whole else hidden[self.staging.put([places])[0]]
        return [_Rows(seq, begin + 1 + places, picked)]

    def _keep_last_hidden(self, seq: Sequence, begin: int, hidden: Tensor) -> bool:
        ends = [node for node in self._computing(seq) if node.keeps_hidden and begin < node.end <= begin + len(hidden)]
        for node in ends:
            node.last_hidden = hidden[node.end - 1 - begin].clone()
        return bool(ends)


def _after_keeping(row: _Rows) -> _Rows:
    """What is left for the head once hidden states that the sequence keeps are kept: the tokens of shared nodes."""
    score = row.seq.prompt.score
    if score is None or not score.keeps_hidden:
        return row
    num_of_nodes = int(np.searchsorted(row.positions, score.spans[0][0]))
    if num_of_nodes < len(row.positions):
        row.seq.hidden.append(row.hidden[num_of_nodes:].clone())
    return _Rows(row.seq, row.positions[:num_of_nodes], row.hidden[:num_of_nodes])
