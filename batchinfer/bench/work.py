"""What a job has to compute: each distinct sample once, as long as it came out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from batchinfer.config import EngineConfig
from batchinfer.engine.window import stream_of
from batchinfer.job_input import ModelResolver, open_input, prompts_of, resolve_job
from batchinfer.models.spec import DecoderSpec
from batchinfer.plan_report import DTYPE_BYTES, combine, dtype_of, kv_bytes_of
from batchinfer.planner.cost import JobPlan, plan_job
from batchinfer.planner.prefix_tree import build_prefix_tree
from batchinfer.settings import JobSettings
from batchinfer.types import Completion, Prompt

#: (row_index, sample_index) -> output tokens
Lengths = Mapping[tuple[int, int], int]


def lengths_of(completions: Sequence[Completion]) -> Lengths:
    """Of the samples that have a result."""
    return {(c.row_index, c.sample_index): len(c.token_ids) for c in completions if c.error is None}


def longest(prompts: Sequence[Prompt], max_model_len: int) -> Lengths:
    """As long as each sample may be; prompts that cannot run left out."""
    return {
        (prompt.row_index, sample): min(prompt.params.max_tokens, max_model_len - len(prompt.token_ids))
        for prompt in prompts
        if prompt.error is None and 0 < len(prompt.token_ids) < max_model_len
        for sample in range(prompt.params.n)
    }


def plan_work(
    prompts: Sequence[Prompt], lengths: Lengths, spec: DecoderSpec, dtype_bytes: int, config: EngineConfig
) -> JobPlan:
    """The plan of a window's samples that are in `lengths`.

    Samples that cannot differ (equal tokens, parameters and random stream) count once, whatever the engine did.
    """
    token_ids, num_outputs = [], []
    seen = set()
    for prompt in prompts:
        stream = stream_of(prompt)
        digest = hashlib.blake2b(prompt.token_ids.tobytes(), digest_size=16).digest()
        for sample in range(prompt.params.n):
            length = lengths.get((prompt.row_index, sample))
            key = (digest, prompt.params, stream, 0 if stream is None else sample)
            if length is None or key in seen:
                continue
            seen.add(key)
            token_ids.append(prompt.token_ids)
            num_outputs.append(length)
    return plan_job(
        build_prefix_tree(token_ids),
        spec,
        dtype_bytes=dtype_bytes,
        kv_bytes=kv_bytes_of(config, spec, dtype_bytes),
        max_tokens=num_outputs,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
    )


def plan_of_job(settings: JobSettings, resolve: ModelResolver | None = None) -> JobPlan:
    """The plan of all rows at full length, equal samples once. No weights are read. Raises InputError as a run does."""
    rows = open_input(settings)
    model, params = resolve_job(settings, rows, resolve)
    max_model_len = settings.engine.max_model_len or model.spec.max_position
    dtype_bytes = DTYPE_BYTES[dtype_of(settings.engine, model)]
    plans = [
        plan_work(prompts, longest(prompts, max_model_len), model.spec, dtype_bytes, settings.engine)
        for _, _, prompts in prompts_of(rows, model.tokenizer, params.params, settings.system, model.spec.vocab_size)
    ]
    return combine(plans)
