"""Throughput beside other engines, on the same prompts, in turn on the same machine.

    python recipes/bench/throughput.py shared=shared.parquet:64 plain=plain.parquet:128 --rounds 3 \\
        --peer vllm='bench.sh vllm {prompts} {max_tokens} {out} --ignore-eos --warmup 2' --write docs/performance.md

A workload is NAME=PROMPTS.parquet:MAX_TOKENS; the file has columns `id` and `prompt` (text, a chat template already
applied: recipes/bench/workload.py makes such files). A peer is a name and a command, which gets the prompts' path,
the number of tokens and a path for its texts, and prints one JSON line last with `load_s`, `gen_s`, `prompt_tokens`
and `output_tokens`. Ours and the peers run one after the other, round by round, so that a machine whose speed drifts is
fair to all; medians of the ratios are what to quote. Greedy, end of sequence ignored.

The floor is the least time the prompts can take on this machine (see docs/bench.md). Its rates are measured between
the runs, and the best of them count, so an engine's share of it is its floor over its generation time.

Prints a line per run, a Markdown table per workload, and one JSON line last. With --write the tables go to the
document's sections throughput:NAME, a plot of all workloads measured on this machine so far to throughput:plot.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import publish

if TYPE_CHECKING:
    from batchinfer.machine_speed import MachineSpeed
    from batchinfer.planner.cost import JobPlan

OURS = "batchinfer"


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: Path
    max_tokens: int

    @classmethod
    def parse(cls, text: str) -> Workload:
        name, has_name, rest = text.partition("=")
        path, _, max_tokens = rest.rpartition(":")
        if not has_name or not name or not path or not max_tokens.isdecimal() or int(max_tokens) < 1:
            raise SystemExit(f"workload {text!r}: write NAME=PROMPTS.parquet:MAX_TOKENS")
        if not Path(path).is_file():
            raise SystemExit(f"workload {text!r}: there is no file {path}")
        return cls(name, Path(path), int(max_tokens))


@dataclass(frozen=True)
class Peer:
    name: str
    command: str

    @classmethod
    def parse(cls, text: str) -> Peer:
        name, has_command, command = text.partition("=")
        if not has_command or not name or name == OURS or "{prompts}" not in command:
            raise SystemExit(f"--peer {text!r}: write NAME='COMMAND {{prompts}} {{max_tokens}} {{out}}'")
        return cls(name, command)


@dataclass(frozen=True)
class Run:
    """One run of one engine. Seconds."""

    engine: str
    load_s: float  # until the model could run
    gen_s: float  # prompts in to texts out, tokenizing included
    wall_s: float  # of the whole process
    prompt_tokens: int
    output_tokens: int


def run_ours(workload: Workload, model: str, folder: Path, options: Sequence[str]) -> Run:
    command = [publish.BATCHINFER, "run", str(workload.prompts), "--model", model, "--prompt-column", "prompt"]
    command += ["--max-tokens", str(workload.max_tokens), "--temperature", "0", "--ignore-eos"]
    command += ["--output", str(folder / "ours.parquet"), "--overwrite", "--quiet", "--json", *options]
    done = publish.run_process(command)
    summary = json.loads(done.stdout)
    seconds = summary["seconds"]
    load_s = seconds["load"]
    tokens = summary["num_prompt_tokens"], summary["num_output_tokens"]
    return Run(OURS, load_s, sum(seconds.values()) - load_s, done.wall_s, *tokens)


def run_peer(peer: Peer, workload: Workload, folder: Path) -> Run:
    out = folder / f"{peer.name}.jsonl"
    values = {"prompts": workload.prompts, "max_tokens": workload.max_tokens, "out": out}
    # Split first: paths and names may hold spaces.
    done = publish.run_process([part.format(**values) for part in shlex.split(peer.command)])
    line = done.last_json()
    return Run(peer.name, line["load_s"], line["gen_s"], done.wall_s, line["prompt_tokens"], line["output_tokens"])


def plan_of(workload: Workload, model: str) -> JobPlan:
    """What the workload takes at least."""
    from batchinfer.bench.work import plan_of_job
    from batchinfer.settings import job_settings

    flags: dict[str, Any] = {"prompts": str(workload.prompts), "prompt_column": "prompt", "model": model}
    flags |= {"max_tokens": workload.max_tokens, "temperature": 0.0, "ignore_eos": True}
    return plan_of_job(job_settings(flags, {}, None, needs_output=False))


def measure_machine(threads: int | None) -> MachineSpeed:
    import torch

    from batchinfer.doctor import examine_kernels
    from batchinfer.engine.machine import choose_dtype, free_memory_bytes, num_physical_cores
    from batchinfer.machine_speed import measure

    torch.set_num_threads(threads or num_physical_cores())
    dtype = choose_dtype("auto", "bfloat16", torch.device("cpu"))
    kernels = examine_kernels().in_use if dtype == torch.bfloat16 else "torch"
    return measure(kernels, free_memory_bytes(), dtype)


def ratios(rounds: Sequence[Sequence[Run]], peer: str, figure: str) -> list[float]:
    """How many times as long as ours the peer took, round by round."""
    out = []
    for turn in rounds:
        by_name = {run.engine: getattr(run, figure) for run in turn}
        out.append(by_name[peer] / by_name[OURS])
    return out


def report(rounds: Sequence[Sequence[Run]], floor_s: float) -> dict[str, dict[str, Any]]:
    """Of each engine: medians, its ratios to ours, and its share of the floor."""
    out: dict[str, dict[str, Any]] = {}
    for engine in [run.engine for run in rounds[0]]:
        mine = [run for turn in rounds for run in turn if run.engine == engine]
        figures: dict[str, Any] = {
            name: statistics.median(getattr(run, name) for run in mine) for name in ("load_s", "gen_s", "wall_s")
        }
        figures["output_tokens_per_s"] = mine[0].output_tokens / figures["gen_s"]
        figures["share_of_optimum"] = floor_s / figures["gen_s"]
        if engine != OURS:
            for name in ("gen", "wall"):
                each = ratios(rounds, engine, f"{name}_s")
                figures[f"{name}_ratio"] = statistics.median(each)
                figures[f"{name}_ratios"] = each
        out[engine] = {
            name: [round(one, 3) for one in value] if isinstance(value, list) else round(value, 3)
            for name, value in figures.items()
        }
    return out


def table(engines: dict[str, dict[str, Any]]) -> str:
    headers = ["engine", "load s", "generation s", "whole process s", "output tokens/s", "of the optimum"]
    headers += ["generation / ours (each round)", "process / ours (each round)"]
    rows = []
    for engine, of in engines.items():
        cells = [f"{of[name]:.1f}" for name in ("load_s", "gen_s", "wall_s", "output_tokens_per_s")]
        cells.append(f"{100 * of['share_of_optimum']:.0f} %")
        for name in ("gen", "wall"):
            if engine == OURS:
                cells.append("1")
            else:
                each = ", ".join(f"{ratio:.2f}" for ratio in of[f"{name}_ratios"])
                cells.append(f"{of[f'{name}_ratio']:.2f} ({each})")
        rows.append([engine, *cells])
    return publish.markdown_table(headers, rows)


def differing_work(runs: Sequence[Run]) -> str:
    """Says which engines did not run the same number of tokens as ours; empty if all did."""
    ours = next(run for run in runs if run.engine == OURS)
    work = (ours.prompt_tokens, ours.output_tokens)
    others = [
        f"{run.engine} had {run.prompt_tokens:,} prompt tokens and {run.output_tokens:,} output tokens, ours "
        f"{work[0]:,} and {work[1]:,}"
        for run in runs
        if (run.prompt_tokens, run.output_tokens) != work
    ]
    return "; ".join(others)


def section(name: str, result: dict[str, Any]) -> str:
    """What stands in the document."""
    floor = result["floor"]
    parts = ", ".join(f"{part['name']} {part['floor_s']:.1f} s" for part in floor["parts"])
    not_equal = f" Not the same work: {result['differing_work']}." if result["differing_work"] else ""
    return f"""**{name}**: {result["num_rows"]:,} prompts, {result["num_prompt_tokens"]:,} tokens \
