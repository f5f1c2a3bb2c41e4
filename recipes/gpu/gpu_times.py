"""How long each kernel takes at the shapes of a step, beside its floor at this chip's measured copy rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_rates import copy_rate
from gpu_setup import Check, run_part
from gpu_steps import Step, decode_step, prefill_step


def time_kernels(check: Check, bytes_per_s: float) -> None:
    """Microseconds of one launch, of the floor, and the floor's share, for decode and prefill."""
    from batchinfer.kernels.triton import floors

    sizes = check.sizes
    chip = floors.Chip("measured", bytes_per_s, floors.H200.flops_per_s)
    steps = {
        "decode": (
            decode_step(check, sizes.rows, sizes.context),
            floors.StepShape.decode(sizes.rows, sizes.context),
        ),
        "prefill": (prefill_step(check, sizes.prefill_tokens), floors.StepShape.prefill(sizes.prefill_tokens)),
    }
    for name, (step, shape) in steps.items():
        least = {floor.kernel: floor for floor in floors.step_floors(check.spec, shape, check.dtype.itemsize)}
        table: dict[str, dict[str, float]] = {}
        for kernel, call in calls(check, step).items():
            with check.report.guarded(f"time of {kernel}, {name}"):
                seconds = check.kernel_seconds(call)
                floor_s = least[kernel].seconds(chip)
                table[kernel] = {"us": 1e6 * seconds, "floor_us": 1e6 * floor_s, "share": floor_s / seconds}
        check.report.put(**{f"{name}_times": table})


def calls(check: Check, step: Step) -> dict[str, Callable[[], object]]:
    """One launch of each kernel, by the name of its floor."""
    import torch

    from batchinfer.kernels.triton import head
    from batchinfer.kernels.triton.activation import silu_and_mul
    from batchinfer.kernels.triton.attention import TritonAttention
    from batchinfer.kernels.triton.linear import linear
    from batchinfer.kernels.triton.norm import rms_norm
    from batchinfer.kernels.triton.rope import rope_and_store_kv
    from batchinfer.models.rope import rope_tables

    spec, inputs = check.spec, step.inputs
    tokens = len(inputs.token_ids)
    heads, kv_heads, dim, hidden = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.hidden_size

    def randn(*shape: int) -> Any:
        return torch.randn(shape, dtype=check.dtype, device=check.device)

    x, residual, weight = randn(tokens, hidden), randn(tokens, hidden), randn(hidden)
    gate_up = randn(tokens, 2 * spec.intermediate_size)
    qkv = randn(tokens, heads + 2 * kv_heads, dim)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    cos, sin = (table.to(check.device)[inputs.positions] for table in rope_tables(spec.rope, spec.max_position))
    keys, values = (randn(step.num_blocks * 64, kv_heads, dim) for _ in range(2))
    attention = TritonAttention(check.device, heads, kv_heads, dim, check.dtype)
    attention.plan(inputs.ragged, frozenset({None}))
    query = randn(tokens, heads, dim)
    outputs = x if inputs.outputs is None else x[inputs.outputs]
    lm_head = randn(spec.vocab_size, hidden)
    products = {
        "linear qkv": ((heads + 2 * kv_heads) * dim, hidden),
        "linear o": (hidden, heads * dim),
        "linear gate_up": (2 * spec.intermediate_size, hidden),
        "linear down": (hidden, spec.intermediate_size),
    }
    operands = {name: (randn(tokens, inner), randn(columns, inner)) for name, (columns, inner) in products.items()}
    return {
        "rms_norm": lambda: rms_norm(x, weight, 1e-5, residual),
        "silu_and_mul": lambda: silu_and_mul(gate_up),
        "rope_and_store_kv": lambda: rope_and_store_kv(q, k, v, cos, sin, inputs.slots, keys, values),
        "tree_attention": lambda: attention.forward(query, keys, values, dim**-0.5, None),
        "greedy head": lambda: head.greedy(outputs, lm_head, spec.vocab_size, wants_logprobs=False),
        **{name: _product(linear, *pair) for name, pair in operands.items()},
    }


def _product(linear: Callable[..., object], x: Any, weight: Any) -> Callable[[], object]:
    return lambda: linear(x, weight)


def part(check: Check) -> None:
    bytes_per_s = copy_rate(check)
    check.report.put(copy_bytes_per_s=bytes_per_s)
    time_kernels(check, bytes_per_s)


if __name__ == "__main__":
    run_part(part)
