"""A small table of one quantity as a plot: tinted cells with their numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from batchinfer.evals.report.figure import COLOURS, FONT_SIZE, WIDTH, drawing, to_svg
from batchinfer.evals.report.numbers import table_cells
from batchinfer.evals.report.text import one_line
from batchinfer.evals.result import Cell, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEAD = 34
_ROW = 46
_GAP = 2


def grid(table: Table, prefix: str) -> Markup:
    """First column: names. All others: numbers of one unit; the larger, the darker, on a scale of ratios."""
    cells = table_cells(table)
    shades = _shades([row[1:] for row in table.rows])
    num_columns = len(table.columns) - 1
    left = WIDTH / (num_columns + 2)  # the names have less room than a number
    width = (WIDTH - left) / num_columns
    height = _HEAD + _ROW * len(cells)
    with drawing(height) as figure:
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, WIDTH)
        axes.set_ylim(height, 0)
        axes.text(0, _HEAD / 2, one_line(table.columns[0], 16), va="center", color=COLOURS["muted"])
        for x, name in enumerate(table.columns[1:]):
            middle = left + (x + 0.5) * width
            axes.text(middle, _HEAD / 2, one_line(name, 24), ha="center", va="center", color=COLOURS["muted"])
        for y, (name, *texts) in enumerate(cells):
            top = _HEAD + y * _ROW
            axes.text(0, top + _ROW / 2, one_line(name, 16), va="center")
            for x, text in enumerate(texts):
                _draw_cell(axes, left + x * width, top, width, text, shades[y][x])
        return to_svg(figure, f"{table.title}: {_in_words(table, cells)}", prefix)


def _draw_cell(axes: Axes, left: float, top: float, width: float, text: str, shade: float) -> None:
    from matplotlib.patches import Rectangle

    corner, alpha = (left + _GAP / 2, top + _GAP / 2), 0.06 + 0.34 * shade
    axes.add_patch(Rectangle(corner, width - _GAP, _ROW - _GAP, facecolor=COLOURS["after"], alpha=alpha, linewidth=0))
    axes.text(left + width / 2, top + _ROW / 2, text, ha="center", va="center", fontsize=FONT_SIZE + 3)


def _in_words(table: Table, cells: Sequence[Sequence[str]]) -> str:
    return "; ".join(
        f"{name}, {column}: {text}"
        for name, *texts in cells
        for column, text in zip(table.columns[1:], texts, strict=True)
    )


def _shades(cells: Sequence[Sequence[Cell]]) -> list[list[float]]:
    """0 to 1 for each cell, 0 where there is no positive number."""
    logs = [[_log(cell) for cell in row] for row in cells]
    known = [value for row in logs for value in row if value is not None]
    low, width = (min(known), max(known) - min(known)) if known else (0.0, 0.0)
    return [[0.0 if value is None or width == 0 else (value - low) / width for value in row] for row in logs]


def _log(cell: Cell) -> float | None:
    is_positive = isinstance(cell, (int, float)) and math.isfinite(cell) and cell > 0
    return math.log(float(cell)) if is_positive and cell is not None else None