({result["num_unique_prompt_tokens"]:,} unique), {result["max_tokens"]} output tokens each. \
Medians of {result["num_rounds"]} interleaved rounds.

{table(result["engines"])}

The optimum: {floor["seconds"]:.1f} s ({parts}), at {floor["flops_per_s"] / 1e12:.2f} TFLOP/s and \
{floor["bytes_per_s"] / 1e9:.0f} GB/s. Machine: {result["machine"]}. Commit {result["commit"]}.{not_equal}"""


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Generation seconds of each engine on each workload, and the floor as a line across."""
    figure = publish.new_figure(width=2.5 + 2.5 * len(results))
    axes = figure.subplots(1, len(results), squeeze=False)[0]
    for axis, (name, result) in zip(axes, results.items(), strict=True):
        engines = result["engines"]
        seconds = [of["gen_s"] for of in engines.values()]
        colors = ["tab:blue" if engine == OURS else "tab:gray" for engine in engines]
        bars = axis.bar(list(engines), seconds, color=colors)
        axis.bar_label(bars, [f"{value:.1f}" for value in seconds])
        axis.axhline(result["floor"]["seconds"], color="black", linestyle="--", label="least possible")
        axis.set_title(f"{name}\n{result['num_rows']} prompts, {result['max_tokens']} tokens each", fontsize=10)
        axis.tick_params(axis="x", labelrotation=20)
        axis.set_ylabel("generation, s")
    axes[0].legend(fontsize=8)
    publish.save_plot(figure, path)


