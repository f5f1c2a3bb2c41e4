"""kill -9 at random moments of real runs, continued each time; the outputs must equal an uninterrupted run's.

    python recipes/kill_sweep.py --moments 100

One run goes through first, for the values and the time it takes. Then a job is started, killed after a random time,
started again and so on until it is done, and compared; and so are further jobs until there were as many kills as
asked for. Every column must be equal, the sampled tokens, log-probabilities and counts of reused tokens among them.

Each process also writes down when each completion ended, so that what a kill loses is known: the completions that
neither a part nor a journal holds. They may be as old as --flush-seconds and the steps that ran meanwhile.

Prints one line for each kill and one JSON object last; ends with 1 if an output differs or a kill lost more.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

_TOPICS = ("the sea", "a small town", "winter", "an old clock", "bread", "the moon", "a long train ride", "bees")

# The command, with a note of each completion: row, sample, time. What was handed to the system survives a kill.
_CHILD = """
import os, sys, time
from batchinfer.cli.main import app
from batchinfer.engine.engine import Engine

log = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
run_windows = Engine.run_windows

def noted(self, windows, on_step=None):
    last = time.time()
    def step(stats):
        nonlocal last
        now = time.time()
        os.write(log, f"step {now - last}\\n".encode())
        last = now
        if on_step is not None:
            on_step(stats)
    for completion in run_windows(self, windows, step):
        os.write(log, f"{completion.row_index} {completion.sample_index} {time.time()}\\n".encode())
        yield completion

