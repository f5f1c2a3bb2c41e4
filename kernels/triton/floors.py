"""The least time that each kernel of a step can take on a GPU: bytes that must move, operations that must be done.

    python -m batchinfer.kernels.triton.floors

prints the table of docs/performance-gpu.md. A kernel reads each of its inputs once and writes each output once;
what it holds between is free. Its floor is the greater of bytes over the memory's rate and FLOPs over the peak of dense
products. That is kind to the kernel: no chip reaches either figure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from batchinfer.models.spec import DecoderSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class Chip:
    """What its maker says."""

    name: str
    bytes_per_s: float  # device memory
    flops_per_s: float  # dense bf16 products, fp32 sums


H200 = Chip("H200", 4.8e12, 989e12)

LLAMA_3_8B = DecoderSpec(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope=RopeSpec("default", 500_000.0, 128),
    max_position=8192,
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    hidden_act="silu",
    sliding_windows=(None,) * 32,
    dtype="bfloat16",
)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the tokens of a step look at."""

    name: str
    num_tokens: int
    num_outputs: int  # tokens that are sampled from
    kv_tokens: int  # distinct tokens whose KV is read: what is shared counts once
    pairs: int  # of a query token and a key that it sees

    @classmethod
    def decode(cls, rows: int, own: int, *, prefixes: int = 0, prefix: int = 0) -> StepShape:
        """One token of each row, which sees `own` tokens of its own and one of the shared prefixes."""
        name = f"decode, {rows} rows × {own:,} tokens"
        if prefixes:
            name += f" below {prefixes} × {prefix:,} shared"
        kv_tokens = rows * own + prefixes * prefix
        return cls(name, rows, rows, kv_tokens, rows * (own + (prefix if prefixes else 0)))

    @classmethod
    def prefill(cls, tokens: int, before: int = 0) -> StepShape:
        """A chunk of one prompt, of which `before` tokens are computed."""
        name = f"prefill, {tokens:,} tokens" + (f" after {before:,}" if before else "")
        return cls(name, tokens, 1, before + tokens, tokens * before + tokens * (tokens + 1) // 2)


@dataclass(frozen=True, slots=True)
class Floor:
    """Of one launch."""

    kernel: str
    calls: int  # in a step
    nbytes: int
    flops: int

    def seconds(self, chip: Chip) -> float:
        return max(self.nbytes / chip.bytes_per_s, self.flops / chip.flops_per_s)

    def is_memory_bound(self, chip: Chip) -> bool:
        return self.nbytes / chip.bytes_per_s >= self.flops / chip.flops_per_s


def linear_floor(kernel: str, calls: int, rows: int, inputs: int, outputs: int, itemsize: int = 2) -> Floor:
    """x [rows, inputs] times weight [outputs, inputs] transposed."""
    nbytes = itemsize * (outputs * inputs + rows * (inputs + outputs))
    return Floor(kernel, calls, nbytes, 2 * rows * inputs * outputs)


def step_floors(spec: DecoderSpec, step: StepShape, itemsize: int = 2) -> list[Floor]:
    """Of every kernel of a step, in its order.

    The last layer is counted like the others, and greedy rows: the head writes no logits. `sample` is what a drawn
    row pays on top, which reads its logits once.
    """
    tokens, hidden, inner = step.num_tokens, spec.hidden_size, spec.intermediate_size
    heads, kv_heads, dim, layers = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.num_layers
    qkv, attended, cached = (heads + 2 * kv_heads) * dim, heads * dim, 2 * kv_heads * dim
    norm = itemsize * hidden * (4 * tokens + 1)  # x and residual in, normed sum and sum out
    rope = itemsize * tokens * (2 * qkv) + 4 * tokens * spec.rope.dim  # cos and sin, fp32
    attention = itemsize * (step.kv_tokens * cached + 2 * tokens * attended)
    vocab, outputs = spec.vocab_size, step.num_outputs
    head = itemsize * (vocab * hidden + outputs * hidden)
    return [
        Floor("rms_norm", 2 * layers + 1, norm, 4 * tokens * hidden),
        linear_floor("linear qkv", layers, tokens, hidden, qkv, itemsize),
        Floor("rope_and_store_kv", layers, rope, 3 * tokens * (heads + kv_heads) * spec.rope.dim),
        Floor("tree_attention", layers, attention, 4 * heads * dim * step.pairs),
        linear_floor("linear o", layers, tokens, attended, hidden, itemsize),
        linear_floor("linear gate_up", layers, tokens, hidden, 2 * inner, itemsize),
        Floor("silu_and_mul", layers, itemsize * 3 * tokens * inner, 4 * tokens * inner),
        linear_floor("linear down", layers, tokens, inner, hidden, itemsize),
        Floor("greedy head", 1, head + 12 * outputs, 2 * outputs * hidden * vocab),
        Floor("sample", 0, 4 * outputs * vocab + 8 * outputs, 8 * outputs * vocab),
    ]


def scoring_floor(spec: DecoderSpec, tokens: int, itemsize: int = 2) -> Floor:
    """linear_logprobs: log-probability, entropy and argmax of each token, no logits written."""
    nbytes = itemsize * (spec.vocab_size * spec.hidden_size + tokens * spec.hidden_size) + 24 * tokens
    return Floor("linear_logprobs", 1, nbytes, 2 * tokens * spec.hidden_size * spec.vocab_size)


def copy_floor(spec: DecoderSpec, blocks: int, block_size: int = 64, itemsize: int = 2) -> Floor:
    """copy_kv: blocks read and written, in all layers."""
    per_block = 2 * spec.num_layers * block_size * spec.num_kv_heads * spec.head_dim * itemsize
    return Floor("copy_kv", 1, 2 * blocks * per_block, 0)


def step_seconds(floors: Iterable[Floor], chip: Chip) -> float:
    """Of a whole step: its kernels run one after the other."""
    return sum(floor.calls * floor.seconds(chip) for floor in floors)


#: The steps of docs/performance-gpu.md; recipes/gpu_check.py measures the same.
STEPS = (
    StepShape.decode(256, 1024),
    StepShape.decode(256, 128, prefixes=8, prefix=4096),
    StepShape.decode(8, 1024),
    StepShape.prefill(8192),
)


def tables(spec: DecoderSpec = LLAMA_3_8B, chip: Chip = H200, steps: Iterable[StepShape] = STEPS) -> str:
    """Markdown: a table for each step, and one of what runs beside it."""
    parts = []
    for step in steps:
        floors = step_floors(spec, step)
        seconds = step_seconds(floors, chip)
        rate = step.num_outputs if step.num_outputs > 1 else step.num_tokens
        parts.append(
            f"### {step.name[0].upper()}{step.name[1:]}\n\n{_table(floors, chip)}\n\n"
            f"Step: {1e3 * seconds:.2f} ms, {rate / seconds:,.0f} tokens/s."
        )
    others = [scoring_floor(spec, 2048), copy_floor(spec, 64)]
    parts.append(
        f"### Beside the steps\n\n2,048 tokens scored; 64 blocks of 64 tokens copied.\n\n{_table(others, chip)}"
    )
    return "\n\n".join(parts) + "\n"


def _table(floors: Iterable[Floor], chip: Chip) -> str:
    lines = ["| kernel | launches | MB | GFLOP | µs each | bound by | µs in all |", "|---|--:|--:|--:|--:|---|--:|"]
    for floor in floors:
        each = 1e6 * floor.seconds(chip)
        bound = "memory" if floor.is_memory_bound(chip) else "products"
        lines.append(
            f"| {floor.kernel} | {floor.calls or '-'} | {floor.nbytes / 1e6:,.2f} | {floor.flops / 1e9:,.2f} | "
            f"{each:,.2f} | {bound} | {f'{each * floor.calls:,.0f}' if floor.calls else '-'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables(), end="")
