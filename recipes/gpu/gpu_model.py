"""A random model in the shapes of Llama-3-8B: decode, prefill, and the engine, beside the chip's ceilings."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_rates import copy_rate, flops_per_s, product_seconds
from gpu_setup import Check, random_weights, run_part
from gpu_steps import decode_step, greedy_step, measured_chip, prefill_step, random_kv

DECODE_BAR = 0.80  # of what memory and products allow
PREFILL_BAR = 0.60  # of plain products of the same shapes


def measure_decode(check: Check, model: Any, ceilings: dict[str, float]) -> None:
    """All rows decode one token; share: least possible time at the measured ceilings over time taken."""
    from batchinfer.kernels.triton import floors

    sizes = check.sizes
    step = decode_step(check, sizes.rows, sizes.context)
    kv = random_kv(model, step.num_blocks)
    seconds = check.seconds(greedy_step(model, step, kv), 3 * sizes.repeats)
    shape = floors.StepShape.decode(sizes.rows, sizes.context)
    found = floors.step_floors(check.spec, shape, check.dtype.itemsize)
    # The bar is about bandwidth: what is bound by products at these rows cannot be faster than they are.
    least = floors.step_seconds(found, measured_chip(ceilings))
    check.report.put(
        decode_ms=1e3 * seconds,
        decode_least_ms=1e3 * least,
        decode_tokens_per_s=sizes.rows / seconds,
        decode_share=least / seconds,
        decode_bytes_per_s=sum(floor.calls * floor.nbytes for floor in found) / seconds,
        decode_meets_bar=least / seconds >= DECODE_BAR,
    )


def measure_prefill(check: Check, model: Any, product_s: dict[str, float]) -> None:
    """One long prompt; share: time of plain products of the same shapes over time taken."""
    sizes, spec = check.sizes, check.spec
    step = prefill_step(check, sizes.prefill_tokens)
    kv = model.make_kv(step.num_blocks, 64)
    seconds = check.seconds(greedy_step(model, step, kv))
    layer = sum(product_s[name] for name in ("qkv", "o", "gate_up", "down"))
    share = spec.num_layers * layer / seconds
    check.report.put(
        prefill_ms=1e3 * seconds,
        prefill_tokens_per_s=sizes.prefill_tokens / seconds,
        prefill_share_of_products=share,
        prefill_meets_bar=share >= PREFILL_BAR,
    )


def run_engine(
    check: Check, model: Any, prompts: list[list[int]], *, looks_ahead: bool | None = None, **options: Any
) -> tuple[float, list[list[int]]]:
    """Seconds of a second run, greedy, all output tokens drawn; the tokens of each prompt.

    Args:
        looks_ahead: launch each step before the one before it is read; None: as the engine does by itself.
    """
    import numpy as np

    from batchinfer.config import EngineConfig
    from batchinfer.engine.engine import Engine
    from batchinfer.models.random_model import NoText
    from batchinfer.types import Prompt, SamplingParams

    sizes = check.sizes
    longest = sizes.prompt_tokens + sizes.output_tokens
    num_bytes = 2 * len(prompts) * (longest + 128) * check.spec.num_layers * check.spec.num_kv_heads
    config = EngineConfig(
        max_num_seqs=max(1, len(prompts)),
        max_batch_tokens=sizes.prefill_tokens,
        kv_memory_bytes=num_bytes * check.spec.head_dim * check.dtype.itemsize,
        **options,
    )
    engine = Engine.from_parts(model, NoText(check.spec.vocab_size), (), longest + 1, config)
    if looks_ahead is not None:
        engine.looks_ahead = looks_ahead
    params = SamplingParams(max_tokens=sizes.output_tokens, ignore_eos=True)
    rows = [Prompt(i, np.array(ids, dtype=np.int32), params, key=i) for i, ids in enumerate(prompts)]
    for _ in range(1 if sizes.is_dry else 2):  # the first run compiles kernels and records graphs
        began = time.perf_counter()
        outputs = {done.row_index: done.token_ids for done in engine.run(rows)}
        seconds = time.perf_counter() - began
    return seconds, [list(outputs[i]) for i in range(len(prompts))]


def measure_engine(check: Check, model: Any) -> None:
    """All prompts through the engine, ahead and step by step, and where the host waits for the device."""
    report, sizes, prompts = check.report, check.sizes, random_prompts(check)
    seconds, tokens = run_engine(check, model, prompts, looks_ahead=True)
    report.put(
        engine_s=seconds,
        engine_output_tokens_per_s=sizes.prompts * sizes.output_tokens / seconds,
        engine_prompt_tokens_per_s=sizes.prompts * sizes.prompt_tokens / seconds,
    )
    plain_s, plain_tokens = run_engine(check, model, prompts, looks_ahead=False)
    same = sum(a == b for a, b in zip(tokens, plain_tokens, strict=True))
    report.put(
        engine_step_by_step_s=plain_s,
        engine_ahead_speed_up=plain_s / seconds,
        engine_ahead_same_rows=same / len(prompts),
    )
    if check.device.type == "cuda":
        report.put(engine_waits=count_waits(lambda: run_engine(check, model, prompts, looks_ahead=True)))


def count_waits(call: Callable[[], object]) -> dict[str, int]:
    """How often torch waits for the device, by place. The engine's own wait for a step's results is not among them.

    Whatever is here for each step keeps the host from running ahead.
    """
    import torch

    found: Counter[str] = Counter()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchronizing" in str(warning.message):
            found["/".join(Path(warning.filename).parts[-2:]) + f":{warning.lineno}"] += 1
    return dict(found.most_common(12))


def random_prompts(check: Check) -> list[list[int]]:
    import numpy as np

    sizes = check.sizes
    shape = (sizes.prompts, sizes.prompt_tokens)
    return np.random.default_rng().integers(0, check.spec.vocab_size, shape).tolist()


def kv_limit_bytes(check: Check, model: Any) -> int:
    """What an engine would take for its pool."""
    from batchinfer.config import EngineConfig
    from batchinfer.engine.kv_memory import CudaMemory, KVMemory

    memory = KVMemory(model, check.spec.max_position, CudaMemory(check.device))
    return memory.limit_bytes(EngineConfig(max_batch_tokens=check.sizes.prefill_tokens))


def part(check: Check) -> None:
    from batchinfer.kernels.triton.decoder import TritonDecoder

    report, sizes = check.report, check.sizes
    weights = random_weights(check.spec, check.dtype, check.device)
    model = TritonDecoder(check.spec, weights, check.spec.max_position)
    with report.guarded("decode"):
        rates = product_seconds(check, sizes.rows)
        ceilings = {"copy_bytes_per_s": copy_rate(check), "product_flops_per_s": flops_per_s(check, sizes.rows, rates)}
        measure_decode(check, model, ceilings)
    with report.guarded("prefill"):
        measure_prefill(check, model, product_seconds(check, sizes.prefill_tokens))
    if check.device.type == "cuda":
        with report.guarded("kv memory"):
            report.put(kv_limit_bytes=kv_limit_bytes(check, model))
    with report.guarded("engine"):
        measure_engine(check, model)


if __name__ == "__main__":
    run_part(part)
