"""The values that cross package borders: prompts in, completions out.

The engine works on token ids and knows nothing of files; a `Prompt` is what the dataset package
hands it and a `Completion` is what the output package gets back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

TokenIds = npt.NDArray[np.int32]

#: What `SamplingParams.max_tokens` is when nobody says otherwise.
DEFAULT_MAX_TOKENS = 1024


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # an end-of-sequence id, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or max_model_len was reached: the text is cut
    SCORED = "scored"  # nothing was to be generated, see Prompt.score
    ERROR = "error"  # see Completion.error


class ErrorCode(StrEnum):
    """Codes of row errors. One bad row is one row's error; the run goes on."""

    PROMPT_NULL = "prompt_null"
    PROMPT_EMPTY = "prompt_empty"  # no token at all
    PROMPT_TOO_LONG = "prompt_too_long"  # num_prompt_tokens >= max_model_len
    NEVER_FITS = "never_fits"  # prompt + max_tokens exceed the whole KV pool
    INVALID_PROMPT = "invalid_prompt"  # e.g. text that is not valid Unicode, ids out of range
    INVALID_MESSAGES = "invalid_messages"  # the chat template refused them, a role is missing, ...
    INVALID_IMAGE = "invalid_image"  # an image in the messages, unreadable or for a model that reads text only
    INVALID_ROW = "invalid_row"  # the input cannot be read there, e.g. a line that is no JSON object
    INVALID_PARAMS = "invalid_params"  # the row's own sampling parameters
    NON_FINITE_LOGITS = "non_finite_logits"
    NOTHING_TO_SCORE = "nothing_to_score"  # empty, or a lone token without context; no failure
    NO_OUTPUT = "no_output"  # a row of a run that has no output to score
    PROMPT_DIFFERS = "prompt_differs"  # not the prompt or the vocabulary that the run had


@dataclass(frozen=True, slots=True)
class RowError:
    """Why one row has no result. `message` names the values and what to do."""

    code: ErrorCode
    message: str


