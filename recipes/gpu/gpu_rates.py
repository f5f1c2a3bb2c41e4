"""The chip's ceilings: how fast it copies memory, and how fast it multiplies the model's shapes in plain torch."""

from __future__ import annotations

from gpu_setup import Check, run_part

#: Copied at once: beyond any cache.
COPY_BYTES = 4 << 30


def copy_rate(check: Check) -> float:
    """Bytes read and written per second."""
    import torch

    num_bytes = 1 << 16 if check.sizes.is_dry else COPY_BYTES
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=check.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / check.seconds(lambda: target.copy_(source))


def product_seconds(check: Check, rows: int) -> dict[str, float]:
    """Of each product of a layer with this many rows, in torch (cuBLAS); and of the head."""
    import torch

    spec = check.spec
    attended = spec.num_heads * spec.head_dim
    shapes = {
        "qkv": (attended + 2 * spec.num_kv_heads * spec.head_dim, spec.hidden_size),
        "o": (spec.hidden_size, attended),
        "gate_up": (2 * spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
        "head": (spec.vocab_size, spec.hidden_size),
    }
    found = {}
    for name, (outputs, inputs) in shapes.items():
        # Several weights in turn: a small one would stay in the cache, as it does not between layers.
        num_weights = 1 if check.sizes.is_dry else max(1, (256 << 20) // (2 * outputs * inputs))
        weights = [torch.randn(outputs, inputs, dtype=check.dtype, device=check.device) for _ in range(num_weights)]
        x = torch.randn(rows, inputs, dtype=check.dtype, device=check.device)
        found[name] = check.seconds(lambda: [torch.nn.functional.linear(x, w) for w in weights]) / num_weights  # noqa: B023
    return found


def flops_per_s(check: Check, rows: int, seconds: dict[str, float]) -> float:
    """Of a layer's products together."""
    spec = check.spec
    attended = spec.num_heads * spec.head_dim
    qkv = attended + 2 * spec.num_kv_heads * spec.head_dim
    weights = spec.hidden_size * (qkv + attended + 3 * spec.intermediate_size)
    return 2 * rows * weights / sum(seconds[name] for name in ("qkv", "o", "gate_up", "down"))


def part(check: Check) -> None:
    report = check.report
    with report.guarded("copy"):
        report.put(copy_bytes_per_s=copy_rate(check))
    for name, rows in (("decode", check.sizes.rows), ("prefill", check.sizes.prefill_tokens)):
        with report.guarded(f"products, {name}"):
            seconds = product_seconds(check, rows)
            report.put(**{f"{name}_product_us": {key: 1e6 * value for key, value in seconds.items()}})
            report.put(**{f"{name}_product_flops_per_s": flops_per_s(check, rows, seconds)})


if __name__ == "__main__":
    run_part(part)
