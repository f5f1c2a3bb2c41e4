"""`make sanitize`: builds sanitize.cpp with sanitizers for each instruction set that can run here, and runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from batchinfer.kernels.cpu.build import find_compiler, targets
from batchinfer.kernels.cpu.library import supported_instruction_sets

SOURCE = Path(__file__).parent / "sanitize.cpp"
# -O1 and not more: with checks in every function, -O3 takes the compiler minutes.
FLAGS = ("-std=c++17", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-O1", "-g1")
SANITIZERS = ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all")


def run_one(compiler: str, instruction_set: str, folder: Path) -> str | None:
    """What went wrong."""
    program = folder / instruction_set
    machine = [flag for flag in targets()[instruction_set] if not flag.startswith("-O")]
    command = [compiler, *FLAGS, *machine, *SANITIZERS, str(SOURCE), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        return f"{instruction_set} does not compile:\n{built.stderr}"
    # Several threads even on one core: stacks and thread-local buffers of others are used then.
    environment = os.environ | {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, env=environment)
    print(done.stdout, end="")
    return f"{instruction_set}:\n{done.stderr}" if done.returncode else None


def main() -> int:
    compiler = find_compiler()
    if compiler is None:
        print("sanitize: no C++ compiler", file=sys.stderr)
        return 1
    names = [name for name in supported_instruction_sets() if name in targets()]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        # The portable version takes longest: first.
        found = list(pool.map(lambda name: run_one(compiler, name, Path(folder)), names[::-1]))
    for problem in filter(None, found):
        print(f"sanitize: {problem}", file=sys.stderr)
    return int(any(found))


if __name__ == "__main__":
    sys.exit(main())
