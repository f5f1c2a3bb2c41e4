"""The loop: schedule, forward, sample, finish. It works on token ids and knows nothing of files."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.batch import PersistentBatch
from batchinfer.engine.blocks import BlockPool
from batchinfer.engine.prompt_scores import PromptScorer
from batchinfer.engine.sampler import Sampler
from batchinfer.engine.scheduler import Scheduler, Step
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.stats import EngineStats
from batchinfer.engine.tree_cache import TreeCache
from batchinfer.engine.window import WindowPlan
from batchinfer.models.decoder import FusedHead, KVPool, LanguageModel
from batchinfer.types import Completion, ErrorCode, FinishReason, RowError

#: fp32 logits held at a time while sampling: 64 MiB.
MAX_LOGITS = 1 << 24


@dataclass(frozen=True, slots=True)
class RunLimits:
    """What one run may use."""

    max_batch_tokens: int
    max_num_seqs: int
    max_model_len: int
    first_row_tokens: int = 0  # see Scheduler


class Ended(NamedTuple):
    """A sequence that has its last token, or failed."""

    seq: Sequence
    reason: FinishReason
    error: RowError | None


@dataclass(slots=True)
class _OpenWindow:
    """A window of which sequences wait or run."""

    num_left: int
    nodes: list[int]


class EngineRun:
    """Runs planned windows. Add one, step until `has_work` is False; further ones may be added between steps.

    Args:
        check: assert every invariant of scheduler, cache and pool after each step. For tests.
    """

    def __init__(
        self,
        plan: WindowPlan,
        model: LanguageModel,
        kv: KVPool,
        sampler: Sampler,
        limits: RunLimits,
        stats: EngineStats,
        *,
        check: bool = False,
    ) -> None:
        self.model = model
        self.kv = kv
        self.sampler = sampler
        self.stats = stats
        self.check = check
        self.saw_non_finite = False
        self.pool = BlockPool(kv.num_blocks)
        self.cache = TreeCache(self.pool, kv.block_size, plan.nodes)
        self.scheduler = Scheduler(
            plan.sequences,
            self.cache,
            self.pool,
            limits.max_batch_tokens,
            limits.max_num_seqs,
            limits.first_row_tokens,
        )
        self._open: dict[int, _OpenWindow] = {}
        self._note(plan)
        max_blocks = -(-limits.max_model_len // kv.block_size)
        self.scorer = PromptScorer(model, self.cache)
        self.batch = PersistentBatch(self.scheduler.max_num_seqs, max_blocks, kv.block_size, model.device)
        self._fused = model if isinstance(model, FusedHead) else None
        self._max_rows = max(16, MAX_LOGITS // model.spec.vocab_size)

    def add(self, plan: WindowPlan) -> None:
        """One more window, whose sequences come after all that were added before."""
        self.cache.add(plan.nodes)
        self.scheduler.add(plan.sequences)
        self._note(plan)

    def _note(self, plan: WindowPlan) -> None:
        """Sequences and nodes are taken out of the plan, so that nothing is kept of those that have ended."""
        self.stats.max_output_tokens_left += sum(seq.max_tokens for seq in plan.sequences)
        if plan.sequences:
            nodes = [node.index for node in plan.nodes]
            self._open[plan.sequences[0].window] = _OpenWindow(len(plan.sequences), nodes)
        plan.sequences.clear()
        plan.nodes.clear()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work()

    @property
    def has_room(self) -> bool:
        """Could another window's sequences start now?"""
        return self.scheduler.has_room

    def step(self) -> list[Completion]:
        """One step; the completions of those that ended with it."""
        began = time.perf_counter()
        finished = self._step()
        self.stats.running_s += time.perf_counter() - began
        return [completion for ended in finished for completion in self._completions(ended)]

    def _step(self) -> list[Ended]:
        step = self.scheduler.schedule()
        self._apply(step)
        hidden = self._forward(step)
        if hidden is None:
            self._count(step)
            return []
        self.scorer.score(step, hidden)
        ends: list[int] = []
        sampling: list[Sequence] = []
        finished: list[Ended] = []
        at = 0
        for seq, num_tokens in step.scheduled:
            at += num_tokens
            self.scheduler.on_computed(seq, num_tokens)
            if seq.has_all_scores:
                finished.append(self._scored(seq))
            elif seq.num_computed == seq.num_tokens:
                ends.append(at - 1)
                sampling.append(seq)
        finished += self._sample(hidden[ends], sampling)
        for seq, _, _ in finished:
            self.scheduler.finish(seq)
            self.batch.remove(seq)
            self._leave(seq)
        self._count(step)
        if self.check:
            self.scheduler.check_integrity()
        return finished

    def _forward(self, step: Step) -> Tensor | None:
        """Final hidden states; None: there was no memory. Nothing has advanced then, and steps are smaller from now."""
        try:
            hidden = self.model.forward(self.batch.inputs(step.scheduled, self._outputs(step)), self.kv)
            self._note_non_finite(step, hidden)
            return hidden
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) or not self.scheduler.halve_budget():
                raise
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        self.stats.num_steps_without_memory += 1
        return None

    def _leave(self, seq: Sequence) -> None:
        """The sequence has ended; with the last one of its window the window's nodes go."""
        window = self._open[seq.window]
        window.num_left -= 1
        if not window.num_left:
            self.cache.forget(window.nodes)
            del self._open[seq.window]

    def _outputs(self, step: Step) -> list[int] | None:
        """Tokens of the flat batch whose final hidden states are used; None: all."""
        if step.num_tokens == len(step.scheduled):  # each sequence's newest one
            return None
        outputs: list[int] = []
        at = 0
        for seq, num_tokens in step.scheduled:
            end = seq.num_computed + num_tokens
            used = self.scorer.used(seq, num_tokens) if seq.num_computed < seq.num_prompt else []
            if end == seq.num_tokens and used[-1:] != [num_tokens - 1]:
                used.append(num_tokens - 1)
            outputs += [at + token for token in used]
            at += num_tokens
        return outputs

    def _apply(self, step: Step) -> None:
        """Carry the schedule's decisions into batch and KV, before the forward pass."""
        for seq in step.preempted:
            self.batch.remove(seq)
        for seq, match in step.admitted:
            self.batch.add(seq)
            self.scorer.admit(seq, match)
        if step.copies:
            self.kv.copy_blocks(step.copies)
        if self.saw_non_finite:
            # A key that is masked still meets its value as 0 * v: no NaN may lie behind a row's tokens in its blocks.
            copied = {target for _, target in step.copies}
            self.kv.clear_blocks([block for block in step.taken if block not in copied])

    def _note_non_finite(self, step: Step, hidden: Tensor) -> None:
        """NaN or infinity in a token's KV shows in its hidden state too. What such a row computed is not shared."""
        # One pass that writes nothing; a sum that overflows by itself is looked at more closely.
        if math.isfinite(hidden.sum(dtype=torch.float32).item()):
            return
        is_finite = torch.isfinite(hidden).all(-1).cpu()
        if is_finite.all():
            return
        self.saw_non_finite = True
        at = 0
        for seq, num_tokens in step.scheduled:
            seq.is_finite &= bool(is_finite[at : at + num_tokens].all())
            at += num_tokens

    def _scored(self, seq: Sequence) -> Ended:
        """A sequence that has nothing to generate, with its last token computed."""
        assert seq.prompt.score is not None
        if seq.keeps_hidden:
            is_finite = all(bool(torch.isfinite(part).all()) for part in seq.hidden)
        else:
            assert seq.scores is not None
            is_finite = bool(np.isfinite(seq.scores.logprobs[seq.prompt.score.positions()]).all())
        if is_finite:
            return Ended(seq, FinishReason.SCORED, None)
        return Ended(seq, FinishReason.ERROR, _non_finite(seq))

    def _sample(self, hidden: Tensor, seqs: list[Sequence]) -> list[Ended]:
        """Draw the next token of each sequence from its hidden state; those that end with it."""
        plain = [row for row, seq in enumerate(seqs) if self._fused is not None and seq.is_plain]
        finished = self._draw_greedy(hidden[plain], [seqs[row] for row in plain]) if plain else []
        is_plain = set(plain)
        rest = [row for row in range(len(seqs)) if row not in is_plain]
        for begin in range(0, len(rest), self._max_rows):
            rows = rest[begin : begin + self._max_rows]
            part = [seqs[row] for row in rows]
            drawn = self.sampler(self.model.logits(hidden[rows]), part, self.batch)
            for row, seq in enumerate(part):
                finished += self._take(
                    seq, drawn.token_ids[row], drawn.is_finite[row], drawn.logprobs[row], drawn.top_logprobs[row]
                )
        return finished

    def _draw_greedy(self, hidden: Tensor, seqs: list[Sequence]) -> list[Ended]:
        """Rows whose token is the plain argmax: no logits are written."""
        assert self._fused is not None
        wants_logprobs = any(seq.params.logprobs is not None for seq in seqs)
        drawn = self._fused.greedy(hidden, self.sampler.num_ids, wants_logprobs=wants_logprobs)
        logprobs = [None] * len(seqs) if drawn.logprobs is None else drawn.logprobs.tolist()
        finished: list[Ended] = []
        for seq, token_id, logprob, is_finite in zip(
            seqs, drawn.token_ids.tolist(), logprobs, drawn.is_finite.tolist(), strict=True
        ):
            finished += self._take(seq, token_id, is_finite, logprob, [])
        return finished

    def _take(
        self, seq: Sequence, token_id: int, is_finite: bool, logprob: float | None, top: list[tuple[int, float]] | None
    ) -> list[Ended]:
        """Add a drawn token to its sequence; the sequence, if it ends."""
        if not is_finite:
            self.saw_non_finite = True
            return [Ended(seq, FinishReason.ERROR, _non_finite(seq))]
        if seq.params.logprobs is not None and logprob is not None:
            seq.logprobs.append(logprob)
            seq.top_logprobs.append(top or [])
        self.stats.num_output_tokens_unfinished += 1
        self.stats.max_output_tokens_left -= 1
        reason = self._append(seq, token_id)
        return [] if reason is None else [Ended(seq, reason, None)]

    def _append(self, seq: Sequence, token_id: int) -> FinishReason | None:
        """Add the token; why the sequence ends with it, if it does."""
        params = seq.params
        may_stop = seq.num_output + 1 >= params.min_tokens
        seq.append(token_id)
        is_eos = token_id in self.sampler.eos_token_ids and not params.ignore_eos
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

    def _completions(self, ended: Ended) -> Iterator[Completion]:
        """A completion for each owner of the sequence."""
        seq, reason, error = ended
        params = seq.params
        self.stats.num_output_tokens_unfinished -= seq.num_output
        self.stats.max_output_tokens_left -= seq.max_tokens - seq.num_output
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
                completion.token_ids = seq.tokens[seq.num_prompt : seq.num_tokens].tolist()
                if params.logprobs is not None:
                    completion.logprobs = list(seq.logprobs)
                    completion.top_logprobs = list(seq.top_logprobs) if params.logprobs else None
                if params.prompt_logprobs:
                    scores = [] if seq.scores is None else seq.scores.logprobs[1 : seq.num_prompt].tolist()
                    completion.prompt_logprobs = [None, *scores]
            yield completion

    def _count(self, step: Step) -> None:
        stats = self.stats
        for seq, _ in step.admitted:
            if seq.num_preempted:
                stats.num_prompt_tokens_recomputed += seq.num_tokens - seq.num_cached
            else:
                stats.num_prompt_tokens_computed += seq.num_prompt - seq.num_cached
                stats.num_prompt_tokens_reused += seq.num_cached + seq.num_prompt * (len(seq.owners) - 1)
        stats.num_steps += 1
        stats.num_preemptions += len(step.preempted)
        stats.num_seqs_running = len(self.scheduler.running)
        stats.num_seqs_waiting = self.scheduler.num_waiting
        stats.num_kv_blocks_used = self.pool.num_used


def is_out_of_memory(error: BaseException) -> bool:
    """torch has one type for GPUs, and says it in words for CPUs."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "memory" in str(error) and "alloc" in str(error)


def _non_finite(seq: Sequence) -> RowError:
    if seq.prompt.score is not None:
        place = "a scored token"
    else:
        place = f"output token {seq.num_output}" if seq.num_output else "the first output token"
    return RowError(
        ErrorCode.NON_FINITE_LOGITS,
        f"the model gave NaN or infinite logits for {place}: check the weights, or try --dtype float32",
    )
