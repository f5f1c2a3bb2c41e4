"""Compiles the kernels, once for each instruction set. Used when the package is built; see setup.py.

python kernels/cpu/build.py [FOLDER]
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).parent / "src" / "kernels.cpp"
#: No contraction of a * b + c outside of explicit fma: the loops that must agree would round differently.
COMMON_FLAGS = ("-std=c++17", "-fopenmp", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno")
X86_FLAGS = {
    "avx512_bf16": ("-O3", "-march=x86-64-v4", "-mavx512bf16"),
    "avx2": ("-O3", "-mavx2", "-mfma"),
    "portable": ("-O3",),
}


#: Instruction sets to build, separated by commas, or "none"; not set: all.
CHOOSE_VARIABLE = "BATCHINFER_BUILD_KERNELS"


def targets() -> dict[str, tuple[str, ...]]:
    """Flags by instruction set, of those that the compiler's machine knows and the variable allows."""
    if platform.machine() in ("x86_64", "AMD64"):
        known = X86_FLAGS
    else:
        known = {"portable": ("-O3", "-mcpu=native") if platform.machine() == "aarch64" else ("-O3",)}
    chosen = os.environ.get(CHOOSE_VARIABLE)
    return {name: flags for name, flags in known.items() if chosen is None or name in chosen.split(",")}


def sources_digest() -> str:
    """Of everything a library is made from. It is compiled in, so that one from other sources is not used."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCE.parent.glob("*.h"), *SOURCE.parent.glob("*.cpp")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> str | None:
    named = os.environ.get("CXX")
    return shutil.which(named) if named else shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


def build(folder: Path) -> list[str]:
    """Compile every target into `folder`; returns what failed or why nothing was built, a line each."""
    chosen, compiler = targets(), find_compiler()
    if not chosen:
        return []
    if compiler is None:
        return ["no C++ compiler (g++ or clang++) was found: the kernels were not built, plain torch is used"]
    folder.mkdir(parents=True, exist_ok=True)
    digest = f'-DBI_SOURCES="{sources_digest()}"'

    def compile_one(target: tuple[str, tuple[str, ...]]) -> str | None:
        name, flags = target
        out = folder / f"libbatchinfer_{name}.so"
        partial = out.with_suffix(f".{os.getpid()}.tmp")
        command = [compiler, *COMMON_FLAGS, *flags, digest, str(SOURCE), "-o", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            partial.unlink(missing_ok=True)
            return f"{name}: {done.stderr.strip().splitlines()[0] if done.stderr.strip() else 'the compiler failed'}"
        partial.replace(out)
        return None

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return [line for line in pool.map(compile_one, chosen.items()) if line]


if __name__ == "__main__":
    failures = build(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
    for failure in failures:
        print(f"kernels: {failure}", file=sys.stderr)
    sys.exit(bool(failures))
