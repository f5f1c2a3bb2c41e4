"""The options of `batchinfer eval` beside those of the runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

COMPARISON = "Comparison"
METRICS = "Metrics"

Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="FILES",
        help="BEFORE and AFTER, two files of outputs; or PROMPTS, as for run, for --before and --after.",
        show_default=False,
        rich_help_panel="Input",
    ),
]
Before = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Model before: it runs PROMPTS, or reads the outputs of two files. Needs --after.",
        rich_help_panel="Model",
    ),
]
After = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL", help="The same for after: a model, or a LoRA adapter's folder.", rich_help_panel="Model"
    ),
]

Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Evaluators, separated by commas. Default: all that the inputs allow.",
        rich_help_panel=METRICS,
    ),
]
ReferenceColumn = Annotated[
    str | None,
    typer.Option(help="Column with right answers. Default: found when named reference.", rich_help_panel=METRICS),
]
OutputColumn = Annotated[
    str | None,
    typer.Option(
        help="Column with the outputs, in files. Default: the run's own, else output.", rich_help_panel=METRICS
    ),
]
Match = Annotated[
    str | None,
    typer.Option(
        metavar="WAY",
        help="What makes an output right: exact, normalized, numeric (last number), choice (letter), json (valid), "
        "regex. Default: normalized.",
        rich_help_panel=METRICS,
    ),
]
Pattern = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX",
        help="For --match regex: the answer is its last match, or that match's first group. Default: none.",
        rich_help_panel=METRICS,
    ),
]
ScoreFunction = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:NAME",
        help="Function (output, reference, row) that gives true, false or a number. Default: none.",
        rich_help_panel=METRICS,
    ),
]
K = Annotated[
    list[int] | None,
    typer.Option(
        "--k",
        help="k of pass@k and maj@k. Repeatable. Default: powers of two up to the samples, and their number.",
        rich_help_panel=METRICS,
    ),
]
Embedder = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="sentence-transformers model, folder or hub id. Default: all-MiniLM-L6-v2.",
        rich_help_panel=METRICS,
    ),
]
Texts = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Texts for perplexity. Default: the reference column.", rich_help_panel=METRICS),
]

ClusterColumn = Annotated[
    str | None,
    typer.Option(
        help="Rows with one value here are resampled together. Default: rows with the same prompt.",
        rich_help_panel=COMPARISON,
    ),
]
SliceBy = Annotated[
    list[str] | None,
    typer.Option(
        "--slice-by",
        metavar="COLUMN",
        help="Show the metrics for each value of this column too. Repeatable. Default: none.",
        rich_help_panel=COMPARISON,
    ),
]
NoiseFloor = Annotated[
    bool,
    typer.Option(
        "--noise-floor",
        help="Run the model of --before once more, under another seed and in other batches; smaller differences than "
        "between these two are no change. Default: no.",
        show_default=False,
        rich_help_panel=COMPARISON,
    ),
]
NoiseRun = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="For files: the outputs of such a run. Default: none.", rich_help_panel=COMPARISON
    ),
]
Gate = Annotated[
    list[str] | None,
    typer.Option(
        "--gate",
        metavar="CONDITION",
        help="Such as 'accuracy>=-0.01': exit with code 5 unless the difference's whole interval is on this side. "
        "Repeatable. Default: none.",
        rich_help_panel=COMPARISON,
    ),
]
EvalSeed = Annotated[
    int,
    typer.Option(
        "--eval-seed", help="Seed of the comparison's own random numbers. Default: 0.", show_default=False,
        rich_help_panel=COMPARISON,
    ),
]  # fmt: skip

OutputFolder = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="FOLDER",
        help="Folder for report.html, report.json, rows.parquet and the runs. Default: for two files none.",
        rich_help_panel="Output",
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print report.json on stdout, nothing else there. Default: no.",
        show_default=False,
        rich_help_panel="Output",
    ),
]
