"""What KV in fp8 changes: the same greedy prompts with KV of the weights' dtype and in fp8, on plain torch.

    python recipes/bench/fp8_kv.py data/quickstart.parquet --model smollm2-135m

Each prompt is completed greedily with either. Then every token of prompt and completion (of the run without fp8) is
scored with either, so that both judge the same tokens. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from score_parity import read_texts

from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.kernels.choice import FORCE_VARIABLE
from batchinfer.models.source import resolve_model
from batchinfer.types import SamplingParams

Ids = list[list[int]]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    os.environ[FORCE_VARIABLE] = "torch"  # the same kernels for both
    source, texts = resolve_model(args.model), read_texts(args.texts, args.column, args.rows)
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    outputs: dict[str, Ids] = {}
    scores: dict[str, list[Any]] = {}
    figures: dict[str, Any] = {"dtype": args.dtype, "num_prompts": len(texts), "max_tokens": args.max_tokens}
    for kv_dtype in ("auto", "fp8"):
        began = time.perf_counter()
        config = EngineConfig(dtype=args.dtype, kv_dtype=kv_dtype, device="cpu", threads=args.threads)
        engine = Engine(source, config)
        outputs[kv_dtype] = [list(done[0].token_ids) for done in engine.generate(texts, params)]
        prompts = [engine.prompt(text, params).token_ids.tolist() for text in texts]
        whole = [[*ids, *output] for ids, output in zip(prompts, outputs["auto"], strict=True)]
        scores[kv_dtype] = token_logprobs(engine, whole)
        figures[f"kv_bytes_per_token_{kv_dtype}"] = engine.kv_bytes_per_token
        print(f"{kv_dtype}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    figures |= differences(scores) | equal_tokens(outputs)
    figures["torch"] = torch.__version__
    print(json.dumps(figures))
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", help="Parquet or JSON Lines file")
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder or GGUF file")
    parser.add_argument("--column", help="default: prompt or text")
    parser.add_argument("--rows", type=int, default=32, help="texts, evenly spread over the file")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of weights")
    parser.add_argument("--threads", type=int, help="default: the physical cores")
    return parser.parse_args(argv)


def token_logprobs(engine: Engine, rows: Ids) -> list[Any]:
    """[num_tokens - 1] of each row."""
    params = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=True)
    return [np.array(done[0].prompt_logprobs[1:]) for done in engine.generate(rows, params)]  # type: ignore[index]


def differences(scores: dict[str, list[Any]]) -> dict[str, float]:
    """Nats, over all scored tokens."""
    plain, fp8 = (np.concatenate(scores[kv_dtype]) for kv_dtype in ("auto", "fp8"))
    change = np.abs(plain - fp8)
    return {
        "num_scored_tokens": len(change),
        "logprob_difference_mean": float(change.mean()),
        "logprob_difference_p99": float(np.quantile(change, 0.99)),
        "logprob_difference_max": float(change.max()),
        "mean_logprob_auto": float(plain.mean()),
        "mean_logprob_fp8": float(fp8.mean()),
    }


def equal_tokens(outputs: dict[str, Ids]) -> dict[str, float]:
    """Of greedy runs left to themselves: behind a first other token nearly all are others."""
    equal = np.array(outputs["auto"]) == np.array(outputs["fp8"])
    return {
        "equal_tokens": float(equal.mean()),
        "equal_rows": float(equal.all(axis=1).mean()),
        "equal_first_tokens": float(equal[:, 0].mean()),
        "equal_before_first_difference": float(np.cumprod(equal, axis=1).mean()),
    }


if __name__ == "__main__":
    sys.exit(main())
