"""Throughput beside other engines, on the same prompts, in turn on the same machine.

    python recipes/bench/throughput.py PROMPTS.parquet --max-tokens 64 --rounds 3 \\
        --peer vllm='bench.sh vllm {prompts} {max_tokens} {out} --ignore-eos --warmup 2'

PROMPTS has columns `id` and `prompt` (text, a chat template already applied). A peer is a name and a command, which
gets the prompts' path, the number of tokens and a path for its texts, and prints one JSON line last with `load_s`,
`gen_s`, `prompt_tokens` and `output_tokens`. Ours and the peers run one after the other, round by round, so that a
machine whose speed drifts is fair to all; medians of the ratios are what to quote. Greedy, end of sequence ignored.

Prints a line per run, a Markdown table, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

OURS = "batchinfer"


@dataclass(frozen=True)
class Run:
    """One run of one engine. Seconds."""

    engine: str
    load_s: float  # until the model could run
    gen_s: float  # prompts in to texts out, tokenizing included
    wall_s: float  # of the whole process
    output_tokens: int


def run_process(command: list[str]) -> tuple[str, float]:
    """Standard output, and the seconds of the whole process."""
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wall_s = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\nfailed with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout, wall_s


def run_ours(prompts: Path, max_tokens: int, model: str, folder: Path, options: list[str]) -> Run:
    command = [str(Path(sys.executable).with_name("batchinfer")), "run", str(prompts), "--model", model]
    command += ["--prompt-column", "prompt", "--max-tokens", str(max_tokens), "--temperature", "0", "--ignore-eos"]
    command += ["--output", str(folder / "ours.parquet"), "--overwrite", "--quiet", "--json", *options]
    printed, wall_s = run_process(command)
    summary = json.loads(printed)
    seconds = summary["seconds"]
    load_s = seconds["load"]
    return Run(OURS, load_s, sum(seconds.values()) - load_s, wall_s, summary["num_output_tokens"])


def run_peer(name: str, command: str, prompts: Path, max_tokens: int, folder: Path) -> Run:
    filled = command.format(prompts=prompts, max_tokens=max_tokens, out=folder / f"{name}.jsonl")
    printed, wall_s = run_process(shlex.split(filled))
    line = json.loads(printed.strip().splitlines()[-1])
    return Run(name, line["load_s"], line["gen_s"], wall_s, line["output_tokens"])


def ratios(runs: list[list[Run]], peer: str, figure: str) -> list[float]:
    """How many times as long as ours the peer took, round by round."""
    out = []
    for turn in runs:
        by_name = {run.engine: getattr(run, figure) for run in turn}
        out.append(by_name[peer] / by_name[OURS])
    return out


def report(runs: list[list[Run]]) -> dict:
    """Medians of each engine and of its ratios to ours."""
    engines = [run.engine for run in runs[0]]
    out: dict[str, dict[str, float]] = {}
    for engine in engines:
        mine = [run for turn in runs for run in turn if run.engine == engine]
        figures = {
            name: statistics.median(getattr(run, name) for run in mine) for name in ("load_s", "gen_s", "wall_s")
        }
        figures["output_tokens_per_s"] = mine[0].output_tokens / figures["gen_s"]
        if engine != OURS:
            figures["gen_ratio"] = statistics.median(ratios(runs, engine, "gen_s"))
            figures["wall_ratio"] = statistics.median(ratios(runs, engine, "wall_s"))
        out[engine] = {name: round(value, 3) for name, value in figures.items()}
    return out


def table(figures: dict) -> str:
    lines = [
        "| engine | load s | generation s | whole process s | output tokens/s | generation / ours | process / ours |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for engine, of in figures.items():
        cells = [f"{of[name]:.1f}" for name in ("load_s", "gen_s", "wall_s", "output_tokens_per_s")]
        cells += [f"{of[name]:.2f}" if name in of else "1" for name in ("gen_ratio", "wall_ratio")]
        lines.append(f"| {engine} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--option", action="append", default=[], help="passed on to batchinfer run; repeatable")
    args = parser.parse_args(arguments)
    peers = [peer.split("=", 1) for peer in args.peer]
    runs: list[list[Run]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for turn in range(args.rounds):
            done = [run_ours(args.prompts, args.max_tokens, args.model, folder, args.option)]
            done += [run_peer(peer, command, args.prompts, args.max_tokens, folder) for peer, command in peers]
            for run in done:
                print(f"round {turn + 1}: {run}", flush=True)
            runs.append(done)
    figures = report(runs)
    print(table(figures))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
