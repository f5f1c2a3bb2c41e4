"""The plan's figures against sums over single positions, steps and rows."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.models.spec import DecoderSpec, RopeSpec
from batchinfer.planner.cost import JobPlan, num_parameters, plan_job
from batchinfer.planner.prefix_tree import build_prefix_tree

SPEC = DecoderSpec(
    architecture="LlamaForCausalLM",
    vocab_size=11,
    hidden_size=6,
    intermediate_size=7,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=5,
    rms_norm_eps=1e-5,
    rope=RopeSpec(kind="default", theta=1e4, dim=5),
    max_position=64,
    tie_word_embeddings=True,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    hidden_act="silu",
    sliding_windows=(None, 3, None),
    dtype=None,
)
LAYER = 6 * (4 + 2 * 2) * 5 + 4 * 5 * 6 + 3 * 6 * 7
LINEAR = 3 * LAYER
KV_WEIGHTS = 6 * (2 * 2) * 5  # of a layer
KV_BYTES = 3 * 2 * 2 * 5 * 2  # layers, k and v, heads, channels, bytes

jobs = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(1, 5), st.integers(1, 3)), max_size=9
)  # (tokens, max_tokens, n)
Job = list[tuple[list[int], int, int]]


def planned(job: Job, *, group: int = 4, chunk: int = 8, spec: DecoderSpec = SPEC) -> JobPlan:
    tree = build_prefix_tree([np.array(tokens, np.int32) for tokens, _, _ in job])
    return plan_job(
        tree,
        spec,
        dtype_bytes=2,
        max_tokens=np.array([m for _, m, _ in job], np.int64),
        n=np.array([n for _, _, n in job], np.int64),
        max_num_seqs=group,
        max_batch_tokens=chunk,
    )


def samples_of(job: Job) -> list[tuple[tuple[int, ...], int]]:
    """(tokens, max_tokens) of every sample in depth-first order."""
    order = sorted(range(len(job)), key=lambda r: (job[r][0], r))
    return [(tuple(job[r][0]), job[r][1]) for r in order for _ in range(job[r][2])]


def prefixes(prompts: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {prompt[:length] for prompt in prompts for length in range(1, len(prompt) + 1)}


def attention_flops(positions: list[int], windows: tuple[int | None, ...]) -> int:
    return sum(4 * 4 * 5 * min(p + 1, window if window is not None else p + 1) for p in positions for window in windows)


def decode_positions(job: Job) -> list[int]:
    return [p for prompt, m in samples_of(job) for p in range(len(prompt), len(prompt) + m - 1)]


@settings(max_examples=200, deadline=None)
@given(job=jobs)
def test_flops_equal_sums_over_positions(job: Job) -> None:
    plan = planned(job)
    samples = samples_of(job)
    decode = decode_positions(job)
    shared = [len(prefix) - 1 for prefix in prefixes([prompt for prompt, _ in samples])]
    unshared = [p for prompt, _ in samples for p in range(len(prompt))]
    shared_ends = [len(prompt) - 1 for prompt in {prompt for prompt, _ in samples if prompt}]
    unshared_ends = [len(prompt) - 1 for prompt, _ in samples if prompt]
    for cost, prompt_positions, ends in (
        (plan.with_sharing, shared, shared_ends),
        (plan.without_sharing, unshared, unshared_ends),
    ):
        assert cost.num_prompt_tokens_computed == len(prompt_positions)
        assert cost.num_decode_tokens_computed == len(decode)
        # In the last layer, only tokens that one is drawn from go on after their keys and values.
        in_all, in_last = prompt_positions + decode, ends + decode
        weights = (2 * LAYER + KV_WEIGHTS) * len(in_all) + (LAYER - KV_WEIGHTS) * len(in_last)
        assert cost.matmul_flops == 2 * weights
        *windows, last = SPEC.sliding_windows
        assert cost.attention_flops == attention_flops(in_all, tuple(windows)) + attention_flops(in_last, (last,))
        assert cost.lm_head_flops == 2 * 6 * 11 * sum(m for _, m in samples)
        assert cost.flops == cost.matmul_flops + cost.attention_flops + cost.lm_head_flops


@settings(max_examples=200, deadline=None)
@given(job=jobs, group=st.integers(1, 6))
def test_kv_memory_equals_sums_over_running_samples(job: Job, group: int) -> None:
    kv = planned(job, group=group).kv
    samples = samples_of(job)

    def needed(together: list[tuple[tuple[int, ...], int]]) -> int:
        return len(prefixes([prompt for prompt, _ in together])) + sum(m - 1 for _, m in together)

    windows = [samples[i : i + group] for i in range(max(1, len(samples) - group + 1))]
    assert kv.peak_tokens == max(map(needed, windows))
    assert kv.peak_without_sharing_tokens == max(sum(len(p) + m - 1 for p, m in window) for window in windows)
    assert kv.all_tokens == needed(samples)
    assert kv.bytes_per_token == KV_BYTES
    assert (kv.peak_bytes, kv.all_bytes) == (kv.peak_tokens * KV_BYTES, kv.all_tokens * KV_BYTES)
    assert kv.peak_without_sharing_bytes == kv.peak_without_sharing_tokens * KV_BYTES


@settings(max_examples=200, deadline=None)
@given(job=jobs, group=st.integers(1, 6), chunk=st.integers(1, 9))
def test_bytes_equal_sums_over_steps(job: Job, group: int, chunk: int) -> None:
    plan = planned(job, group=group, chunk=chunk)
    samples = samples_of(job)
    unshared = sum(
        min(p + chunk, len(prompt)) for prompt, _ in samples for p in range(0, len(prompt), chunk)
    )  # prompt chunks
    shared_decode = own = 0
    for begin in range(0, len(samples), group):
        together = samples[begin : begin + group]
        for step in range(1, 5):
            running = [(prompt, step) for prompt, m in together if m - 1 >= step]
            shared_decode += len(prefixes([prompt for prompt, _ in running]))
            unshared += sum(len(prompt) for prompt, _ in running)
            own += sum(step for _, step in running)
    tree = build_prefix_tree([np.array(tokens, np.int32) for tokens, _, _ in job])
    shared_chunks = sum(
        min(p + chunk, end)
        for start, end in zip(tree.start.tolist(), tree.end.tolist(), strict=True)
        for p in range(start, end, chunk)
    )
    assert plan.with_sharing.kv_bytes_read == KV_BYTES * (shared_chunks + shared_decode + own)
    assert plan.without_sharing.kv_bytes_read == KV_BYTES * (unshared + own)
    for cost in (plan.with_sharing, plan.without_sharing):
        computed = cost.num_prompt_tokens_computed + cost.num_decode_tokens_computed
        sampled = sum(m for _, m in samples)
        assert cost.num_steps == max(
            -(-computed // chunk), -(-sampled // group), max((m for _, m in samples), default=0)
        )
        # Steps that only compute prompts do not read the lm_head.
        sampling = max(-(-sampled // group), max((m for _, m in samples), default=0))
        assert cost.lm_head_bytes_read == 2 * 6 * 11 * sampling
        of_a_step = LINEAR + 3 * 2 * 6 + 6
        assert cost.weight_bytes_read == 2 * (of_a_step * cost.num_steps + 6 * computed) + cost.lm_head_bytes_read
        assert cost.kv_bytes_written == KV_BYTES * computed
        assert cost.bytes == cost.weight_bytes_read + cost.kv_bytes_read + cost.kv_bytes_written


@settings(max_examples=200, deadline=None)
@given(job=jobs)
def test_sharing_equals_the_brute_force_tries(job: Job) -> None:
    plan = planned(job)
    prompts = [tuple(tokens) for tokens, _, _ in job]
    assert plan.num_rows == len(job)
    assert plan.num_samples == sum(n for _, _, n in job)
    assert plan.max_output_tokens == sum(m * n for _, m, n in job)
    assert plan.num_duplicate_rows == len(prompts) - len(set(prompts))
    assert plan.num_prompt_tokens == sum(map(len, prompts))
    assert plan.num_unique_prompt_tokens == len(prefixes(prompts))
    assert plan.num_shareable_prompt_tokens == plan.num_prompt_tokens - plan.num_unique_prompt_tokens
    assert sum(p.num_tokens_saved for p in plan.shared_prefixes) <= plan.num_shareable_prompt_tokens
    if len(plan.shared_prefixes) < 10:
        assert sum(p.num_tokens_saved for p in plan.shared_prefixes) == plan.num_shareable_prompt_tokens
    for prefix in plan.shared_prefixes:
        common = prompts[prefix.example_row][: prefix.num_tokens]
        assert prefix.num_rows == sum(prompt[: len(common)] == common for prompt in prompts) > 1
    saved = [p.num_tokens_saved for p in plan.shared_prefixes]
    assert saved == sorted(saved, reverse=True)


def test_depth_nodes_and_shared_prefixes_of_an_example() -> None:
    job: Job = [([1, 1, 1], 2, 1), ([1, 1, 2], 2, 1), ([1, 1, 2, 0], 2, 1), ([1, 1, 2], 2, 1), ([0], 2, 1)]
    plan = planned(job)
    assert (plan.tree_depth, plan.num_tree_nodes, plan.num_duplicate_rows) == (3, 6, 1)
    assert [(p.num_tokens, p.num_rows, p.num_tokens_saved, p.example_row) for p in plan.shared_prefixes] == [
        (2, 4, 6, 0),
        (3, 3, 2, 1),
    ]
    assert plan.shareable_share == pytest.approx(8 / 14)


def test_an_empty_job_costs_nothing() -> None:
    plan = planned([])
    assert (plan.num_rows, plan.tree_depth, plan.shareable_share, plan.kv.peak_tokens) == (0, 0, 0.0, 0)
    assert plan.with_sharing == plan.without_sharing
    assert (plan.with_sharing.flops, plan.with_sharing.bytes, plan.with_sharing.num_steps) == (0, 0, 0)


def test_figures_beyond_64_bits_do_not_wrap() -> None:
    huge = replace(SPEC, num_layers=126, num_heads=128, head_dim=128, sliding_windows=(None,) * 126)
    tree = build_prefix_tree([np.zeros(1000, np.int32)])
    plan = plan_job(tree, huge, dtype_bytes=2, max_tokens=2_000_000, n=100)
    decode, prompt = 100 * sum(range(1001, 1000 + 2_000_000)), sum(range(1, 1001))
    contexts = 126 * decode + 125 * prompt + 1000  # in the last layer the prompt's last token alone
    assert plan.with_sharing.attention_flops == 4 * 128 * 128 * contexts > 2**63


def test_to_dict_is_json() -> None:
    plan = planned([([1, 1, 1], 2, 1), ([1, 1, 2], 2, 3)])
    values = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert values["kv"]["peak_tokens"] == plan.kv.peak_tokens
    assert values["with_sharing"]["flops"] == plan.with_sharing.flops
    assert values["shared_prefixes"][0]["num_rows"] == 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # https://huggingface.co/HuggingFaceTB/SmolLM2-135M
        (
            {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_layers": 30}
            | {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
            134_515_008,
        ),
        # https://huggingface.co/Qwen/Qwen2.5-0.5B
        (
            {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_layers": 24}
            | {"num_heads": 14, "num_kv_heads": 2, "head_dim": 64, "qkv_bias": True},
            494_032_768,
        ),
        # https://huggingface.co/Qwen/Qwen3-0.6B
        (
            {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_layers": 28}
            | {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "qk_norm": True},
            596_049_920,
        ),
        # https://huggingface.co/meta-llama/Llama-3.1-8B
        (
            {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_layers": 32}
            | {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "tie_word_embeddings": False},
            8_030_261_248,
        ),
    ],
    ids=["SmolLM2-135M", "Qwen2.5-0.5B", "Qwen3-0.6B", "Llama-3.1-8B"],
)
def test_number_of_parameters_of_known_models(changes: dict[str, int | bool], expected: int) -> None:
    assert num_parameters(replace(SPEC, **changes)) == expected  # type: ignore[arg-type]


def test_biases_count() -> None:
    assert num_parameters(replace(SPEC, o_bias=True)) - num_parameters(SPEC) == 3 * 6
    assert num_parameters(replace(SPEC, mlp_bias=True)) - num_parameters(SPEC) == 3 * (2 * 7 + 6)


def test_bad_values_are_refused() -> None:
    tree = build_prefix_tree([np.array([1, 2], np.int32)] * 2)
    with pytest.raises(ValueError, match="max_tokens must be one value or 2"):
        plan_job(tree, SPEC, dtype_bytes=2, max_tokens=[1, 2, 3])
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        plan_job(tree, SPEC, dtype_bytes=2, max_tokens=[1, 2], n=[1, 0])
