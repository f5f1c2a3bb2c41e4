"""Does the invariance contract hold on this machine? A tiny random model, run in every way, on every kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.kernels.choice import TRITON, TRITON_DETERMINISTIC, TRITON_KERNELS
from batchinfer.kernels.cpu.choice import TORCH
from batchinfer.models.random_model import NoText, random_weights
from batchinfer.models.spec import DecoderSpec, RopeSpec
from batchinfer.types import Prompt, SamplingParams, row_key

#: Grouped-query heads of 64 channels, as most models have them; one of two layers with a sliding window.
SPEC = DecoderSpec(
    architecture="LlamaForCausalLM",
    vocab_size=300,
    hidden_size=96,
    intermediate_size=160,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeSpec("default", 10_000.0, 64),
    max_position=512,
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    hidden_act="silu",
    sliding_windows=(None, 48),
    dtype="bfloat16",
)

ALONE = EngineConfig(max_num_seqs=1, prefix_sharing=False, kv_memory_bytes=1 << 25)
#: Each must give every row the bits that it has alone, where a step is read before the next one begins.
WAYS = {
    "in company": replace(ALONE, max_num_seqs=64),
    "in chunks": replace(ALONE, max_num_seqs=64, max_batch_tokens=7),
    "shared": replace(ALONE, max_num_seqs=64, prefix_sharing=True),
    "shared and in chunks": replace(ALONE, max_num_seqs=64, max_batch_tokens=50, prefix_sharing=True),
}

CPU = torch.device("cpu")
#: What each kind of Triton kernels is called here, and whether rows are promised the bits that they have alone.
GPU_KERNELS = {TRITON_DETERMINISTIC: True, TRITON: False}
#: Log-probabilities this far from plain torch, in nats, are an error: rounding alone makes 0.02 here.
FARTHEST = 0.3
FROM_TORCH = "from plain torch"

Rows = dict[tuple[int, int], tuple[Any, ...]]  # (row, sample) -> ids and log-probabilities


@dataclass(frozen=True, slots=True)
class Invariance:
    """The test's result for one kind of kernels and one dtype."""

    kernels: str
    dtype: str
    differing: tuple[str, ...]  # the ways in which some row was not the same bits as alone; FROM_TORCH
    torch_difference: float | None  # nats: largest of prompt log-probabilities against plain torch in that dtype
    is_promised: bool = True  # False: it may depend on company, within rounding

    @property
    def holds(self) -> bool:
        return not self.differing

    @property
    def is_sound(self) -> bool:
        """Whether it is as promised."""
        return self.holds or (not self.is_promised and FROM_TORCH not in self.differing)


def check_invariance(instruction_sets: Sequence[str], gpu: torch.device | None = None) -> Iterator[Invariance]:
    """Plain torch in fp32 and bf16, then the C++ kernels of these instruction sets and Triton's on the GPU."""
    yield _check(TORCH, torch.float32, None)[0]
    found, on_torch = _check(TORCH, torch.bfloat16, None)
    yield found
    for name in instruction_sets:
        yield _check(name, torch.bfloat16, on_torch)[0]
    if gpu is not None:
        for name, is_promised in GPU_KERNELS.items():
            yield _check(name, torch.bfloat16, on_torch, gpu, is_promised=is_promised)[0]


def check_triton(
    dtype: torch.dtype, device: torch.device, rows: Sequence[Prompt] | None = None
) -> Iterator[Invariance]:
    """Triton's kernels alone, against plain torch on the CPU; `rows` instead of the usual ones."""
    on_torch = _check(TORCH, dtype, None, rows=rows)[1]
    for name, is_promised in GPU_KERNELS.items():
        yield _check(name, dtype, on_torch, device, is_promised=is_promised, rows=rows)[0]


def _check(
    kernels: str,
    dtype: torch.dtype,
    on_torch: Rows | None,
    device: torch.device = CPU,
    *,
    is_promised: bool = True,
    rows: Sequence[Prompt] | None = None,
) -> tuple[Invariance, Rows]:
    engine = Engine.from_parts(_model(kernels, dtype, device), NoText(SPEC.vocab_size), (), SPEC.max_position, ALONE)
    rows = list(_rows() if rows is None else rows)
    looks_ahead, engine.looks_ahead = engine.looks_ahead, False
    alone: Rows = {}
    for row in rows:
        alone |= _run(engine, [row])
    engine.looks_ahead = looks_ahead
    differing = []
    for name, config in WAYS.items():
        engine.config = config
        if _run(engine, rows) != alone:
            differing.append(name)
    difference = None if on_torch is None else _largest_difference(alone, on_torch)
    if difference is not None and not difference < FARTHEST:
        differing.append(FROM_TORCH)
    found = Invariance(kernels, str(dtype).removeprefix("torch."), tuple(differing), difference, is_promised)
    return found, alone


def _largest_difference(rows: Rows, others: Rows) -> float:
    """Infinite if a row failed or has none that is finite."""
    differences = []
    for key, (_, _, logprobs) in rows.items():
        if not logprobs or not others[key][2]:
            return float("inf")
        differences.append(np.abs(np.subtract(logprobs[1:], others[key][2][1:])).max())
    largest = float(np.max(differences))
    return largest if np.isfinite(largest) else float("inf")


def _run(engine: Engine, rows: list[Prompt]) -> Rows:
    return {
        (completion.row_index, completion.sample_index): (
            completion.token_ids,
            completion.logprobs,
            completion.prompt_logprobs,
        )
        for completion in engine.run(rows)
    }


def _rows() -> Iterator[Prompt]:
    """Two families of shared prefixes, greedy and sampled rows of several lengths."""
    rng = np.random.default_rng(3)
    stems = [rng.integers(0, SPEC.vocab_size, length) for length in (70, 130)]
    for index, length in enumerate((1, 5, 30, 64, 2, 9)):
        ids = np.concatenate([stems[index % 2], rng.integers(0, SPEC.vocab_size, length)]).astype(np.int32)
        params = SamplingParams(
            max_tokens=8, temperature=0.9 * (index % 3 == 2), seed=index, logprobs=0, prompt_logprobs=True
        )
        yield Prompt(index, ids, params, row_key(None, ids))


def _model(kernels: str, dtype: torch.dtype, device: torch.device) -> Any:
    from batchinfer.attention.backend import ReferenceAttention
    from batchinfer.kernels.cpu.decoder import CpuDecoder
    from batchinfer.models.decoder import Decoder

    generator = torch.Generator().manual_seed(0)
    weights = random_weights(SPEC, dtype, device, lambda shape: torch.randn(shape, generator=generator))
    if kernels == TORCH:
        return Decoder(SPEC, weights, ReferenceAttention, SPEC.max_position)
    if kernels in TRITON_KERNELS:
        from batchinfer.kernels.triton.decoder import TritonDecoder

        return TritonDecoder(SPEC, weights, SPEC.max_position, deterministic=kernels == TRITON_DETERMINISTIC)
    return CpuDecoder(SPEC, weights, kernels, SPEC.max_position)
