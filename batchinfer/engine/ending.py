"""How a sequence ends: at which token, or with which error, and the completions that it comes to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from batchinfer.engine.sequence import Sequence
from batchinfer.types import Completion, ErrorCode, FinishReason, RowError


class Ended(NamedTuple):
    """A sequence that has its last token, or failed."""

    seq: Sequence
    reason: FinishReason
    error: RowError | None


def append(seq: Sequence, token_id: int, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
    """Add a drawn token; why the sequence ends with it, if it does."""
    params = seq.params
    may_stop = seq.num_output + 1 >= params.min_tokens
    seq.append(token_id)
    is_eos = token_id in eos_token_ids and not params.ignore_eos
    if may_stop and (is_eos or token_id in params.stop_token_ids):
        seq.stop_reason = token_id
        if params.include_stop:
            seq.text.push(token_id, check_stop=False)
        return FinishReason.STOP
    matched = seq.text.push(token_id, check_stop=may_stop)
    if matched is not None:
        seq.stop_reason = matched
        return FinishReason.STOP
    return FinishReason.LENGTH if seq.num_output >= seq.max_tokens else None


def scored(seq: Sequence) -> Ended:
    """A sequence that has nothing to generate, with its last token computed."""
    assert seq.prompt.score is not None
    if seq.keeps_hidden:
        is_finite = all(bool(torch.isfinite(part).all()) for part in seq.hidden)
    else:
        assert seq.scores is not None
        is_finite = bool(np.isfinite(seq.scores.logprobs[seq.prompt.score.positions()]).all())
    return Ended(seq, FinishReason.SCORED, None) if is_finite else non_finite(seq)


def non_finite(seq: Sequence) -> Ended:
    """The model gave NaN or infinity for the sequence's next token, or for one that it wants scored."""
    if seq.prompt.score is not None:
        place = "a scored token"
    else:
        place = f"output token {seq.num_output}" if seq.num_output else "the first output token"
    message = f"the model gave NaN or infinite logits for {place}: check the weights, or try --dtype float32"
    return Ended(seq, FinishReason.ERROR, RowError(ErrorCode.NON_FINITE_LOGITS, message))


def completions(ended: Ended) -> Iterator[Completion]:
    """A completion for each owner of the sequence."""
    seq, reason, error = ended
    params = seq.params
    text = None if error else seq.text.finish()
    for owner in seq.owners:
        completion = Completion(
            row_index=owner.row_index,
            sample_index=owner.sample_index,
            text=text,
            finish_reason=reason,
            stop_reason=seq.stop_reason,
            num_prompt_tokens=seq.num_prompt,
            num_cached_tokens=owner.num_cached,
            error=error,
        )
        if error is None and seq.prompt.score is not None:
            completion.text = None
            if seq.keeps_hidden:
                completion.hidden = torch.cat(seq.hidden)
            else:
                assert seq.scores is not None
                completion.scores = seq.scores[seq.prompt.score.positions()]
        elif error is None:
            completion.token_ids = seq.tokens[seq.num_prompt : seq.num_known].tolist()
            if params.logprobs is not None:
                completion.logprobs = list(seq.logprobs)
                completion.top_logprobs = list(seq.top_logprobs) if params.logprobs else None
            if params.prompt_logprobs:
                scores = [] if seq.scores is None else seq.scores.logprobs[1 : seq.num_prompt].tolist()
                completion.prompt_logprobs = [None, *scores]
        yield completion
