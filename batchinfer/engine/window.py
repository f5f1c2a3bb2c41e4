"""From a window of prompts to sequences and shared nodes: what will run, in which order, sharing what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.config import Policy
from batchinfer.engine.detokenizer import OutputText
from batchinfer.engine.random import stream_key
from batchinfer.engine.sequence import Owner, Sequence
from batchinfer.engine.tree_cache import SharedNode
from batchinfer.planner.order import execution_order
from batchinfer.planner.prefix_tree import PrefixTree, build_prefix_tree
from batchinfer.types import Completion, ErrorCode, Prompt, RowError, SamplingParams, ScoreRequest, failed


@dataclass(slots=True)
class WindowPlan:
    """What a window of prompts comes down to."""

    samples_left: dict[int, int] = field(default_factory=dict)  # row_index -> completions to come, refusals included
    refused: list[Completion] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)  # by order
    nodes: list[SharedNode] = field(default_factory=list)
    num_prompt_tokens: int = 0  # over rows and samples that run
    num_shareable_tokens: int = 0


class WindowPlanner:
    """Turns prompts into sequences, a window at a time.

    Places in the order of execution and the numbers of nodes go on from one window to the next, so that
    several windows can run together.

    Args:
        tokenizer: for stop strings and texts, see OutputText.
        max_model_len: most tokens of prompt and output together.
    """

    def __init__(self, tokenizer: Any, max_model_len: int, policy: Policy, *, prefix_sharing: bool) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.policy = policy
        self.prefix_sharing = prefix_sharing
        self._num_windows = 0
        self._num_orders = 0
        self._num_nodes = 0

    def plan(self, prompts: Iterable[Prompt]) -> WindowPlan:
        out = WindowPlan()
        rows: list[Prompt] = []
        for prompt in prompts:
            num_left = prompt.params.n - len(prompt.done_samples)
            error = prompt.error or self._refusal(prompt)
            if error is None:
                rows.append(prompt)
            elif not prompt.done_samples:
                num_left = 1
                out.refused.append(failed(prompt, error))
            else:
                num_left = 0
            if num_left:
                out.samples_left[prompt.row_index] = num_left
        if rows:
            if self.prefix_sharing:
                self._plan_shared(rows, out)
            else:
                self._plan_separate(rows, out)
        for seq in out.sequences:
            out.num_prompt_tokens += seq.num_prompt * len(seq.owners)
            out.num_shareable_tokens += sum(owner.num_cached for owner in seq.owners)
        self._num_windows += 1
        self._num_orders += len(out.sequences)
        return out

    def _refusal(self, prompt: Prompt) -> RowError | None:
        num_tokens = len(prompt.token_ids)
        if num_tokens == 0:
            return RowError(ErrorCode.PROMPT_EMPTY, "the prompt has no token")
        if prompt.score is not None:
            _check_score(prompt, prompt.score)
            if num_tokens <= self.max_model_len:
                return None
            message = f"{num_tokens} tokens to score, max_model_len is {self.max_model_len}: score it in windows"
            return RowError(ErrorCode.PROMPT_TOO_LONG, message)
        if num_tokens >= self.max_model_len:
            message = (
                f"the prompt has {num_tokens} tokens, max_model_len is {self.max_model_len} and leaves no room "
                f"for output: shorten it or raise --max-model-len"
            )
            return RowError(ErrorCode.PROMPT_TOO_LONG, message)
        return None

    def _plan_separate(self, rows: list[Prompt], out: WindowPlan) -> None:
        places: Iterable[int] = range(len(rows))
        if self.policy == "priority":
            places = sorted(places, key=lambda row: -rows[row].priority)
        for row in places:
            prompt = rows[row]
            for sample in range(prompt.params.n):
                if sample not in prompt.done_samples:
                    owners = [Owner(prompt.row_index, sample, 0)]
                    out.sequences.append(self._sequence(prompt, sample, owners, len(out.sequences), ()))

    def _plan_shared(self, rows: list[Prompt], out: WindowPlan) -> None:
        tree, order = self._tree(rows)
        kept, takers = self._collapse(rows, tree, order)
        paths = _SharedPaths(tree, kept)
        met: set[int] = set()  # nodes that a sequence so far passes
        uses: dict[int, list[int]] = {}
        scored = _ScoredTokens(tree)
        for row in map(int, order):
            prompt = rows[row]
            path = paths.of(int(tree.node_of_row[row]))
            if prompt.score is not None and prompt.score.keeps_hidden:
                path = tuple(node for node in path if tree.end[node] < prompt.score.spans[0][0])
            runs = False
            for sample in range(kept[row]):
                num_cached = _num_cached(prompt, path, met, tree)
                met.update(path)
                owners = _owners(prompt, sample, num_cached, takers.get((row, sample), ()))
                if not owners:
                    continue
                runs = True
                numbered = tuple(self._num_nodes + node for node in path)
                seq = self._sequence(prompt, sample, owners, len(out.sequences), numbered)
                for node in path:
                    uses.setdefault(node, []).append(seq.order)
                out.sequences.append(seq)
            if runs:
                scored.add(path, out.sequences[-1].scored_spans)
        out.nodes = [
            SharedNode(
                index=self._num_nodes + node,
                parent=self._num_nodes + int(tree.parent[node]) if tree.parent[node] > 0 else 0,
                start=int(tree.start[node]),
                end=int(tree.end[node]),
                depth=paths.depth(node),
                uses=np.array(orders, dtype=np.int64),
                scored=scored.masks.get(node),
                keeps_hidden=node in scored.borders,
                num_pending=len(orders),
            )
            for node, orders in uses.items()
        ]
        self._num_nodes += len(tree.parent)

    def _tree(self, rows: list[Prompt]) -> tuple[PrefixTree, npt.NDArray[np.int32]]:
        """The tree of the rows' tokens, and the rows in their order of execution.

        Rows that keep hidden states share nothing from the first of them on: the tree gets a node there.
        """
        cuts = [
            prompt.token_ids[: prompt.score.spans[0][0] - 1]
            for prompt in rows
            if prompt.score is not None and prompt.score.keeps_hidden
        ]
        tree = build_prefix_tree([prompt.token_ids for prompt in rows] + cuts)
        priorities = [prompt.priority for prompt in rows] + [0.0] * len(cuts)
        limits = [0 if prompt.score else prompt.params.max_tokens for prompt in rows] + [0] * len(cuts)
        order = execution_order(tree, self.policy, priorities, limits)
        return tree, order[order < len(rows)] if cuts else order

    def _collapse(
        self, rows: list[Prompt], tree: PrefixTree, order: np.ndarray
    ) -> tuple[np.ndarray, dict[tuple[int, int], list[tuple[Prompt, int]]]]:
        """How many samples of each row to run, and which others take whose result.

        Equal tokens, parameters and random stream give equal output; greedy rows have no stream.
        """
        kept = np.zeros(tree.num_rows, dtype=np.int64)
        first: dict[tuple[int, SamplingParams, ScoreRequest | None, int | None], int] = {}
        takers: dict[tuple[int, int], list[tuple[Prompt, int]]] = {}
        for row in map(int, order):
            prompt = rows[row]
            num_samples, stream = prompt.params.n, stream_of(prompt)
            greedy = stream is None
            key = (int(tree.node_of_row[row]), prompt.params, prompt.score, stream)
            owner = first.setdefault(key, row)
            kept[row] = 0 if owner != row else 1 if greedy else num_samples
            for sample in range(num_samples):
                to = (owner, 0 if greedy else sample)
                if (row, sample) != to:
                    takers.setdefault(to, []).append((prompt, sample))
        return kept, takers

    def _sequence(
        self, prompt: Prompt, sample: int, owners: list[Owner], place: int, path: tuple[int, ...]
    ) -> Sequence:
        params = prompt.params
        return Sequence(
            prompt=prompt,
            sample_index=sample,
            order=self._num_orders + place,
            path=path,
            owners=owners,
            window=self._num_windows,
            text=OutputText(self.tokenizer, params.stop, params.include_stop),
            stream_key=stream_key(params.seed, prompt.key, sample),
            max_tokens=0 if prompt.score else min(params.max_tokens, self.max_model_len - len(prompt.token_ids)),
        )


def _num_cached(prompt: Prompt, path: tuple[int, ...], met: set[int], tree: PrefixTree) -> int:
    """Prompt tokens that the sequences before this one have too; its last token is computed in any case."""
    for node in reversed(path):
        if node in met:
            return min(int(tree.end[node]), len(prompt.token_ids) - 1)
    return 0


def _owners(prompt: Prompt, sample: int, num_cached: int, takers: Iterable[tuple[Prompt, int]]) -> list[Owner]:
    """Those that still want the result of this sample of the prompt."""
    owners = [] if sample in prompt.done_samples else [Owner(prompt.row_index, sample, num_cached)]
    owners += [
        Owner(taker.row_index, of_taker, len(taker.token_ids))
        for taker, of_taker in takers
        if of_taker not in taker.done_samples
    ]
    return owners


def stream_of(prompt: Prompt) -> int | None:
    """The row's random stream; None: greedy, it draws nothing and its samples are equal.

    Prompts of equal tokens, parameters and stream have equal samples.
    """
    return None if prompt.params.temperature == 0 else prompt.key


def _check_score(prompt: Prompt, score: ScoreRequest) -> None:
    if score.spans[-1][1] > len(prompt.token_ids) + 1:
        raise ValueError(f"row {prompt.row_index}: {score.spans=} for {len(prompt.token_ids)} tokens and the next one")
    if prompt.params.n != 1:
        raise ValueError(f"row {prompt.row_index} only scores, its n must be 1, got {prompt.params.n}")


class _ScoredTokens:
    """Which tokens of each node some row below wants scored."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self.masks: dict[int, npt.NDArray[np.bool_]] = {}  # [end - start] of a node
        self.borders: set[int] = set()  # nodes whose last hidden state somebody's next token is scored from

    def add(self, path: tuple[int, ...], spans: tuple[tuple[int, int], ...]) -> None:
        for node in path if spans else ():
            start, end = int(self._tree.start[node]), int(self._tree.end[node])
            for begin, stop in spans:
                if begin < end and stop > start:
                    mask = self.masks.setdefault(node, np.zeros(end - start, dtype=np.bool_))
                    mask[max(begin - start, 0) : stop - start] = True
                if begin <= end < stop:
                    self.borders.add(node)


class _SharedPaths:
    """Paths from the root over the nodes that at least two sequences pass."""

    def __init__(self, tree: PrefixTree, num_seqs_of_row: np.ndarray) -> None:
        self._parent = tree.parent
        total = np.concatenate(([0], np.cumsum(num_seqs_of_row[tree.order])))
        self._is_shared = total[tree.row_end] - total[tree.row_begin] > 1
        self._is_shared[0] = False
        self._paths: dict[int, tuple[int, ...]] = {0: ()}

    def of(self, node: int) -> tuple[int, ...]:
        trail: list[int] = []
        while node not in self._paths:
            trail.append(node)
            node = int(self._parent[node])
        path = self._paths[node]
        for node in reversed(trail):
            path = self._paths[node] = (*path, node) if self._is_shared[node] else path
        return path

    def depth(self, node: int) -> int:
        return len(self._paths[node])