LogprobsMode = Literal["raw", "processed"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn for one prompt.

    The order of the steps on the fp32 logits of a position is: `repetition_penalty`,
    `frequency_penalty` and `presence_penalty`, banned ids (end-of-sequence before `min_tokens`),
    `temperature`, `top_k`, `top_p`, `min_p`, draw.

    Attributes:
        max_tokens: most tokens to generate, at least 1. Also cut to what `max_model_len` leaves.
        min_tokens: end-of-sequence ids, stop token ids and stop strings are not honoured before.
        temperature: 0 is greedy (ties go to the lowest id); else logits are divided by it.
        top_k: keep the k most probable ids (0: all); ties are broken towards lower ids.
        top_p: then keep the shortest run of most probable ids whose probability, renormalised
            over what top_k left, is at least top_p (1: all). Never empty.
        min_p: then drop ids less probable than min_p times the most probable one (0: none).
        repetition_penalty: positive logits of ids in prompt or output are divided by it, negative
            ones multiplied (Keskar et al. 2019, CTRL, section 4.1). 0.01 to 100; 1: off.
        presence_penalty: subtracted once from the logits of ids already in the output.
        frequency_penalty: subtracted per occurrence in the output.
        seed: with the row's key, the sample index and the position it fixes the random numbers.
        n: samples per prompt.
        stop: the text ends before the earliest of these strings. Matched on decoded output text.
        stop_token_ids: ids that end the row, beside the model's end-of-sequence ids.
        include_stop: keep the matched stop string in the text.
        ignore_eos: the model's end-of-sequence ids do not end the row.
        logprobs: None: none; 0: of each sampled token; k > 0: also of the k most probable ids.
        logprobs_mode: "raw": log-softmax of the model's own logits in fp32; "processed": of the
            distribution the token was drawn from (greedy: after penalties and bans, at T = 1).
        prompt_logprobs: raw log-probability of each prompt token given those before it.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        for name in self.names():  # numbers out of data frames are numpy's
            if isinstance(value := getattr(self, name), np.generic):
                object.__setattr__(self, name, value.item())
        # Lists and a lone string are what JSON rows and keyword arguments bring.
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        for name, values in (("stop", stop), ("stop_token_ids", self.stop_token_ids)):
            if values is not None and not isinstance(values, (list, tuple)):
                raise ValueError(f"{name} must be a list, got {values!r}")
            object.__setattr__(self, name, tuple(values or ()))
        self._check()

    def _check(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            kind = _KINDS[name]
            if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
                raise ValueError(f"{name} must be {'a number' if kind is float else 'a whole number'}, got {value!r}")
            if not low <= value <= high:  # NaN fails too
                off = " (1 is off)" if name == "repetition_penalty" else ""
                raise ValueError(f"{name} must be between {low} and {high}, got {value!r}{off}")
        if self.top_p == 0.0:
            raise ValueError("top_p must be above 0, got 0.0 (temperature=0 is greedy)")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ValueError(f"stop must be non-empty strings, got {list(self.stop)!r}")
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must be whole numbers from 0, got {list(self.stop_token_ids)!r}")
        if self.logprobs is not None and (
            isinstance(self.logprobs, bool) or not isinstance(self.logprobs, int) or not 0 <= self.logprobs <= 1000
        ):
            raise ValueError(f"logprobs must be between 0 and 1000, got {self.logprobs!r}")
        if self.logprobs_mode not in ("raw", "processed"):
            raise ValueError(f"logprobs_mode must be 'raw' or 'processed', got {self.logprobs_mode!r}")
        for name in ("include_stop", "ignore_eos", "prompt_logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], base: SamplingParams | None = None) -> SamplingParams:
        """`base` with the non-null `values` on top. Raises ValueError naming an unknown key."""
        unknown = sorted(set(values) - set(cls.names()))
        if unknown:
            raise ValueError(f"unknown sampling parameter {unknown[0]!r}; known: {', '.join(cls.names())}")
        given = {name: value for name, value in values.items() if value is not None}
        return replace(base or cls(), **given)


_INT32_MAX = 2**31 - 1
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, _INT32_MAX),
    ("min_tokens", 0, _INT32_MAX),
    ("temperature", 0.0, 1e4),
    ("top_k", 0, _INT32_MAX),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 100.0),  # far beyond it, logits leave the range of fp32
    ("presence_penalty", -1e4, 1e4),
    ("frequency_penalty", -1e4, 1e4),
    ("seed", -(2**63), 2**64 - 1),
    ("n", 1, 100_000),
)
_KINDS: dict[str, type] = {
    name: float if name.endswith("_penalty") or name in ("temperature", "top_p", "min_p") else int
    for name, _, _ in _RANGES
}


