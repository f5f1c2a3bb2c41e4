"""Shows some completions of a run beside their references, a few of each family.

    python recipes/show_results.py OUT.parquet [--per-family 2]

OUT.parquet is what `batchinfer run data/quickstart.parquet --output OUT.parquet ...` wrote.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from rich.text import Text

COLUMNS = ("id", "family", "prompt", "reference", "output", "finish_reason")
MAX_LINES = 4


def question(prompt: str) -> str:
    """What comes after the last few-shot example, without the line that asks for the answer."""
    return prompt.rpartition("\n\n")[2].rpartition("\n")[0]


def first_lines(text: str) -> str:
    lines = text.strip().splitlines()
    return "\n".join(lines[:MAX_LINES]) + (" …" if len(lines) > MAX_LINES else "")


def results_table(rows: list[dict[str, str | None]], per_family: int) -> Table:
    table = Table(title="Some completions", show_lines=True)
    for heading, ratio in (("id", 3), ("question", 6), ("output", 6), ("reference", 5), ("ended by", 2)):
        table.add_column(heading, ratio=ratio, overflow="fold")
    num_shown: dict[str, int] = {}
    for row in sorted(rows, key=lambda row: str(row["family"])):  # stable: input order within a family
        family = str(row["family"])
        num_shown[family] = num_shown.get(family, 0) + 1
        if num_shown[family] > per_family:
            continue
        cells = (
            row["id"],
            question(row["prompt"] or ""),
            first_lines(row["output"] or ""),
            row["reference"],
            row["finish_reason"],
        )
        table.add_row(*(Text(cell or "") for cell in cells))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Show some completions beside their references.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--per-family", type=int, default=2)
    arguments = parser.parse_args()
    rows = pq.read_table(arguments.results, columns=list(COLUMNS)).to_pylist()
    Console(width=None if Console().is_terminal else 140).print(results_table(rows, arguments.per_family))


if __name__ == "__main__":
    main()
