"""How generation time grows with the number of rows, and with the memory for KV.

    python recipes/bench/growth.py bbh_cot.parquet --max-tokens 64 --rows 100,200,400,800 \\
        --kv-memory 256MB,1GB,4GB --kv-rows 400 --rounds 3 --write docs/performance.md

Each point is a process `batchinfer bench`; all points are run once per round, so that a machine whose speed drifts
is fair to all. The first rows of PROMPTS are taken: they should be in no order of their own.

Growth with rows is told as the exponent of a power law fitted to the medians: 1 is linear. It is below 1 where more
rows share more, which the floor (the least time there is, see docs/bench.md) shows too.

Prints two Markdown tables and one JSON line last. With --write the tables and the plot go to the document's sections
growth:rows, growth:kv and growth:plot.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import publish

#: What is kept of each report.
KEPT = ("generation_s", "share_of_optimum", "num_prompt_tokens", "num_unique_prompt_tokens", "num_output_tokens")


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parse(arguments)
    if args.write:
        publish.check_document(args.write)
    points = {("rows", str(rows)): (rows, None) for rows in args.rows}
    points |= {("kv", size): (args.kv_rows, size) for size in args.kv_memory}
    reports: dict[tuple[str, str], list[dict[str, Any]]] = {point: [] for point in points}
    for turn in range(args.rounds):
        for point, (rows, kv_memory) in points.items():
            found = run_point(args, rows, kv_memory)
            reports[point].append(found)
            print(f"round {turn + 1}, {' '.join(point)}: {found['generation_s']:.2f} s", flush=True)
    by_rows = {int(value): summary(found) for (kind, value), found in reports.items() if kind == "rows"}
    by_kv = {value: summary(found) for (kind, value), found in reports.items() if kind == "kv"}
    result = {
        "rows": by_rows,
        "kv_memory": by_kv,
        "kv_rows": args.kv_rows,
        "max_tokens": args.max_tokens,
        "exponent": exponent({rows: of["generation_s"] for rows, of in by_rows.items()}),
        "num_rounds": args.rounds,
        "machine": publish.describe_machine(),
        "commit": publish.commit(),
    }
    sections = {"growth:rows": rows_section(result), "growth:kv": kv_section(result)}
    print("\n" + "\n\n".join(sections.values()))
    if args.write:
        write(args.write, result, sections)
    print(json.dumps(result, allow_nan=False))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rows", type=_row_counts, default="100,200,400,800", help="default: %(default)s")
    parser.add_argument("--kv-memory", type=_names, default="256MB,1GB,4GB", help="default: %(default)s")
    parser.add_argument("--kv-rows", type=int, default=400, help="rows of the runs with less KV; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--option", action="append", default=[], help="passed on to batchinfer bench; repeatable")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT.md")
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    return args


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _row_counts(text: str) -> list[int]:
    counts = sorted({int(name) for name in _names(text)})
    if len(counts) < 2 or counts[0] < 1:
        raise ValueError(text)  # argparse names the option
    return counts


def run_point(args: argparse.Namespace, rows: int, kv_memory: str | None) -> dict[str, Any]:
    options = ["--limit", str(rows), "--max-tokens", str(args.max_tokens), *args.option]
    if kv_memory is not None:
        options += ["--kv-memory", kv_memory]
    found = publish.bench(args.prompts, args.model, *options)
    if found["num_rows_ok"] < rows:
        raise SystemExit(f"{args.prompts}: {found['num_rows_ok']} rows could run, {rows} were asked for")
    kept = {name: found[name] for name in KEPT}
    kept |= {"floor_s": found["floor"]["seconds"], "sharing": found["sharing"]["achieved"]}
    return kept | {"num_preemptions": found["num_preemptions"], "kv_pool_bytes": found["kv"]["pool_bytes"]}


def summary(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the rounds, and every round's seconds."""
    out = {name: statistics.median(report[name] for report in reports) for name in reports[0]}
    return out | {"rounds_s": [report["generation_s"] for report in reports]}


