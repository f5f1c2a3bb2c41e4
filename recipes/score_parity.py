"""Log-likelihoods of batchinfer beside those of lm-evaluation-harness and its Hugging Face back end, on the same texts.

    python recipes/score_parity.py data/quickstart.parquet --model smollm2-135m --rows 8

Each text is scored in two ways: *rolling*, the whole text after a prefix token (BOS, else EOS), in windows of
--window tokens where it is longer; and as *continuations*: its first part is the context, and its own rest and the
rests of three other texts are scored after it. Contexts end where a word ends, without whitespace, so both sides
tokenize alike.

Prints a table. The exit code is 1 if a log-likelihood differs by more than --tolerance nats per token, or if the two
do not agree on whether a continuation is greedy. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import torch
from harness_peer import load_harness, loglikelihood, rolling

from batchinfer.config import EngineConfig
from batchinfer.dataset.columns import find_columns
from batchinfer.dataset.source import open_source
from batchinfer.engine.engine import Engine
from batchinfer.errors import InputError
from batchinfer.models.source import ModelSource, resolve_model


@dataclass(frozen=True, slots=True)
class Compared:
    """One text, or one continuation."""

    kind: str
    row: int
    num_tokens: int
    ours: float  # nats
    theirs: float
    is_greedy: bool | None = None  # of continuations
    is_greedy_theirs: bool | None = None

    @property
    def per_token(self) -> float:
        return abs(self.ours - self.theirs) / max(1, self.num_tokens)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        source = resolve_model(args.model)
        texts = read_texts(args.texts, args.column, args.rows)
    except (InputError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    dtype = getattr(torch, args.dtype)
    config = EngineConfig(dtype=args.dtype, device="cpu", threads=args.threads)
    began = time.perf_counter()
    engine = Engine(source, config)
    window = min(args.window or engine.max_model_len, engine.max_model_len)
    harness = load_harness(source, dtype, args.batch_size, window)
    print(f"both loaded in {time.perf_counter() - began:.0f} s, {torch.get_num_threads()} threads", flush=True)
    rows = compare_rolling(engine, harness, texts, window)
    rows += compare_continuations(engine, harness, continuations(texts), window)
    return report(rows, args.tolerance, source)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare log-likelihoods with lm-evaluation-harness.")
    parser.add_argument("texts", help="Parquet or JSON Lines file")
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder or GGUF file")
    parser.add_argument("--column", help="default: prompt or text")
    parser.add_argument("--rows", type=int, default=8, help="texts, evenly spread over the file")
    parser.add_argument("--window", type=int, help="tokens read at once; default: the model's context")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of both")
    parser.add_argument("--batch-size", type=int, default=4, help="of the harness")
    parser.add_argument("--threads", type=int, help="of both; default: the physical cores")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="nats per token")
    return parser.parse_args(argv)


def read_texts(path: str, column: str | None, num_rows: int) -> list[str]:
    """Texts of rows 0, k, 2 k, ... of the file."""
    source = open_source(path)
    name = find_columns(source.schema, prompt=column).prompt
    if name is None:
        raise InputError(f"{path}: name a column of text with --column")
    texts = [text for text in pa.concat_tables(source.windows()).column(name).to_pylist() if text and text.strip()]
    step = max(1, len(texts) // num_rows)
    return texts[::step][:num_rows]


def continuations(texts: Sequence[str]) -> list[tuple[int, str, str]]:
    """(row, context, continuation): each text's beginning with its own rest and those of the next three texts."""
    halves = [split(text) for text in texts]
    found = []
    for row, (context, _) in enumerate(halves):
        rests = dict.fromkeys(halves[(row + shift) % len(halves)][1] for shift in range(4))
        found += [(row, context, rest) for rest in rests if context and rest]
    return found


def split(text: str, part: float = 0.7) -> tuple[str, str]:
    """At the end of a word behind 70 % of the text: the whitespace that follows it begins the rest."""
    place = next((match.start() for match in re.finditer(r"(?<=\S)\s", text) if match.start() >= part * len(text)), 0)
    return text[:place], text[place:].rstrip()


def compare_rolling(engine: Engine, harness: Any, texts: Sequence[str], window: int) -> list[Compared]:
    prefix = [harness.prefix_token_id]
    ids = engine.tokenizer.encode_batch(list(texts), add_special_tokens=False)
    ours = engine.score([(prefix, one) for one in ids], window=window)
    theirs = rolling(harness, texts)
    rows = []
    for row, (one, nll) in enumerate(zip(ours, theirs, strict=True)):
        if one.nll is None:
            raise RuntimeError(f"text {row}: {one.error}")
        rows.append(Compared("rolling", row, one.num_scored_tokens, -one.nll, nll))
    return rows


def compare_continuations(
    engine: Engine, harness: Any, pairs: Sequence[tuple[int, str, str]], window: int
) -> list[Compared]:
    """Of long contexts the end is kept, by both. The harness takes no continuation longer than its window."""
    rests = engine.tokenizer.encode_batch([continuation for _, _, continuation in pairs], add_special_tokens=False)
    pairs = [pair for pair, ids in zip(pairs, rests, strict=True) if len(ids) <= window]
    inputs = [(context, continuation) for _, context, continuation in pairs]
    ours, theirs = engine.score(inputs, bos="never", window=window), loglikelihood(harness, inputs)
    rows = []
    for (row, _, _), one, (nll, is_greedy) in zip(pairs, ours, theirs, strict=True):
        if one.nll is None:
            raise RuntimeError(f"a continuation of text {row}: {one.error}")
        rows.append(Compared("continuation", row, one.num_scored_tokens, -one.nll, nll, one.is_greedy, is_greedy))
    return rows


def report(rows: Sequence[Compared], tolerance: float, source: ModelSource) -> int:
    """Print what was found; the exit code."""
    import lm_eval

    print("| kind | row | tokens | batchinfer | lm-eval | difference | per token |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        difference = row.ours - row.theirs
        print(
            f"| {row.kind} | {row.row} | {row.num_tokens:,} | {row.ours:,.4f} | {row.theirs:,.4f} "
            f"| {difference:+.1e} | {row.per_token:.1e} |"
        )
    num_greedy_differ = sum(row.is_greedy != row.is_greedy_theirs for row in rows)
    worst = max(rows, key=lambda row: row.per_token)
    result = {
        "num_rolling": sum(row.kind == "rolling" for row in rows),
        "num_continuations": sum(row.kind == "continuation" for row in rows),
        "num_tokens": sum(row.num_tokens for row in rows),
        "max_difference_per_token": worst.per_token,
        "max_difference": max(abs(row.ours - row.theirs) for row in rows),
        "num_greedy_differ": num_greedy_differ,
        "worst": asdict(worst),
        "tolerance": tolerance,
        "model": source.name,
        "lm_eval": getattr(lm_eval, "__version__", None),
        "torch": torch.__version__,
    }
    print(json.dumps(result))
    return 1 if worst.per_token > tolerance or num_greedy_differ else 0


if __name__ == "__main__":
    sys.exit(main())