def row_key(row_id: str | int | None, token_ids: TokenIds) -> int:
    """The row's part of the random stream: 64 bits from its id, or from its tokens if it has none.

    Never from the row's place in the file: a row draws the same tokens alone, among others and in
    any order. Two rows with the same id (or, without ids, the same tokens) and the same seed
    therefore draw the same tokens; use `n`, distinct ids or distinct seeds for distinct samples.
    """
    if row_id is None:
        data = b"t" + np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    else:
        data = (b"i" if isinstance(row_id, int) else b"s") + str(row_id).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Which tokens of a prompt to score, teacher-forced: the prompt generates nothing.

    The last scored token needs no forward pass of its own, so it is not among the prompt's `token_ids`.

    Attributes:
        spans: half-open ranges of token positions, ascending and apart, from 1 (the first token has no
            context) to len(token_ids) + 1 at most; position len(token_ids) is `next_id`.
        next_id: the token behind token_ids.
        keeps_hidden: give back the hidden states that the scored tokens are predicted from, and no
            scores. These positions are computed for this prompt alone, and shared with no other.
    """

    spans: tuple[tuple[int, int], ...]
    next_id: int
    keeps_hidden: bool = False

    def __post_init__(self) -> None:
        borders = [position for span in self.spans for position in span]
        if not borders or borders[0] < 1 or any(low >= high for low, high in pairwise(borders)):
            raise ValueError(f"spans must be ascending, not empty and from 1 on, got {self.spans!r}")

    def positions(self) -> npt.NDArray[np.int64]:
        """[num_scored] positions of the scored tokens, ascending."""
        return np.concatenate([np.arange(begin, end) for begin, end in self.spans])


@dataclass(slots=True)
class TokenScores:
    """What a model says of given tokens, each in its context; one entry for each scored token, by position."""

    logprobs: npt.NDArray[np.float32]  # [num_scored] nats, of the raw distribution
    entropies: npt.NDArray[np.float32]  # [num_scored] nats, of the distribution the token is predicted from
    is_top: npt.NDArray[np.bool_]  # [num_scored]; the token is the most probable one (the lowest id of equals)

    @classmethod
    def empty(cls, num_tokens: int) -> TokenScores:
        """NaN and False, to be filled."""
        nan = np.full((2, num_tokens), np.nan, dtype=np.float32)
        return cls(nan[0], nan[1], np.zeros(num_tokens, dtype=np.bool_))

    def __getitem__(self, key: Any) -> TokenScores:
        """The scores of some tokens: a slice is a view, an array of places a copy."""
        return TokenScores(self.logprobs[key], self.entropies[key], self.is_top[key])

    def __setitem__(self, key: Any, values: TokenScores) -> None:
        self.logprobs[key], self.entropies[key], self.is_top[key] = values.logprobs, values.entropies, values.is_top

    def __len__(self) -> int:
        return len(self.logprobs)

    def copy(self) -> TokenScores:
        return TokenScores(self.logprobs.copy(), self.entropies.copy(), self.is_top.copy())


@dataclass(slots=True)
class Prompt:
    """One input row, tokenized. `error` is set when the row cannot run; it still gets an output row."""

    row_index: int  # place in the input, from 0; also the place in the output
    token_ids: TokenIds  # [num_prompt_tokens] int32
    params: SamplingParams
    key: int = 0  # see row_key()
    priority: float = 0.0  # higher runs earlier under --policy priority
    error: RowError | None = None
    score: ScoreRequest | None = None  # set: nothing is generated, and params do not count
    #: Samples that an earlier run has ended: they are planned, as the others are, and not run again.
    done_samples: frozenset[int] = frozenset()


@dataclass(slots=True)
class Completion:
    """One sample of one row.

    `token_ids` are exactly the ids that were sampled, an end-of-sequence id and the tokens of a
    stop string included; `logprobs`, when asked for, has one entry for each of them. `text` is
    their decoding, special tokens left out, cut before the stop string or the stop token id
    (behind it with `include_stop`).
    """

    row_index: int
    sample_index: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str | None = None  # None when error is set
    finish_reason: FinishReason = FinishReason.ERROR
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    num_prompt_tokens: int = 0
    #: Prompt tokens that sequences before this one have too, by the plan of the window: their KV is reused, unless
    #: memory ran short meanwhile (the run's counts tell what was). A fact of the window, not of how it went.
    num_cached_tokens: int = 0
    logprobs: list[float] | None = None  # [num_output_tokens] nats
    top_logprobs: list[list[tuple[int, float]]] | None = None  # [num_output_tokens][k] (id, nats), best first
    prompt_logprobs: list[float | None] | None = None  # [num_prompt_tokens]; the first is None
    scores: TokenScores | None = None  # [num_scored] where Prompt.score asks for them
    hidden: Tensor | None = None  # [num_scored, hidden_size] where Prompt.score keeps hidden states
    error: RowError | None = None


def failed(prompt: Prompt, error: RowError, sample_index: int = 0) -> Completion:
    """The completion of a row that could not run."""
    return Completion(
        row_index=prompt.row_index,
        sample_index=sample_index,
        num_prompt_tokens=len(prompt.token_ids),
        error=error,
    )


Messages = Sequence[Mapping[str, Any]]
