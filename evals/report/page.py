"""ComparisonResult -> one HTML file that needs nothing beside it: no network, no script, both themes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markupsafe import Markup

from batchinfer.evals.report.charts import curve_panels, distributions, forest_panels, grid_panels
from batchinfer.evals.report.example_rows import MAX_ROWS, metric_examples
from batchinfer.evals.report.identities import identities
from batchinfer.evals.report.methods import methods
from batchinfer.evals.report.metric_table import metric_table
from batchinfer.evals.report.numbers import count, figure, table_cells
from batchinfer.evals.report.slice_tables import slice_columns
from batchinfer.evals.report.text import visible
from batchinfer.evals.report.verdicts import finding_groups, headline, main_metrics
from batchinfer.evals.result import ComparisonResult

#: Drawn as a grid.
GRID_TABLE = "perplexity_2x2"
#: Evaluators' tables that stand in a section with plots; the others come at the end.
PERPLEXITY_TABLES = ("reference_texts",)
DRIFT_TABLES = ("drift", "policy_ratio", "stored_logprobs")


def write_html(result: ComparisonResult, path: Path) -> None:
    """Write the report. Everything that comes from a run is escaped: HTML in an output is shown, never obeyed."""
    path.write_text(render_html(result), encoding="utf-8")


def render_html(result: ComparisonResult) -> str:
    """The page. It is a function of `result` alone."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("batchinfer.evals.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    environment.filters |= {"figure": figure, "count": count, "cells": table_cells}
    view = _view(result)
    return environment.get_template("report.html").render(**view, sections=list(_sections(view)))


def _view(result: ComparisonResult) -> dict[str, Any]:
    tables = [table for table in result.tables if table.rows]
    placed = (GRID_TABLE, *PERPLEXITY_TABLES, *DRIFT_TABLES)
    return {
        "result": result,
        "headline": headline(result),
        "findings": finding_groups(main_metrics(result)),
        "metrics": metric_table(result),
        "forests": forest_panels(result),
        "distributions": distributions(result),
        "grids": grid_panels([table for table in tables if table.name == GRID_TABLE and len(table.columns) > 1]),
        "perplexity_tables": [table for table in tables if table.name in PERPLEXITY_TABLES],
        "curves": curve_panels(result),
        "drift_tables": [table for table in tables if table.name in DRIFT_TABLES],
        "slices": slice_columns(result),
        "examples": metric_examples(result),
        "max_examples": MAX_ROWS,
        "tables": [table for table in tables if table.name not in placed],
        "identities": identities(result),
        "methods": methods(result),
    }


def _sections(view: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(id, title) of the sections for which there is something to show."""
    found = view["distributions"]
    titles = {
        "metrics": ("Metrics", view["metrics"].rows),
        "differences": ("Differences", view["forests"]),
        "distributions": ("Distributions", found.panels or found.crosstabs),
        "perplexity": ("Perplexity", view["grids"] or view["perplexity_tables"]),
        "drift": ("Drift", view["curves"] or view["drift_tables"]),
        "slices": ("Slices", view["slices"]),
        "rows": ("Rows to read", view["examples"]),
        "tables": ("More tables", view["tables"]),
        "skipped": ("Not measured", view["result"].skipped),
        "runs": ("The two runs", True),
        "methods": ("How it was computed", view["methods"]),
    }
    for name, (title, content) in titles.items():
        if content:
            yield name, title
