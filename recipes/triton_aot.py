"""Compiles every Triton kernel for every chip, with no GPU, and says what each needs of the chip.

    python recipes/triton_aot.py
    python recipes/triton_aot.py --chip sm_90 --only linear
    python recipes/triton_aot.py --write docs/kernels-triton.md

Fails if a kernel does not compile, needs more shared memory than the chip has, spills registers, or if variants
of a product that must give a row the same bits use different matrix instructions. The last line is one JSON
object. What was compiled is kept where Triton keeps it (TRITON_CACHE_DIR).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

from publish import check_document, markdown_table, write_section

if TYPE_CHECKING:
    from batchinfer.kernels.triton.aot import Compiled
    from batchinfer.kernels.triton.variants import Variant

SECTION = "triton-aot"


def main(argv: Sequence[str] | None = None) -> None:
    # Read when Triton is imported, here and in the processes below: interpreted kernels cannot be compiled.
    os.environ.pop("TRITON_INTERPRET", None)
    from batchinfer.kernels.triton.aot import faults
    from batchinfer.kernels.triton.launch import CHIPS

    args = parse_args(argv, list(CHIPS))
    if args.write is not None:
        check_document(args.write)
    began = time.perf_counter()
    jobs = [
        (chip, name, args.only, args.quick)
        for chip in args.chip or CHIPS
        for name in dict.fromkeys(variant.name for variant in chosen(chip, args.only, args.quick))
    ]
    if not jobs:
        raise SystemExit(f"--only {args.only}: no kernel has that in its name or label")
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        found = [one for part in pool.map(compile_kernel, *zip(*jobs, strict=True)) for one in part]
    problems = faults(found)
    print(tables(found))
    for problem in problems:
        print(problem, file=sys.stderr)
    if args.write is not None:
        write_section(args.write, SECTION, f"{introduction(found)}\n\n{tables(found)}")
    wall_s = round(time.perf_counter() - began, 1)
    print(json.dumps({"num_compiled": len(found), "num_faults": len(problems), "wall_s": wall_s}))
    if problems:
        raise SystemExit(1)


def parse_args(argv: Sequence[str] | None, chips: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", action="append", choices=chips, help="only for this one (may be repeated)")
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels with this in their name or label")
    parser.add_argument("--quick", action="store_true", help="one variant of each kernel")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: %(default)s)")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help=f"replace its section {SECTION}")
    return parser.parse_args(argv)


def chosen(chip_name: str, only: str, is_quick: bool) -> list[Variant]:
    from batchinfer.kernels.triton.aot import representative, variants
    from batchinfer.kernels.triton.launch import CHIPS

    chip = CHIPS[chip_name]
    every = representative(chip) if is_quick else variants(chip)
    return [variant for variant in every if only in f"{variant.name} {variant.label}"]


def compile_kernel(chip_name: str, name: str, only: str, is_quick: bool) -> list[Compiled]:
    """All variants of one kernel, in a process of its own: what they share is worked out once."""
    from batchinfer.kernels.triton.aot import compile_variant
    from batchinfer.kernels.triton.launch import CHIPS

    wanted = [variant for variant in chosen(chip_name, only, is_quick) if variant.name == name]
    return [compile_variant(variant, CHIPS[chip_name]) for variant in wanted]


def introduction(found: Sequence[Compiled]) -> str:
    versions = f"Triton {metadata.version('triton')}"
    chips = ", ".join(dict.fromkeys(one.chip for one in found))
    return (
        f"{len(found)} variants compiled with {versions} for {chips}. Each cell: warps × stages, registers of a "
        "thread, shared memory in KiB; `spills N` where N bytes of registers are spilled. Variants that need the "
        "same on every chip share a line."
    )


def tables(found: Iterable[Compiled]) -> str:
    """A table for each kernel: a line for each variant, a column for each chip."""
    cells: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for one in found:
        cells[one.name, one.label][one.chip] = cell(one)
    chips = list(dict.fromkeys(chip for row in cells.values() for chip in row))
    parts = []
    for name in sorted({name for name, _ in cells}):
        lines: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for (of, label), row in cells.items():
            if of == name:
                lines[tuple(row.get(chip, "") for chip in chips)].append(label)
        table = markdown_table([f"`{name}`", *chips], [[merged(labels), *row] for row, labels in lines.items()])
        parts.append(table)
    return "\n\n".join(parts)


def merged(labels: list[str]) -> str:
    """Labels of one line: "llama-3-8b o, bf16 and fp16; greedy"."""
    dtypes: dict[str, list[str]] = defaultdict(list)
    for label in labels:
        shape, _, dtype = label.rpartition(", ")
        dtypes[f"{shape}, " if shape else ""].append(dtype)
    return "; ".join(shape + " and ".join(of_shape) for shape, of_shape in dtypes.items())


def cell(one: Compiled) -> str:
    spilled = f", spills {one.spilled_bytes}" if one.spilled_bytes else ""
    return f"{one.num_warps} × {one.num_stages}, {one.registers}, {one.shared_bytes / 1024:.1f}{spilled}"


if __name__ == "__main__":
    main()
