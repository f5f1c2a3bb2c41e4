"""What a busy neighbour costs: generation time alone, and with another process that always computes on one core.

    python recipes/bench/neighbour.py PROMPTS.parquet --max-tokens 64 --limit 64 --rounds 3 --write docs/performance.md

All cores of the affinity mask are used. The system gives the neighbour half of its core, so of C cores C - 1/2 are
left, and the fair ideal is C / (C - 1/2) times as long: 4/3 on two cores. Threads that wait for each other by
spinning, or work that is dealt out in equal parts beforehand, cost more. Alone and with the neighbour are run in
turn; ratios are taken within rounds.

Prints a Markdown table and one JSON line last. With --write the table goes to the document's section neighbour.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import publish

# It ends by itself when its standard input does: with the recipe, however that ends.
_COMPUTE = """
import os, sys, threading
os.sched_setaffinity(0, {int(sys.argv[1])})
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
print("ready", flush=True)
while True:
    pass
"""


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parse(arguments)
    if args.write:
        publish.check_document(args.write)
    cores = sorted(os.sched_getaffinity(0))
    threads = args.threads or len(cores)
    alone: list[float] = []
    beside: list[float] = []
    for turn in range(args.rounds):
        alone.append(generation_s(args, threads))
        with neighbour(cores[0]):
            beside.append(generation_s(args, threads))
        print(f"round {turn + 1}: alone {alone[-1]:.2f} s, with a neighbour {beside[-1]:.2f} s", flush=True)
    result = summary(alone, beside, len(cores), threads)
    result |= {"machine": publish.describe_machine(), "commit": publish.commit()}
    text = section(result, args)
    print(f"\n{text}")
    if args.write:
        publish.write_section(args.write, "neighbour", text)
    print(json.dumps(result, allow_nan=False))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--limit", type=int, default=64, help="rows; default: %(default)s")
    parser.add_argument("--threads", type=int, help="default: the CPUs of the affinity mask")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--option", action="append", default=[], help="passed on to batchinfer bench; repeatable")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT.md")
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if not hasattr(os, "sched_setaffinity"):
        parser.error("this system cannot pin a process to a core")
    return args


def generation_s(args: argparse.Namespace, threads: int) -> float:
    options = ["--limit", str(args.limit), "--max-tokens", str(args.max_tokens), "--threads", str(threads)]
    return float(publish.bench(args.prompts, args.model, *options, *args.option)["generation_s"])


@contextmanager
def neighbour(core: int) -> Iterator[subprocess.Popen[str]]:
    """A process that computes on `core` until the block ends."""
    command = [sys.executable, "-c", _COMPUTE, str(core)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()  # it is there
            yield process
        finally:
            process.kill()


def fair_ratio(num_cores: int) -> float:
    """Of times, when the neighbour gets half of one core and nothing else is lost."""
    return num_cores / (num_cores - 0.5)


def summary(alone: Sequence[float], beside: Sequence[float], num_cores: int, threads: int) -> dict[str, Any]:
    each = [busy / quiet for quiet, busy in zip(alone, beside, strict=True)]
    return {
        "alone_s": list(alone),
        "with_neighbour_s": list(beside),
        "ratios": each,
        "ratio": statistics.median(each),
        "fair_ratio": fair_ratio(num_cores),
        "num_cores": num_cores,
        "threads": threads,
    }


def section(result: dict[str, Any], args: argparse.Namespace) -> str:
    headers = ["alone s", "with a neighbour s", "ratio (each round)", "fair ideal"]
    each = ", ".join(f"{ratio:.2f}" for ratio in result["ratios"])
    cells = [publish.spread(result["alone_s"]), publish.spread(result["with_neighbour_s"])]
    cells += [f"{result['ratio']:.2f} ({each})", f"{result['fair_ratio']:.2f}"]
    return f"""**A busy neighbour**: {args.limit} prompts, {args.max_tokens} output tokens each, {result["threads"]} \
threads on {result["num_cores"]} cores; the neighbour is a process that always computes, on one of them.

{publish.markdown_table(headers, [cells])}

Machine: {result["machine"]}. Commit {result["commit"]}."""


if __name__ == "__main__":
    main()
