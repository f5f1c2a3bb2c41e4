"""What scoring says of a row and of a corpus."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchinfer.types import RowError, TokenIds, TokenScores


@dataclass(slots=True)
class RowScore:
    """Scores of one row. All logarithms are natural.

    Attributes:
        row_index: place in the input, from 0.
        num_scored_tokens, num_scored_bytes, num_scored_words: what nll is about; see ScoreItem.
        nll: minus the sum of the log-probabilities of the scored tokens, nats; None if there are none.
        is_greedy: every scored token is the model's most probable one.
        sees_all: every scored token was read with everything before it: no window cut the row.
        token_ids: [num_scored_tokens] the scored tokens.
        token_logprobs, token_entropies: [num_scored_tokens] nats; None unless asked for.
        error: why there are no scores.
    """

    row_index: int
    num_scored_tokens: int = 0
    num_scored_bytes: int = 0
    num_scored_words: int = 0
    nll: float | None = None
    is_greedy: bool | None = None
    sees_all: bool | None = None
    token_ids: TokenIds | None = None
    token_logprobs: npt.NDArray[np.float32] | None = None
    token_entropies: npt.NDArray[np.float32] | None = None
    error: RowError | None = None

    @property
    def sample_index(self) -> int:
        """As completions have one: the output's writer orders by it."""
        return 0

    @property
    def perplexity(self) -> float | None:
        """exp(nll / num_scored_tokens)"""
        return exp_mean(self.nll, self.num_scored_tokens)

    @property
    def bits_per_byte(self) -> float | None:
        """nll in bits over the UTF-8 bytes of the scored text; None without text."""
        return bits_per(self.nll, self.num_scored_bytes)


@dataclass(slots=True)
class RowSum:
    """The scores of a row's windows as they come, in any order."""

    num_windows: int  # still to come
    nll: dict[int, float] = field(default_factory=dict)  # by window
    is_greedy: bool = True
    scores: dict[int, TokenScores] = field(default_factory=dict)  # by window, where tokens are asked for
    error: RowError | None = None

    def add(self, window: int, scores: TokenScores | None, error: RowError | None, *, keeps_tokens: bool) -> None:
        self.num_windows -= 1
        if scores is None:
            self.error = self.error or error
            return
        self.nll[window] = -float(scores.logprobs.sum(dtype=np.float64))
        self.is_greedy &= bool(scores.is_top.all())
        if keeps_tokens:
            self.scores[window] = scores

    def total_nll(self) -> float:
        """Windows are added in order, so that the sum does not depend on which came first."""
        return sum(self.nll[window] for window in sorted(self.nll))

    def logprobs(self) -> npt.NDArray[np.float32]:
        return np.concatenate([self.scores[window].logprobs for window in sorted(self.scores)])

    def entropies(self) -> npt.NDArray[np.float32]:
        return np.concatenate([self.scores[window].entropies for window in sorted(self.scores)])


@dataclass(slots=True)
class CorpusScore:
    """Sums over the rows that have scores. Add rows in input order: then no split into batches changes a bit."""

    num_rows: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_words: int = 0
    num_greedy_rows: int = 0
    nll: float = 0.0
    sum_of_perplexities: float = 0.0

    def add(self, row: RowScore) -> None:
        """Rows without scores are left out."""
        if row.nll is None:
            return
        self.num_rows += 1
        self.num_tokens += row.num_scored_tokens
        self.num_bytes += row.num_scored_bytes
        self.num_words += row.num_scored_words
        self.num_greedy_rows += bool(row.is_greedy)
        self.nll += row.nll
        self.sum_of_perplexities += row.perplexity or 0.0

    @property
    def perplexity(self) -> float | None:
        """exp(sum of nll / number of scored tokens): of the corpus, every token counting the same."""
        return exp_mean(self.nll, self.num_tokens)

    @property
    def mean_of_row_perplexities(self) -> float | None:
        """Every row counts the same, and the worst rows most. Not the corpus perplexity."""
        return self.sum_of_perplexities / self.num_rows if self.num_rows else None

    @property
    def byte_perplexity(self) -> float | None:
        return exp_mean(self.nll, self.num_bytes)

    @property
    def word_perplexity(self) -> float | None:
        return exp_mean(self.nll, self.num_words)

    @property
    def bits_per_byte(self) -> float | None:
        return bits_per(self.nll, self.num_bytes)

    @property
    def nll_per_token(self) -> float | None:
        return self.nll / self.num_tokens if self.num_tokens else None


def exp_mean(nll: float | None, count: int) -> float | None:
    """exp(nll / count); infinity where that is beyond a float; None without anything to count."""
    if nll is None or not count:
        return None
    try:
        return math.exp(nll / count)
    except OverflowError:
        return math.inf


def bits_per(nll: float | None, count: int) -> float | None:
    return nll / math.log(2) / count if nll is not None and count else None