def exponent(seconds: dict[int, float]) -> float:
    """b of the least-squares fit log(seconds) = a + b * log(rows)."""
    x, y = [math.log(rows) for rows in seconds], [math.log(value) for value in seconds.values()]
    return statistics.linear_regression(x, y).slope


def rows_section(result: dict[str, Any]) -> str:
    headers = ["rows", "prompt tokens", "unique", "output tokens", "generation s", "s per 100 rows", "of the optimum"]
    rows = [
        [
            f"{count:,}",
            f"{of['num_prompt_tokens']:,.0f}",
            f"{of['num_unique_prompt_tokens']:,.0f}",
            f"{of['num_output_tokens']:,.0f}",
            publish.spread(of["rounds_s"]),
            f"{100 * of['generation_s'] / count:.2f}",
            f"{100 * of['share_of_optimum']:.0f} %",
        ]
        for count, of in result["rows"].items()
    ]
    return f"""**Growth with rows**: {result["max_tokens"]} output tokens each, medians of {result["num_rounds"]} \
rounds (least to greatest). Time grows as rows to the power {result["exponent"]:.2f}.

{publish.markdown_table(headers, rows)}

Machine: {result["machine"]}. Commit {result["commit"]}."""


def kv_section(result: dict[str, Any]) -> str:
    headers = ["KV memory", "generation s", "of the optimum", "sharing achieved", "preemptions"]
    rows = [
        [
            name,
            publish.spread(of["rounds_s"]),
            f"{100 * of['share_of_optimum']:.0f} %",
            f"{100 * of['sharing']:.1f} %",
            f"{of['num_preemptions']:,.0f}",
        ]
        for name, of in result["kv_memory"].items()
    ]
    return f"""**Growth with KV memory**: {result["kv_rows"]} rows, {result["max_tokens"]} output tokens each, \
medians of {result["num_rounds"]} rounds (least to greatest).

{publish.markdown_table(headers, rows)}

Machine: {result["machine"]}. Commit {result["commit"]}."""


def draw(result: dict[str, Any], path: Path) -> None:
    figure = publish.new_figure(width=9.0)
    left, right = figure.subplots(1, 2)
    counts = list(result["rows"])
    of_rows = list(result["rows"].values())
    left.plot(counts, [of["generation_s"] for of in of_rows], "o-", label="measured, median")
    left.fill_between(
        counts, [min(of["rounds_s"]) for of in of_rows], [max(of["rounds_s"]) for of in of_rows], alpha=0.2
    )
    left.plot(counts, [of["floor_s"] for of in of_rows], "k--", label="least possible")
    per_row = of_rows[0]["generation_s"] / counts[0]
    left.plot([0, counts[-1]], [0, per_row * counts[-1]], ":", color="gray", label="linear from the first point")
    left.set_title(f"rows (power {result['exponent']:.2f})", fontsize=10)
    left.set_xlabel("rows")
    left.legend(fontsize=8)
    of_kv = list(result["kv_memory"].values())
    sizes = [of["kv_pool_bytes"] / 1e9 for of in of_kv]
    right.plot(sizes, [of["generation_s"] for of in of_kv], "o-")
    right.plot(sizes, [of["floor_s"] for of in of_kv], "k--")
    right.set_xscale("log")
    right.set_xticks(sizes, list(result["kv_memory"]))
    right.minorticks_off()
    right.set_title(f"KV memory, {result['kv_rows']} rows", fontsize=10)
    right.set_xlabel("KV memory")
    for axis in (left, right):
        axis.margins(y=0.1)
        axis.set_ylim(bottom=0)
        axis.set_ylabel("generation, s")
    publish.save_plot(figure, path)


def write(document: Path, result: dict[str, Any], sections: dict[str, str]) -> None:
    for name, text in sections.items():
        publish.write_section(document, name, text)
    publish.save_json(publish.beside(document, "growth.json"), result)
    plot = publish.beside(document, "growth.svg")
    draw(result, plot)
    text = "Generation time against rows and KV memory"
    publish.write_section(document, "growth:plot", publish.picture(document, plot, text))


if __name__ == "__main__":
    main()
