"""Every kernel in bf16 on fresh random inputs, against fp32 references.

An error is told in units of what rounding one result to bf16 may cost: half a unit in the last place, 2^-9 of the
value, or of its row's root mean square if that is more. `worst` is the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpu_setup import Check, run_part

if TYPE_CHECKING:
    from torch import Tensor

    from batchinfer.attention.tree import RaggedBatch

#: Units that an error may have, by kernel.
ALLOWED = {"rms_norm": 4, "silu_and_mul": 6, "rope_and_store_kv": 4, "tree_attention": 8, "linear": 4}
#: Of fp32 results, relative to the largest magnitude: sums of 4,096 products in another order.
ALLOWED_FP32 = 1e-4


def randn(check: Check, *shape: int, scale: float = 1.0) -> Tensor:
    import torch

    return (torch.randn(shape, device=check.device) * scale).to(check.dtype)


def units(check: Check, found: Tensor, expected: Tensor) -> float:
    import torch

    unit = 2.0**-9 if check.dtype == torch.bfloat16 else 2.0**-16
    expected = expected.float()
    magnitude = torch.maximum(expected.abs(), expected.square().mean(-1, keepdim=True).sqrt()).clamp_min(1e-30)
    return ((found.float() - expected).abs() / (unit * magnitude)).max().item()


def judge(check: Check, kernel: str, found: Tensor, expected: Tensor, name: str | None = None) -> None:
    import torch

    name = name or kernel
    worst = units(check, found, expected) if torch.isfinite(found.float()).all() else float("inf")
    check.report.put(**{f"{name}_worst_units": worst})
    if not worst <= ALLOWED[kernel]:
        check.report.fail(f"{name}: {worst:.1f} units from the reference, {ALLOWED[kernel]} are allowed")


def judge_exact(check: Check, name: str, is_equal: bool) -> None:
    check.report.put(**{f"{name}_equal": bool(is_equal)})
    if not is_equal:
        check.report.fail(f"{name}: not what the reference gives")


def check_norms(check: Check) -> None:
    from batchinfer.kernels import reference
    from batchinfer.kernels.triton.norm import rms_norm

    hidden = check.spec.hidden_size
    x, residual, weight = randn(check, 37, hidden), randn(check, 37, hidden), randn(check, hidden)
    found, total = rms_norm(x, weight, 1e-5, residual)
    # The sum is rounded once; the norm is of the rounded sum.
    expected, _ = reference.rms_norm(total.float(), weight.float(), 1e-5)
    judge(check, "rms_norm", found, expected)
    judge(check, "rms_norm", total, x.float() + residual.float(), "rms_norm_sum")


def check_silu(check: Check) -> None:
    from batchinfer.kernels import reference
    from batchinfer.kernels.triton.activation import silu_and_mul

    gate_up = randn(check, 33, 2 * check.spec.intermediate_size, scale=3.0)
    judge(check, "silu_and_mul", silu_and_mul(gate_up), reference.silu_and_mul(gate_up.float()))


def check_rope(check: Check) -> None:
    import torch

    from batchinfer.kernels import reference
    from batchinfer.kernels.triton.rope import rope_and_store_kv
    from batchinfer.models.rope import rope_tables

    spec, tokens, slots = check.spec, 19, 64
    cos, sin = (table.to(check.device) for table in rope_tables(spec.rope, spec.max_position))
    at = torch.randint(0, spec.max_position, (tokens,), device=check.device)
    qkv = randn(check, tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    q, k, v = qkv.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
    places = torch.randperm(slots, device=check.device)[:tokens]
    shape = (slots, spec.num_kv_heads, spec.head_dim)
    keys, values = (torch.zeros(shape, dtype=check.dtype, device=check.device) for _ in range(2))
    wide_k, wide_v = (torch.zeros(shape, device=check.device) for _ in range(2))
    found = rope_and_store_kv(q, k, v, cos[at], sin[at], places, keys, values)
    expected = reference.rope_and_store_kv(q.float(), k.float(), v.float(), cos[at], sin[at], places, wide_k, wide_v)
    judge(check, "rope_and_store_kv", found, expected)
    judge(check, "rope_and_store_kv", keys, wide_k, "rope_and_store_kv_keys")
    judge_exact(check, "rope_and_store_kv_values", torch.equal(values.float(), wide_v))


def check_copy(check: Check) -> None:
    import torch

    from batchinfer.kernels import reference
    from batchinfer.kernels.triton.copy import copy_kv

    shape = (3, 8 * 16, check.spec.num_kv_heads, check.spec.head_dim)
    k, v = (randn(check, *shape) for _ in range(2))
    expected_k, expected_v = k.clone(), v.clone()
    sources, targets = (torch.tensor(blocks, device=check.device) for blocks in ([0, 1, 5], [1, 0, 7]))
    copy_kv(k, v, sources, targets, 16)
    reference.copy_kv(expected_k, expected_v, sources, targets, 16)
    judge_exact(check, "copy_kv", torch.equal(k, expected_k) and torch.equal(v, expected_v))


def mixed_batch(check: Check) -> tuple[RaggedBatch, int]:
    """Chunks, decodes, a shared prefix, in blocks of 64; and the number of blocks."""
    import numpy as np

    from batchinfer.attention.tree import RaggedBatch

    # Two families below shared blocks (0..3 and 4..5), decodes and chunks, one sequence alone.
    tables = [[0, 1, 2, 3, 6], [0, 1, 2, 3, 7], [0, 1, 2, 3, 8], [4, 5, 9, 9, 9], [4, 5, 10, 9, 9], [11, 12, 9, 9, 9]]
    starts, lens = [270, 256, 300, 130, 128, 0], [1, 40, 1, 1, 60, 100]
    if check.sizes.is_dry:
        lens = [1, 3, 1, 1, 2, 4]
    block_tables, query_starts, query_lens = (np.array(values, dtype=np.int32) for values in (tables, starts, lens))
    return RaggedBatch(block_tables, query_starts, query_lens, 64), 13


def check_attention(check: Check) -> None:
    """Mixed batches, with and without window; several sizes of heads."""
    from batchinfer.attention.backend import ReferenceAttention
    from batchinfer.kernels.triton.attention import TritonAttention

    ragged, num_blocks = mixed_batch(check)
    windows: frozenset[int | None] = frozenset({None, 100})
    sizes = [(check.spec.num_heads, check.spec.num_kv_heads, check.spec.head_dim)]
    sizes += [] if check.sizes.is_dry else [(9, 3, 64), (16, 8, 256)]
    for heads, kv_heads, dim in sizes:
        k, v = (randn(check, num_blocks * 64, kv_heads, dim) for _ in range(2))
        q = randn(check, ragged.num_tokens, heads, dim)
        right = ReferenceAttention(check.device)
        right.plan(ragged, windows)
        for is_invariant in (False, True):
            ours = TritonAttention(check.device, heads, kv_heads, dim, check.dtype, is_invariant=is_invariant)
            ours.plan(ragged, windows)
            for window in windows:
                found = ours.forward(q, k, v, dim**-0.5, window)
                expected = right.forward(q.float(), k.float(), v.float(), dim**-0.5, window)
                kind = f"{heads}x{kv_heads}x{dim}{'_window' if window else ''}{'_invariant' if is_invariant else ''}"
                judge(check, "tree_attention", found, expected, f"tree_attention_{kind}")


def check_linear(check: Check) -> None:
    import torch

    from batchinfer.kernels.triton.linear import linear

    spec = check.spec
    for rows in (1, 37, 300):
        for name, outputs, inputs in (
            ("gate_up", 2 * spec.intermediate_size, spec.hidden_size),
            ("down", spec.hidden_size, spec.intermediate_size),
        ):
            x, weight = randn(check, rows, inputs), randn(check, outputs, inputs, scale=inputs**-0.5)
            expected = torch.nn.functional.linear(x.float(), weight.float())
            judge(check, "linear", linear(x, weight), expected, f"linear_{name}_{rows}")


def check_head(check: Check) -> None:
    import torch

    from batchinfer.kernels import reference
    from batchinfer.kernels.triton import head

    spec, rows = check.spec, 5 if check.sizes.is_dry else 70
    hidden = randn(check, rows, spec.hidden_size)
    weight = randn(check, spec.vocab_size, spec.hidden_size, scale=spec.hidden_size**-0.5)
    targets = torch.randint(0, spec.vocab_size, (rows,), device=check.device)
    padded = torch.nn.functional.pad(hidden, (0, 0, 0, reference.pad_rows(rows) - rows))
    expected = reference.head_logits(padded, weight)[:rows]
    largest = expected.abs().max().item()
    found = head.head_logits(hidden, weight)
    _judge_fp32(check, "head_logits", found, expected, largest)
    right = reference.linear_logprobs(hidden, weight, targets)
    scored = head.linear_logprobs(hidden, weight, targets)
    _judge_fp32(check, "linear_logprobs", scored.logprob, right.logprob, largest)
    _judge_fp32(check, "linear_logprobs_entropy", scored.entropy, right.entropy, largest)
    num_ids = spec.vocab_size - 7
    drawn = head.greedy(hidden, weight, num_ids, wants_logprobs=True)
    # Where the two best lie nearer than sums in another order differ, either is right.
    best = expected[:, :num_ids].amax(-1)
    picked = expected.gather(1, drawn.token_ids.long()[:, None])[:, 0]
    judge_exact(check, "greedy", bool((best - picked <= ALLOWED_FP32 * largest).all() and drawn.is_finite.all()))


def _judge_fp32(check: Check, name: str, found: Tensor, expected: Tensor, largest: float) -> None:
    error = (found - expected).abs().max().item() / largest
    check.report.put(**{f"{name}_error": error})
    if not error <= ALLOWED_FP32:
        check.report.fail(f"{name}: {error:.2g} of the largest logit from the reference")


def check_sample(check: Check) -> None:
    """The same tokens as the engine's own sampler from the same logits."""
    import numpy as np
    import torch

    from batchinfer.engine import sampler
    from batchinfer.kernels.triton import sample

    rows = 4 if check.sizes.is_dry else 64
    logits = torch.randn(rows, check.spec.vocab_size, device=check.device) * 3
    rng = np.random.default_rng()
    columns = sampler.DrawColumns(
        temperature=rng.uniform(0.3, 1.5, rows).astype(np.float32),
        top_k=rng.choice([0, 0, 20, 1000], rows),
        top_p=rng.choice([1.0, 0.9, 0.5], rows),
        min_p=rng.choice([0.0, 0.05], rows).astype(np.float32),
        keys=rng.integers(-(2**63), 2**63, rows),
        positions=rng.integers(0, 1000, rows),
    )
    expected = sampler.draw(logits.cpu(), columns, writes=False)
    same = (sample.draw(logits.clone(), columns, writes=False).cpu() == expected).float().mean().item()
    check.report.put(sample_same_tokens=same)
    if same < 0.98:  # exp and log of a chip may differ in a last bit, and then a near tie falls otherwise
        check.report.fail(f"sample: {100 * same:.0f} % of the tokens are those of the sampler")


CHECKS: dict[str, Callable[[Check], None]] = {
    "rms_norm": check_norms,
    "silu_and_mul": check_silu,
    "rope_and_store_kv": check_rope,
    "copy_kv": check_copy,
    "tree_attention": check_attention,
    "linear": check_linear,
    "head": check_head,
    "sample": check_sample,
}


def part(check: Check) -> None:
    for name, call in CHECKS.items():
        with check.report.guarded(name):
            call(check)


if __name__ == "__main__":
    run_part(part)
