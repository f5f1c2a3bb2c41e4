"""Is it right on this GPU, and how fast? One command, under six minutes, nothing to download.

    python recipes/gpu_check.py             # on a machine with a GPU; the checkout need not be installed
    python recipes/gpu_check.py --dry-run   # anywhere: tiny sizes, Triton's interpreter; the figures mean nothing

Each part is a process of its own (recipes/gpu/), so that one that crashes, hangs or spoils the GPU's context takes
nothing along; what it had written by then counts. docs/performance-gpu.md says what the parts measure. The last line
of stdout is one JSON object; the exit code is 0 whatever failed, and `passed` in the JSON says the rest.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "gpu"
#: Of the whole check.
LIMIT_S = 345.0
#: What a part needs before there is any use in starting it.
LEAST_S = 5.0
#: Characters of a part's stderr that are kept when it fails.
TAIL = 800
PACKAGES = ("torch", "triton", "transformers", "numpy")


@dataclass(frozen=True, slots=True)
class Part:
    script: str
    limit_s: float
    is_timed: bool = True  # it runs alone; the others, which mostly compile kernels, run at the same time


#: What is right before how fast, what is asked for most before the rest.
PARTS = {
    "kernels": Part("gpu_kernels.py", 110, is_timed=False),
    "invariance": Part("gpu_invariance.py", 110, is_timed=False),
    "rates": Part("gpu_rates.py", 25),
    "model": Part("gpu_model.py", 80),
    "shared": Part("gpu_shared.py", 45),
    "deterministic": Part("gpu_deterministic.py", 50),
    "fp8": Part("gpu_fp8.py", 60),
    "peer": Part("gpu_peer.py", 80),
    "times": Part("gpu_times.py", 60),
}


@dataclass(slots=True)
class Outcome:
    """passed; failed (it found problems or ended with an error); timed out; not run."""

    status: str
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    stderr: str = ""  # the end of it, unless the part passed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, interpreted on the CPU")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"which, separated by commas: {', '.join(PARTS)}")
    parser.add_argument("--output", type=Path, help="write the JSON object to this file too")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for all parts together")
    args = parser.parse_args(arguments)
    names = args.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    began = time.monotonic()
    chip = None if args.dry_run else find_chip()
    outcomes: dict[str, Outcome] = {}

    def run(name: str) -> None:
        left_s = args.limit_s - (time.monotonic() - began)
        if chip is None and not args.dry_run:
            outcomes[name] = Outcome("not run", problems=["torch finds no GPU here; --dry-run needs none"])
        elif left_s < LEAST_S:
            outcomes[name] = Outcome("not run", problems=["no time was left"])
        else:
            outcomes[name] = run_part(PARTS[name], min(PARTS[name].limit_s, left_s), dry_run=args.dry_run)
        lines = [f"{name}: {outcomes[name].status}, {outcomes[name].seconds:.1f} s", *outcomes[name].problems]
        print("\n  ".join(lines), flush=True)

    together = [name for name in names if not PARTS[name].is_timed]
    with ThreadPoolExecutor(max(1, len(together))) as pool:
        list(pool.map(run, together))
    for name in names:
        if PARTS[name].is_timed:
            run(name)
    result = {
        "passed": all(outcome.status == "passed" for outcome in outcomes.values()),
        "dry_run": args.dry_run,
        "chip": chip,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "seconds": round(time.monotonic() - began, 1),
        "parts": {name: asdict(outcomes[name]) for name in names},
    }
    text = json.dumps(_strict(result), allow_nan=False)
    if args.output is not None:
        args.output.write_text(text + "\n")
    print(text)
    return 0


def run_part(part: Part, limit_s: float, *, dry_run: bool) -> Outcome:
    """The part in a process of its own, ended when its time is over."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        report, log = Path(folder) / "report.json", Path(folder) / "stderr"
        command = [sys.executable, str(FOLDER / part.script), str(report), *(["--dry-run"] if dry_run else [])]
        began = time.monotonic()
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr, start_new_session=True
            )
            try:
                code: int | None = process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        values = json.loads(report.read_text()) if report.exists() else {}
        text = log.read_bytes().decode(errors="replace")
    problems = values.pop("problems", [])
    if code is None:
        problems.append(f"not done after {limit_s:.0f} s")
    elif code != 0:
        problems.append(f"ended with code {code}")
    status = "timed out" if code is None else "failed" if problems else "passed"
    seconds = round(time.monotonic() - began, 1)
    return Outcome(status, seconds, problems, values, "" if status == "passed" else text[-TAIL:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process, if it runs still, and the compilers that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def find_chip() -> dict[str, Any] | None:
    """The first GPU, asked for in another process: this one holds no memory of it. None: there is none."""
    script = (
        "import json, torch; p = torch.cuda.get_device_properties(0); "
        "print(json.dumps({'name': p.name, 'memory_bytes': p.total_memory, "
        "'capability': [p.major, p.minor], 'processors': p.multi_processor_count, "
        "'cuda': torch.version.cuda, 'hip': torch.version.hip}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 and done.stdout.strip() else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _strict(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_strict(one) for one in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


if __name__ == "__main__":
    sys.exit(main())
