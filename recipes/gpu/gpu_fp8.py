"""KV in fp8: are its kernels right on this chip, do rows keep their bits, and what does decode gain?

Every number of 8 bits is made by the chip and compared with torch's; attention over fp8 is compared with the fp32
reference over the same numbers, in the units of gpu_kernels.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu_invariance import random_rows
from gpu_kernels import judge, judge_exact, mixed_batch, randn
from gpu_setup import Check, random_weights, run_part
from gpu_steps import decode_step, greedy_step, random_kv

if TYPE_CHECKING:
    from batchinfer.types import Prompt


def check_store(check: Check) -> None:
    """Numbers and scales of v, which nothing rounds before, are torch's to the bit; zeros and infinity among them."""
    import torch

    from batchinfer.kernels import reference
    from batchinfer.kernels.fp8_kv import FP8
    from batchinfer.kernels.triton.rope import rope_and_store_kv
    from batchinfer.models.decoder import KVCache

    spec, tokens = check.spec, 70
    q = randn(check, tokens, spec.num_heads, spec.head_dim)
    k, v = (randn(check, tokens, spec.num_kv_heads, spec.head_dim) for _ in range(2))
    v *= torch.logspace(-4, 3, tokens, device=check.device)[:, None, None].to(check.dtype)
    v[3, 0], v[5, 1, 2] = 0, float("inf")
    angles = torch.randn(tokens, spec.rope.dim // 2, device=check.device)
    slots = torch.randperm(128, device=check.device)[:tokens]
    pools = [KVCache.make(spec, 2, 64, FP8, check.device) for _ in range(2)]
    for pool, op in zip(pools, (rope_and_store_kv, reference.rope_and_store_kv), strict=True):
        op(q, k, v, angles.cos(), angles.sin(), slots, pool.k[0], pool.v[0], pool.scales(0))
    (keys, values, k_scales, v_scales), right = ([each.float() for each in pool.tensors] for pool in pools)
    is_finite = right[3].transpose(2, 3).reshape(right[1].shape[:3]).isfinite()
    judge_exact(check, "fp8_values", torch.equal(values[is_finite], right[1][is_finite]))
    judge_exact(check, "fp8_value_scales", torch.equal(v_scales.nan_to_num(-1), right[3].nan_to_num(-1)))
    # Rotated keys may be rounded otherwise, and then be one number of 8 bits off.
    near = torch.isclose(keys, right[0], rtol=0.13, atol=2.0**-9) & (k_scales / right[2] - 1).abs().nan_to_num(
        0
    ).max().lt(0.01)
    judge_exact(check, "fp8_keys_near", bool(near.all()))


def check_attention(check: Check) -> None:
    """The mixed batch of gpu_kernels.py, in both orders of sums."""
    import torch

    from batchinfer.attention.backend import ReferenceAttention
    from batchinfer.kernels.fp8_kv import FP8, KVScales
    from batchinfer.kernels.triton.attention import TritonAttention

    ragged, num_blocks = mixed_batch(check)
    windows: frozenset[int | None] = frozenset({None, 100})
    sizes = [(check.spec.num_heads, check.spec.num_kv_heads, check.spec.head_dim)]
    sizes += [] if check.sizes.is_dry else [(9, 3, 64), (16, 8, 256)]
    for heads, kv_heads, dim in sizes:
        shape = (num_blocks * 64, kv_heads, dim)
        k, v = ((torch.randn(shape, device=check.device) * 100).to(FP8) for _ in range(2))
        scales = KVScales(*(torch.rand(num_blocks, kv_heads, 64, device=check.device) / 100 for _ in range(2)))
        q = randn(check, ragged.num_tokens, heads, dim)
        right = ReferenceAttention(check.device)
        right.plan(ragged, windows)
        for is_invariant in (False, True):
            ours = TritonAttention(check.device, heads, kv_heads, dim, check.dtype, is_invariant=is_invariant)
            ours.plan(ragged, windows)
            for window in windows:
                found = ours.forward(q, k, v, dim**-0.5, window, scales)
                expected = right.forward(q.float(), k, v, dim**-0.5, window, scales)
                kind = f"{heads}x{kv_heads}x{dim}{'_window' if window else ''}{'_invariant' if is_invariant else ''}"
                judge(check, "tree_attention", found, expected, f"fp8_attention_{kind}")


def check_rows(check: Check) -> None:
    """With --deterministic, rows in company have the bits that they have alone."""
    from batchinfer import self_test
    from batchinfer.engine.engine import Engine
    from batchinfer.kernels.fp8_kv import FP8
    from batchinfer.kernels.triton.decoder import TritonDecoder
    from batchinfer.models.random_model import NoText

    spec = self_test.SPEC
    weights = random_weights(spec, check.dtype, check.device)
    model = TritonDecoder(spec, weights, spec.max_position, deterministic=True, kv_dtype=FP8)
    engine = Engine.from_parts(model, NoText(spec.vocab_size), (), spec.max_position, self_test.ALONE)

    def results(rows: list[Prompt]) -> dict[int, Any]:
        return {done.row_index: (done.token_ids, done.logprobs, done.prompt_logprobs) for done in engine.run(rows)}

    rows = random_rows(check)
    alone = {index: found for row in rows for index, found in results([row]).items()}
    engine.config = self_test.WAYS["in company" if check.sizes.is_dry else "shared and in chunks"]
    judge_exact(check, "fp8_rows_in_company", results(rows) == alone)


def measure_decode(check: Check) -> None:
    """The decode step of the part `model` with either KV, and the bytes of KV that it reads."""
    from batchinfer.kernels.fp8_kv import FP8
    from batchinfer.kernels.triton.decoder import TritonDecoder
    from batchinfer.models.decoder import kv_bytes_per_block

    sizes = check.sizes
    weights = random_weights(check.spec, check.dtype, check.device)
    step = decode_step(check, sizes.rows, sizes.context)
    seconds = {}
    for name, kv_dtype in (("plain", check.dtype), ("fp8", FP8)):
        model = TritonDecoder(check.spec, weights, check.spec.max_position, kv_dtype=kv_dtype)
        kv = random_kv(model, step.num_blocks)
        seconds[name] = check.seconds(greedy_step(model, step, kv), 2 * sizes.repeats)
        kv_bytes = sizes.rows * sizes.context * kv_bytes_per_block(check.spec, kv_dtype, 1)
        check.report.put(**{f"{name}_decode_ms": 1e3 * seconds[name], f"{name}_kv_bytes_read": kv_bytes})
        del kv, model
    check.report.put(
        fp8_decode_tokens_per_s=sizes.rows / seconds["fp8"], fp8_decode_speed_up=seconds["plain"] / seconds["fp8"]
    )


def part(check: Check) -> None:
    for name, call in (
        ("store", check_store),
        ("attention", check_attention),
        ("rows", check_rows),
        ("decode", measure_decode),
    ):
        with check.report.guarded(f"fp8 {name}"):
            call(check)


if __name__ == "__main__":
    run_part(part)