Engine.run_windows = noted
app()
"""


@dataclass
class Sweep:
    """What the kills came to."""

    num_kills: int = 0
    num_jobs: int = 0
    num_lost: list[int] = field(default_factory=list)  # completions, by kill
    lost_s: list[float] = field(default_factory=list)  # age of the oldest lost completion, beyond the longest step
    problems: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    with tempfile.TemporaryDirectory(prefix="kill-sweep-") as name:
        folder = Path(name)
        prompts = folder / "prompts.parquet"
        write_prompts(prompts, args.rows)
        began = time.monotonic()
        run(args, prompts, folder / "whole.parquet", folder / "whole.log")
        whole_s = time.monotonic() - began
        print(f"uninterrupted: {whole_s:.1f} s", flush=True)
        expected = pq.read_table(folder / "whole.parquet")
        sweep = Sweep()
        draw = random.Random(args.seed)
        while sweep.num_kills < args.moments:
            name = f"{sweep.num_jobs}" if sweep.num_jobs % 2 else f"{sweep.num_jobs}.parquet"
            kill_until_done(args, sweep, prompts, folder / name, draw, whole_s)
            if not pq.read_table(folder / name).equals(expected):
                sweep.problems.append(f"job {sweep.num_jobs}: other values than the uninterrupted run's")
            sweep.num_jobs += 1
    report = {
        "num_kills": sweep.num_kills,
        "num_jobs": sweep.num_jobs,
        "num_rows": args.rows,
        "flush_seconds": args.flush_seconds,
        "uninterrupted_s": round(whole_s, 2),
        "most_lost_completions": max(sweep.num_lost, default=0),
        "mean_lost_completions": round(sum(sweep.num_lost) / max(1, len(sweep.num_lost)), 2),
        "oldest_lost_s": round(max(sweep.lost_s, default=0.0), 3),
        "problems": sweep.problems,
    }
    print(json.dumps(report, allow_nan=False))
    return 1 if sweep.problems else 0


def write_prompts(path: Path, num_rows: int) -> None:
    """Some share a beginning, some are equal, one is null."""
    texts = [
        None
        if row == 5
        else f"Write one sentence about {_TOPICS[row % len(_TOPICS)]}{', number ' + str(row) if row % 3 else ''}."
        for row in range(num_rows)
    ]
    pq.write_table(pa.table({"id": [f"r{row}" for row in range(num_rows)], "prompt": texts}), path)


def run(
    args: argparse.Namespace, prompts: Path, output: Path, log: Path, kill_after_s: float | None = None
) -> float | None:
    """When it was killed; None if it came to its end before. Raises SystemExit if it failed."""
    options = {
        "--model": args.model,
        "--output": output,
        "--max-tokens": args.max_tokens,
        "--temperature": 0.9,
        "--seed": 7,
        "--n": 2,
        "--logprobs": 2,
        "--window": args.window,
        "--flush-seconds": args.flush_seconds,
    }
    words = [str(word) for pair in options.items() for word in pair]
    command = [sys.executable, "-c", _CHILD, str(log), "run", str(prompts), *words, *args.option, "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = process.communicate(timeout=kill_after_s)
    except subprocess.TimeoutExpired:
        killed_s = time.time()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return killed_s
    if process.returncode:
        raise SystemExit(f"the run failed with {process.returncode}:\n{errors[-2000:]}")
    return None


def kill_until_done(
    args: argparse.Namespace, sweep: Sweep, prompts: Path, output: Path, draw: random.Random, whole_s: float
) -> None:
    """Loading counts towards the time, so that kills come there too; few enough that the job comes to its end."""
    log = output.with_name(f"{output.name}.log")
    while True:
        longest_s = whole_s if sweep.num_kills < args.moments else None
        killed_s = run(args, prompts, output, log, draw.uniform(0.0, longest_s) if longest_s else None)
        if killed_s is None:
            return
        sweep.num_kills += 1
        lost, age_s = lost_work(output, log, killed_s)
        sweep.num_lost.append(lost)
        sweep.lost_s.append(age_s)
        if age_s > args.flush_seconds:
            sweep.problems.append(f"kill {sweep.num_kills}: lost a completion that was {age_s:.2f} s old")
        print(f"kill {sweep.num_kills}: lost {lost} completions, the oldest {age_s:.2f} s beyond a step", flush=True)
        log.unlink(missing_ok=True)


def lost_work(output: Path, log: Path, killed_s: float) -> tuple[int, float]:
    """Completions of the killed process that are not on the disk, and the age of the oldest less the longest step."""
    if not log.exists():
        return 0, 0.0
    ended, longest_step_s = {}, 0.0
    for line in log.read_text().splitlines():
        words = line.split()
        if words[0] == "step":
            longest_step_s = max(longest_step_s, float(words[1]))
        else:
            ended[int(words[0]), int(words[1])] = float(words[2])
    lost = set(ended) - kept_completions(output)
    age_s = max((killed_s - ended[one] for one in lost), default=0.0)
    return len(lost), max(0.0, age_s - longest_step_s)


def kept_completions(output: Path) -> set[tuple[int, int]]:
    """(row, sample) of parts and journals, read without changing anything."""
    from batchinfer.output.journal import read_journal
    from batchinfer.output.journaled import JournaledResults
    from batchinfer.output.manifest import load_manifest
    from batchinfer.output.place import JobPlace

    place = JobPlace.of(output)
    if place.kind == "file" and output.exists():
        parts = [(output, 0)]
    else:
        manifest = load_manifest(place.manifest)
        if manifest is None:
            return set()
        parts = [(place.parts / part.file, manifest.first_row(window)) for window, part in manifest.parts.items()]
    kept: set[tuple[int, int]] = set()
    for path, first_row in parts:
        row = first_row - 1
        for sample in pq.read_table(path, columns=["sample_index"]).column("sample_index").to_pylist():
            row += sample == 0
            kept.add((row, sample))
    for path in place.state.glob("journal-*.bin"):
        results = JournaledResults(read_journal(path).batches)
        kept |= set(zip(results.rows.tolist(), results.samples.tolist(), strict=True))
    return kept


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--moments", type=int, default=100, help="kills")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--flush-seconds", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("option", nargs="*", help="further options of batchinfer run, behind --")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(main())
