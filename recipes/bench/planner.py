"""How long planning takes and how much memory: the prefix tree, the order and the cost of a window of prompts.

    python recipes/bench/planner.py
    python recipes/bench/planner.py --prompts data/quickstart.parquet --model smollm2-135m

Without --prompts it makes prompts as few-shot data sets have them: families with a long common
prefix, groups inside a family with a shorter one, a tail of each row's own, and duplicates.

Memory is measured in a second, slower planning run under tracemalloc, which sees every NumPy
buffer and Python object: the peak above what was there before, so the token arrays themselves do not
count. The growth of the process's peak resident size over the first run is printed beside it.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
import tracemalloc
from collections.abc import Sequence

import numpy as np

from batchinfer.models.spec import DecoderSpec, RopeSpec
from batchinfer.planner.cost import plan_job
from batchinfer.planner.order import execution_order
from batchinfer.planner.prefix_tree import PrefixTree, build_prefix_tree
from batchinfer.types import TokenIds

MAX_TOKENS = 256


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if args.prompts is None:
        rows, spec = few_shot_prompts(args.rows, args.length, args.seed), smollm2_shape()
    else:
        rows, spec = prompts_of_file(args.prompts, args.column, args.model)

    peak_rss_before = peak_rss_bytes()
    times_s, tree = time_planning(rows, spec)
    rss_growth = peak_rss_bytes() - peak_rss_before
    token_bytes, traced = sum(row.nbytes for row in rows), peak_traced_bytes(rows, spec)
    result = {
        "num_rows": tree.num_rows,
        "num_tokens": tree.num_tokens,
        "num_unique_tokens": tree.num_unique_tokens,
        "num_nodes": tree.num_nodes,
        **times_s,
        "plan_s": round(sum(times_s.values()), 4),
        "token_bytes": token_bytes,
        "peak_traced_bytes": traced,
        "peak_rss_growth_bytes": rss_growth,
        "numpy": np.__version__,
        "python": sys.version.split()[0],
    }
    saving = tree.num_shareable_tokens / max(1, tree.num_tokens)
    print(
        f"{tree.num_rows:,} prompts, {tree.num_tokens:,} tokens, {tree.num_unique_tokens:,} unique ({saving:.1%} saved)"
    )
    print(f"tree {times_s['tree_s']:.2f} s, order {times_s['order_s']:.3f} s, cost {times_s['cost_s']:.2f} s")
    print(
        f"peak memory above {token_bytes / 1e6:,.0f} MB of token arrays: "
        f"{traced / 1e6:,.0f} MB traced, {rss_growth / 1e6:,.0f} MB resident"
    )
    print(json.dumps(result))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="prompts to make (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1000, help="tokens of each, at least 10 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", help="plan the prompts of this Parquet file instead")
    parser.add_argument("--column", default="prompt", help="its text column (default: %(default)s)")
    parser.add_argument("--model", default="smollm2-135m", help="its tokenizer and shape (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.rows < 1 or args.length < 10:
        parser.error("--rows must be at least 1 and --length at least 10")
    return args


def few_shot_prompts(num_rows: int, length: int, seed: int, vocab_size: int = 49_152) -> list[TokenIds]:
    """60 % of a prompt is its family's (of 50), 25 % its group's (of 40), the rest its own; every tenth a duplicate."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> TokenIds:
        return rng.integers(0, vocab_size, shape, dtype=np.int32)

    num_family, num_group = length * 6 // 10, length // 4
    families, groups = draw(50, num_family), draw(50, 40, num_group)
    rows: list[TokenIds] = []
    for index in range(num_rows):
        if index % 10 == 9:
            rows.append(rows[rng.integers(index)].copy())
            continue
        family, group = rng.integers(50), rng.integers(40)
        own = draw(length - num_family - num_group)
        rows.append(np.concatenate((families[family], groups[family, group], own)))
    return rows


def smollm2_shape() -> DecoderSpec:
    return DecoderSpec(
        architecture="LlamaForCausalLM",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeSpec(kind="default", theta=1e5, dim=64),
        max_position=8192,
        tie_word_embeddings=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        hidden_act="silu",
        sliding_windows=(None,) * 30,
        dtype="bfloat16",
    )


def prompts_of_file(path: str, column: str, model: str) -> tuple[list[TokenIds], DecoderSpec]:
    import pyarrow.parquet as pq

    from batchinfer.models.source import resolve_model

    source = resolve_model(model)
    texts = pq.read_table(path, columns=[column])[column].drop_null().to_pylist()
    return source.tokenizer.encode_batch(texts), source.spec


def time_planning(rows: list[TokenIds], spec: DecoderSpec) -> tuple[dict[str, float], PrefixTree]:
    begin = time.perf_counter()
    tree = build_prefix_tree(rows)
    tree_end = time.perf_counter()
    execution_order(tree, "prefix")
    order_end = time.perf_counter()
    plan_job(tree, spec, dtype_bytes=2, max_tokens=MAX_TOKENS)
    cost_end = time.perf_counter()
    times = {"tree_s": tree_end - begin, "order_s": order_end - tree_end, "cost_s": cost_end - order_end}
    return {name: round(seconds, 4) for name, seconds in times.items()}, tree


def peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_traced_bytes(rows: list[TokenIds], spec: DecoderSpec) -> int:
    tracemalloc.start()
    try:
        time_planning(rows, spec)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    main()