def write(document: Path, results: dict[str, dict[str, Any]]) -> None:
    """The sections of these workloads, and the plot of all that were measured on this machine."""
    store = publish.beside(document, "throughput.json")
    known = json.loads(store.read_text(encoding="utf-8")) if store.exists() else {}
    known.update(results)
    publish.save_json(store, known)
    for name, result in results.items():
        publish.write_section(document, f"throughput:{name}", section(name, result))
    machine = next(iter(results.values()))["machine"]
    here = {name: result for name, result in known.items() if result["machine"] == machine}
    plot = publish.beside(document, "throughput.svg")
    draw(here, plot)
    text = f"Generation time of {', '.join(here)}"
    publish.write_section(document, "throughput:plot", publish.picture(document, plot, text))


def measure(
    workloads: Sequence[Workload], peers: Sequence[Peer], args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Results by workload."""
    import pyarrow.parquet as pq

    from batchinfer.bench.floor import floor_of

    plans = {workload.name: plan_of(workload, args.model) for workload in workloads}  # refuses bad files first
    options = [*args.option, *([f"--threads={args.threads}"] if args.threads else [])]
    rounds: dict[str, list[list[Run]]] = {workload.name: [] for workload in workloads}
    speed = measure_machine(args.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for turn in range(args.rounds):
            for workload in workloads:
                done = [run_ours(workload, args.model, folder, options)]
                done += [run_peer(peer, workload, folder) for peer in peers]
                for run in done:
                    print(f"round {turn + 1}, {workload.name}: {run}", flush=True)
                rounds[workload.name].append(done)
                speed = speed.best_with(measure_machine(args.threads))
    where = {"machine": publish.describe_machine(), "commit": publish.commit(), "num_rounds": args.rounds}
    results = {}
    for workload in workloads:
        plan, runs = plans[workload.name], rounds[workload.name]
        floor = floor_of(plan.with_sharing, speed)
        results[workload.name] = {
            "num_rows": pq.read_metadata(workload.prompts).num_rows,
            "num_prompt_tokens": runs[0][0].prompt_tokens,
            "num_unique_prompt_tokens": plan.num_unique_prompt_tokens,
            "max_tokens": workload.max_tokens,
            "engines": report(runs, floor.seconds),
            "floor": floor.to_dict(),
            "differing_work": differing_work(runs[0]),
            "runs": [[asdict(run) for run in turn] for turn in runs],
            **where,
        }
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="+", metavar="NAME=PROMPTS.parquet:MAX_TOKENS")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of ours; default: the physical cores")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--option", action="append", default=[], help="passed on to batchinfer run; repeatable")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT.md")
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    workloads, peers = [Workload.parse(text) for text in args.workload], [Peer.parse(text) for text in args.peer]
    if args.write:
        publish.check_document(args.write)
    results = measure(workloads, peers, args)
    for name, result in results.items():
        print(f"\n{section(name, result)}")
    if args.write:
        write(args.write, results)
    print(json.dumps(results, allow_nan=False))


if __name__ == "__main__":
    main()
