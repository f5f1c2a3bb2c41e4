"""The loop: schedule, forward, draw, take. It works on token ids and knows nothing of files.

Two things happen to a step. It is *launched*: scheduled, and given to the device with its head and its draws, which
reads nothing back. It is *taken*: the host reads what was drawn, ends sequences, makes text. Looking ahead, step k + 1
is launched before step k is taken, so that the device has work while the host does all that:

    host     launch 1 | launch 2 | take 1, launch 3        | take 2, launch 4        | ...
    device              1 ........ 2 ..................... 3 ...................... 4

So step k + 1 is scheduled as if every sequence that draws in k went on, except for those that reach their last
possible token: they leave with the launch. The tokens go from k's draws into k + 1 on the device. Whoever turns out to
have ended in k has its part of k + 1 thrown away. All steps run on one stream, so a block may be handed on as soon as
the step that last writes it is launched.

What cannot be decided ahead is decided when all is taken:

- Whom to preempt: a sequence that has ended may leave the blocks that are missing.
- Scores of prompt tokens, which a node hands on to other sequences on the host: such a step is taken at once.
- NaN and infinity. Until it is taken a step counts as finite, and what it computed is shared. If it was not, all that
  runs is computed again from the start, without looking ahead for the rest of the run.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.engine import ending
from batchinfer.engine.batch import PersistentBatch
from batchinfer.engine.blocks import BlockPool
from batchinfer.engine.draws import Drawer, LaunchedDraws
from batchinfer.engine.ending import Ended
from batchinfer.engine.flight import Flight
from batchinfer.engine.pending import PendingTokens
from batchinfer.engine.prompt_scores import PromptScorer
from batchinfer.engine.sampler import Sampled, Sampler
from batchinfer.engine.scheduler import Scheduler, Step
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.stats import EngineStats
from batchinfer.engine.tree_cache import TreeCache
from batchinfer.engine.window import WindowPlan
from batchinfer.models.decoder import KVPool, LanguageModel
from batchinfer.types import Completion


@dataclass(frozen=True, slots=True)
class RunLimits:
    """What one run may use."""

    max_batch_tokens: int
    max_num_seqs: int
    max_model_len: int
    first_row_tokens: int = 0  # see Scheduler


@dataclass(slots=True)
class _OpenWindow:
    """A window of which sequences wait or run."""

    num_left: int
    nodes: list[int]


class EngineRun:
    """Runs planned windows. Add one, step until `has_work` is False; further ones may be added between steps.

    Args:
        looks_ahead: launch a step before the one before it is taken. Changes no result.
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
        looks_ahead: bool = False,
        check: bool = False,
    ) -> None:
        self.model = model
        self.kv = kv
        self.sampler = sampler
        self.stats = stats
        self.looks_ahead = looks_ahead
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
        self.batch = PersistentBatch(self.scheduler.max_num_seqs, max_blocks, kv.block_size, model.device)
        self.scorer = PromptScorer(model, self.cache, self.batch.staging)
        self.drawer = Drawer(model, sampler, self.batch)
        self._flight: Flight | None = None  # launched and not taken

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
        return self._flight is not None or self.scheduler.has_work()

    @property
    def has_room(self) -> bool:
        """Could another window's sequences start now?"""
        return self.scheduler.has_room

    @property
    def may_hold_non_finite(self) -> bool:
        """The KV pool is not to be used again: there is NaN in it, or a step that nobody has looked at."""
        return self.saw_non_finite or self._flight is not None

    def step(self) -> list[Completion]:
        """One step; the completions of those that ended with it, or with the one before."""
        began = time.perf_counter()
        finished = self._step()
        self.stats.running_s += time.perf_counter() - began
        return [completion for ended in finished for completion in self._completions(ended)]

    def _step(self) -> list[Ended]:
        before, self._flight = self._flight, None
        flight = self._launch(before)
        ended = [] if before is None else self._take(before)
        if before is not None and self.saw_non_finite:
            self._start_over(flight)
        elif flight is not None and flight.is_ahead:
            self._flight = flight
        elif flight is not None:
            ended += self._take(flight)
        self._count_what_runs()
        if self.check:
            self.scheduler.check_integrity()
        return ended

    def _launch(self, before: Flight | None) -> Flight | None:
        """Launch the next step, behind the one that runs; None: there is none, or none before that one is taken."""
        step = self.scheduler.schedule(may_preempt=before is None)
        if step is None or not step.scheduled:
            return None
        self._apply(step)
        pending = None if before is None else before.pending
        computed = self._forward(step, pending)
        self._count(step)
        if computed is None:
            return None
        hidden, total = computed
        scores = self.scorer.launch(step, hidden)
        draws = self._draw(step, hidden, pending)
        is_ahead = self.looks_ahead and scores is None and not self.saw_non_finite
        flight = Flight.of(step, hidden, total, scores, draws, self.batch.staging, is_ahead=is_ahead)
        if is_ahead:
            self._advance(flight)
        return flight

    def _take(self, flight: Flight) -> list[Ended]:
        """Read what the step gave, and end whoever ends with it."""
        results = flight.results()
        self._note_non_finite(flight, next(results).item())
        if flight.scores is not None:
            flight.scores.fill(results)
        if not flight.is_ahead:
            self._advance(flight)
        ended = [ending.scored(seq) for seq in flight.scored]
        for seqs, sampled in flight.draws.read(results):
            ended += self._append(seqs, sampled)
        for seq, _, _ in ended:
            self._end(seq)
        return ended

    def _advance(self, flight: Flight) -> None:
        """The scheduler's view of a step: tokens have their KV, and tokens were drawn."""
        for seq, num_tokens in flight.step.scheduled:
            if seq.has_ended:  # in the step before
                continue
            self.scheduler.on_computed(seq, num_tokens)
            if seq.num_computed < seq.num_tokens:
                continue
            if seq.prompt.score is None:
                seq.draw()
                if seq.num_drawn < seq.max_tokens:
                    continue
            else:
                flight.scored.append(seq)
            self._finish(seq)
            flight.finished.append(seq)

    def _finish(self, seq: Sequence) -> None:
        """Nothing more is to be computed for the sequence."""
        self.scheduler.finish(seq)
        self.batch.remove(seq)

    def _end(self, seq: Sequence) -> None:
        """The sequence has ended; with the last one of its window the window's nodes go."""
        seq.has_ended = True
        if seq.is_running:
            self._finish(seq)
        window = self._open[seq.window]
        window.num_left -= 1
        if not window.num_left:
            self.cache.forget(window.nodes)
            del self._open[seq.window]

    def _start_over(self, flight: Flight | None) -> None:
        """NaN was met in a step that others have built upon. Whatever may hold it is given up; see the top."""
        finished: list[Sequence] = []
        if flight is not None:
            self.stats.num_tokens_discarded += flight.step.num_tokens
            for seq in flight.draws.seqs:
                seq.forget_unread()
            finished = [seq for seq in flight.finished if not seq.has_ended]
        stopped = self.scheduler.start_over(finished)
        for seq in stopped:
            self.batch.remove(seq)
        self.scorer.start_over()
        self.stats.num_preemptions += len(stopped) + len(finished)

    def _forward(self, step: Step, pending: PendingTokens | None) -> tuple[Tensor, Tensor] | None:
        """Final hidden states and their sum; None: there was no memory.

        Nothing has advanced then, and steps are smaller from now on.
        """
        try:
            hidden = self.model.forward(self.batch.inputs(step.scheduled, self._outputs(step), pending), self.kv)
            # NaN or infinity anywhere shows in the sum. On a CPU it takes the memory of a copy in fp32.
            return hidden, hidden.sum(dtype=torch.float32)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) or not self.scheduler.halve_budget():
                raise
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        self.stats.num_steps_without_memory += 1
        return None

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

    def _draw(self, step: Step, hidden: Tensor, pending: PendingTokens | None) -> LaunchedDraws:
        """For each sequence whose last token is computed in this step."""
        seqs: list[Sequence] = []
        tokens: list[int] = []
        at = 0
        for seq, num_tokens in step.scheduled:
            at += num_tokens
            if seq.num_computed + num_tokens == seq.num_tokens and seq.prompt.score is None:
                seqs.append(seq)
                tokens.append(at - 1)
        return self.drawer.launch(hidden, seqs, tokens, pending)

    def _note_non_finite(self, flight: Flight, total: float) -> None:
        """NaN or infinity in a token's KV shows in its hidden state too. What such a row computed is not shared."""
        if math.isfinite(total):
            return
        is_finite = torch.isfinite(flight.hidden).all(-1).cpu()  # a sum may overflow by itself
        if is_finite.all():
            return
        self.saw_non_finite = True
        at = 0
        for seq, num_tokens in flight.step.scheduled:
            seq.is_finite &= bool(is_finite[at : at + num_tokens].all())
            at += num_tokens

    def _append(self, seqs: list[Sequence], sampled: Sampled) -> list[Ended]:
        """Add drawn tokens to their sequences; those that end with them."""
        ended: list[Ended] = []
        num_appended = 0
        for seq, token_id, is_finite, logprob, top in zip(
            seqs, sampled.token_ids, sampled.is_finite, sampled.logprobs, sampled.top_logprobs, strict=True
        ):
            if seq.has_ended:
                self.stats.num_tokens_discarded += 1
                continue
            if not is_finite:
                self.saw_non_finite = True
                ended.append(ending.non_finite(seq))
                continue
            if logprob is not None and seq.params.logprobs is not None:
                seq.logprobs.append(logprob)
                seq.top_logprobs.append(top or [])
            num_appended += 1
            reason = ending.append(seq, token_id, self.sampler.eos_token_ids)
            if reason is not None:
                ended.append(Ended(seq, reason, None))
        self.stats.num_output_tokens_unfinished += num_appended
        self.stats.max_output_tokens_left -= num_appended
        return ended

    def _completions(self, ended: Ended) -> list[Completion]:
        seq = ended.seq
        self.stats.num_output_tokens_unfinished -= seq.num_output
        self.stats.max_output_tokens_left -= seq.max_tokens - seq.num_output
        return list(ending.completions(ended))

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

    def _count_what_runs(self) -> None:
        self.stats.num_seqs_running = len(self.scheduler.running)
        self.stats.num_seqs_waiting = self.scheduler.num_waiting
        self.stats.num_kv_blocks_used = self.pool.num_used


def is_out_of_memory(error: BaseException) -> bool:
    """torch has one type for GPUs, and says it in words for CPUs."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "memory" in str(error) and "alloc" in str(error)
