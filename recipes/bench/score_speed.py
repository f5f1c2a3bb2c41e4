"""Scoring several continuations of long prompts, beside lm-evaluation-harness and its Hugging Face back end.

    python recipes/bench/score_speed.py prompts.parquet --rows 200 --slices 4 --write docs/performance.md

Each prompt is a context, and every continuation is scored after each of them. The harness reads every pair from its
first token on; batchinfer reads what the pairs have in common once. Both have the same weights, tokenizer, dtype and
threads, in one process. The harness takes its requests in --slices parts, and before each part batchinfer scores all of
them, so that a machine whose speed drifts is fair to both. Tokenizing is part of both times, loading of neither.

Log-likelihoods of both are compared too: a fast wrong answer would not count. Prints a table and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness_peer import load_harness, loglikelihood
from score_parity import read_texts

from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.errors import InputError
from batchinfer.models.source import ModelSource, resolve_model
from batchinfer.planner.prefix_tree import build_prefix_tree
from batchinfer.scoring.result import RowScore

CONTINUATIONS = (" The answer is (A).", " The answer is (B).", " So the answer is yes.", " So the answer is no.")

Pairs = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds."""

    ours_s: list[float]  # of all pairs, once before each slice of theirs
    theirs_s: float  # of all slices together


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        source = resolve_model(args.model)
        prompts = [text.rstrip() for text in read_texts(args.prompts, args.column, args.rows)]
    except (InputError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    pairs = [(prompt, continuation) for prompt in prompts for continuation in args.continuation or CONTINUATIONS]
    engine = Engine(source, EngineConfig(dtype=args.dtype, device="cpu", threads=args.threads))
    harness = load_harness(source, getattr(torch, args.dtype), args.batch_size)
    warm_up(engine, harness, pairs)
    times, ours, theirs = race(engine, harness, pairs, args.slices)
    report(args, source, engine, pairs, times, ours, theirs)
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time scoring beside lm-evaluation-harness.")
    parser.add_argument("prompts", help="Parquet or JSON Lines file")
    parser.add_argument("--column", help="default: prompt or text")
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder or GGUF file")
    parser.add_argument("--rows", type=int, default=200, help="prompts, evenly spread over the file")
    parser.add_argument("--continuation", action="append", help="scored after each prompt; repeatable; default: four")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of both")
    parser.add_argument("--batch-size", type=int, default=16, help="of the harness")
    parser.add_argument("--threads", type=int, help="of both; default: the physical cores")
    parser.add_argument("--slices", type=int, default=4, help="parts of the harness's requests")
    parser.add_argument("--write", type=Path, help="Markdown document whose section score:speed gets the table")
    return parser.parse_args(argv)


def warm_up(engine: Engine, harness: Any, pairs: Pairs) -> None:
    """Both have run once before they are timed."""
    short = [(context[-200:].lstrip(), continuation) for context, continuation in pairs[:4]]
    engine.score(short, bos="never")
    loglikelihood(harness, short)


def race(
    engine: Engine, harness: Any, pairs: Pairs, num_slices: int
) -> tuple[Times, list[RowScore], list[tuple[float, bool]]]:
    """Both on all pairs, in turn."""
    ours_s, theirs_s = [], 0.0
    theirs: list[tuple[float, bool]] = []
    prompts = list(dict.fromkeys(context for context, _ in pairs))
    size = -(-len(prompts) // num_slices)
    for begin in range(0, len(prompts), size):
        inside = set(prompts[begin : begin + size])
        part = [pair for pair in pairs if pair[0] in inside]
        started = time.perf_counter()
        ours = engine.score(pairs, bos="never")
        ours_s.append(time.perf_counter() - started)
        started = time.perf_counter()
        theirs += loglikelihood(harness, part)
        theirs_s += time.perf_counter() - started
        print(
            f"ours: {len(pairs):,} pairs in {ours_s[-1]:.1f} s · lm-eval: {len(theirs):,} so far in {theirs_s:.1f} s",
            flush=True,
        )
    return Times(ours_s, theirs_s), ours, theirs


def report(
    args: argparse.Namespace,
    source: ModelSource,
    engine: Engine,
    pairs: Pairs,
    times: Times,
    ours: list[RowScore],
    theirs: list[tuple[float, bool]],
) -> None:
    import lm_eval

    texts = [context + continuation for context, continuation in pairs]
    whole = source.tokenizer.encode_batch(texts, add_special_tokens=False)
    tree = build_prefix_tree([ids[:-1] for ids in whole])
    apart = [abs(-(one.nll or 0.0) - nll) / one.num_scored_tokens for one, (nll, _) in zip(ours, theirs, strict=True)]
    ours_s = statistics.median(times.ours_s)
    result = {
        "num_prompts": len({context for context, _ in pairs}),
        "num_pairs": len(pairs),
        "num_tokens": tree.num_tokens,
        "num_unique_tokens": tree.num_unique_tokens,
        "num_tokens_computed": engine.stats.num_prompt_tokens_computed,
        "ours_s": round(ours_s, 2),
        "ours_each_s": [round(value, 2) for value in times.ours_s],
        "lm_eval_s": round(times.theirs_s, 2),
        "times_as_fast": round(times.theirs_s / ours_s, 2),
        "max_difference_per_token": max(apart),
        "mean_difference_per_token": statistics.fmean(apart),
        "num_greedy_differ": sum(one.is_greedy != greedy for one, (_, greedy) in zip(ours, theirs, strict=True)),
        "dtype": args.dtype,
        "kernels": engine.kernels,
        "threads": torch.get_num_threads(),
        "batch_size": args.batch_size,
        "lm_eval": getattr(lm_eval, "__version__", None),
        "torch": torch.__version__,
    }
    table = [
        "| | batchinfer | lm-eval, Hugging Face |",
        "|---|---:|---:|",
        f"| tokens read | {result['num_tokens_computed']:,} | {result['num_tokens']:,} |",
        f"| seconds | {ours_s:,.1f} | {times.theirs_s:,.1f} |",
        f"| pairs per second | {len(pairs) / ours_s:,.1f} | {len(pairs) / times.theirs_s:,.2f} |",
        f"| tokens of pairs per second | {tree.num_tokens / ours_s:,.0f} | {tree.num_tokens / times.theirs_s:,.0f} |",
        f"| times as fast | {result['times_as_fast']:.1f} | 1 |",
    ]
    print("\n".join(table))
    if args.write is not None:
        import publish

        publish.write_section(args.write, "score:speed", "\n".join(table))
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
