"""Rows below shared prefixes, with and without sharing: the same tokens, KV read once or once for each row."""

from __future__ import annotations

from gpu_rates import copy_rate
from gpu_setup import Check, random_weights, run_part, with_layers
from gpu_steps import decode_step, greedy_step, measured_chip, random_kv


def part(check: Check) -> None:
    """In as many layers as leave room for KV that is not shared: in all 32 it would be 142 GB."""
    from batchinfer.kernels.triton import floors
    from batchinfer.kernels.triton.decoder import TritonDecoder

    sizes = check.sizes
    spec = with_layers(check.spec, sizes.layers_unshared)
    model = TritonDecoder(
        spec, random_weights(spec, check.dtype, check.device), sizes.prefix_tokens + sizes.own_tokens + 64
    )
    check.report.put(num_layers=spec.num_layers)
    seconds = {}
    for name, shared in (("shared", True), ("unshared", False)):
        with check.report.guarded(name):
            step = decode_step(
                check,
                sizes.rows,
                sizes.own_tokens,
                prefixes=sizes.prefixes,
                prefix_tokens=sizes.prefix_tokens,
                shared=shared,
            )
            kv = random_kv(model, step.num_blocks)
            seconds[name] = check.seconds(greedy_step(model, step, kv), 2 * sizes.repeats)
            check.report.put(**{f"{name}_ms": 1e3 * seconds[name], f"{name}_kv_bytes": kv.nbytes})
            del kv
    if len(seconds) == 2:
        check.report.put(speed_up=seconds["unshared"] / seconds["shared"])
    with check.report.guarded("floor"):
        shape = floors.StepShape.decode(
            sizes.rows, sizes.own_tokens, prefixes=sizes.prefixes, prefix=sizes.prefix_tokens
        )
        chip = measured_chip({"copy_bytes_per_s": copy_rate(check), "product_flops_per_s": floors.H200.flops_per_s})
        least = floors.step_seconds(floors.step_floors(spec, shape, check.dtype.itemsize), chip)
        check.report.put(shared_least_ms=1e3 * least)


if __name__ == "__main__":
    run_part(part)
