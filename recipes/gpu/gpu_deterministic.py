"""What --deterministic costs: the same steps with the products of cuBLAS and with Triton's."""

from __future__ import annotations

from gpu_setup import Check, random_weights, run_part
from gpu_steps import decode_step, greedy_step, prefill_step, random_kv

BAR = 0.15  # slower than without


def part(check: Check) -> None:
    from batchinfer.kernels.triton.decoder import TritonDecoder

    sizes, report = check.sizes, check.report
    weights = random_weights(check.spec, check.dtype, check.device)
    models = {
        name: TritonDecoder(check.spec, weights, check.spec.max_position, deterministic=name == "deterministic")
        for name in ("fast", "deterministic")
    }
    steps = {
        "decode": decode_step(check, sizes.rows, sizes.context),
        "small_decode": decode_step(check, max(1, sizes.rows // 32), sizes.context),
        "prefill": prefill_step(check, sizes.prefill_tokens),
    }
    for name, step in steps.items():
        with report.guarded(name):
            seconds = {}
            for kind, model in models.items():
                kv = random_kv(model, step.num_blocks)
                seconds[kind] = check.seconds(greedy_step(model, step, kv))
                del kv
            cost = seconds["deterministic"] / seconds["fast"] - 1
            report.put(**{f"{name}_ms": {kind: 1e3 * value for kind, value in seconds.items()}})
            report.put(**{f"{name}_cost": cost, f"{name}_meets_bar": cost <= BAR})


if __name__ == "__main__":
    run_part(part)
