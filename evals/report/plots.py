"""The plots of the report, each drawn for one column of a phone: intervals, distributions, curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from batchinfer.evals.report.figure import COLOURS, WIDTH, drawing, to_svg
from batchinfer.evals.report.text import one_line
from batchinfer.evals.result import Curve, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = npt.NDArray[np.float64]

#: Never colour alone: verdict -> (marker, colour, is filled).
VERDICT_STYLES = {
    Verdict.BETTER: ("^", "better", True),
    Verdict.WORSE: ("v", "worse", True),
    Verdict.CHANGED: ("D", "changed", True),
    Verdict.NO_CHANGE: ("o", "muted", False),
    Verdict.NOT_TESTED: ("o", "muted", False),
}
#: (colour, dashes) of a curve's series, by place.
_SERIES_STYLES = (("after", "-"), ("changed", "--"), ("series3", "-."), ("series4", ":"), ("ink", (0, (5, 1, 1, 1))))
_SIDE_STYLES = {"before": ("before", "--"), "after": ("after", "-")}
_ROW_HEIGHT = 40
_NUM_LETTERS = 56  # that fit side by side
_TICK_MARGIN = 0.035  # of an axis without room beside it: the number under a tick nearer to an end would be cut
_LEGEND_HEIGHT = 17
_MAX_BINS = 24


@dataclass(frozen=True, slots=True)
class ForestRow:
    """One interval, in the unit of the axis.

    Attributes:
        text: the numbers, at the right.
        missed: half width of what could have been missed (minimum detectable effect).
        noise: half width of the noise floor.
    """

    label: str
    text: str
    mean: float
    low: float | None
    high: float | None
    verdict: Verdict = Verdict.NOT_TESTED
    missed: float | None = None
    noise: float | None = None


def forest(rows: Sequence[ForestRow], axis_label: str, prefix: str, *, neutral: float = 0.0) -> Markup:
    """Intervals below each other on one axis, with a line at `neutral`."""
    height = len(rows) * _ROW_HEIGHT + 42
    with drawing(height) as figure:
        axes = figure.add_axes((8 / WIDTH, 36 / height, 1 - 16 / WIDTH, len(rows) * _ROW_HEIGHT / height))
        low, high = _forest_range(rows, neutral)
        axes.set_xlim(low, high)
        axes.set_ylim(len(rows), 0)
        axes.axvline(neutral, color=COLOURS["muted"], linewidth=1, zorder=1)
        for place, row in enumerate(rows):
            _forest_row(axes, row, place, neutral)
        axes.set_yticks([])
        axes.set_xlabel(axis_label)
        _few_ticks(axes, low, high, margin=_TICK_MARGIN * (high - low))
        said = "; ".join(f"{row.label} {row.text}" for row in rows)
        return to_svg(figure, f"Intervals, {axis_label}: {said}", prefix)


def _forest_row(axes: Axes, row: ForestRow, place: int, neutral: float) -> None:
    from matplotlib.transforms import blended_transform_factory

    marker, name, is_filled = VERDICT_STYLES[row.verdict]
    colour = COLOURS[name]
    y = place + 0.68
    at_edge = blended_transform_factory(axes.transAxes, axes.transData)
    on_page = {"facecolor": COLOURS["page"], "edgecolor": "none", "pad": 1}  # keeps the line at neutral off the words
    words: dict[str, Any] = {"transform": at_edge, "va": "center", "bbox": on_page}
    axes.text(0, place + 0.34, one_line(row.label, _NUM_LETTERS - len(row.text)), ha="left", **words)
    axes.text(1, place + 0.34, row.text, ha="right", color=COLOURS["muted"], **words)
    if row.missed:
        axes.plot([neutral - row.missed, neutral + row.missed], [y, y], color=COLOURS["soft"], linewidth=10, zorder=0)
    if row.noise:
        axes.plot([neutral - row.noise, neutral + row.noise], [y, y], color=COLOURS["line"], linewidth=10, zorder=0.5)
    if row.low is not None and row.high is not None:
        axes.plot([row.low, row.high], [y, y], color=colour, linewidth=2, zorder=2)
    face = colour if is_filled else COLOURS["page"]
    size = 6 if marker == "D" else 7
    axes.plot([row.mean], [y], marker=marker, markersize=size, color=colour, markerfacecolor=face, zorder=3)


def _forest_range(rows: Sequence[ForestRow], neutral: float) -> tuple[float, float]:
    """Bars of what could be missed do not widen the axis: they are cut at its ends."""
    ends = [end for row in rows for end in (row.low, row.high, row.mean) if end is not None]
    low, high = min(*ends, neutral), max(*ends, neutral)
    pad = (high - low) * 0.06 or max(abs(neutral), 1.0) * 0.05
    return low - pad, high + pad


def _few_ticks(axes: Axes, low: float, high: float, *, margin: float = 0.0) -> None:
    """`margin`: none nearer to an end than this."""
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(5).tick_values(low, high)
    axes.set_xticks([tick for tick in ticks if low + margin <= tick <= high - margin])


def distribution(
    before: Floats | None,
    after: Floats,
    axis_label: str,
    prefix: str,
    *,
    means: Sequence[float | None] = (),
    neutral: float | None = None,
) -> Markup:
    """Histograms over the same bins: before dashed, after solid and filled; their means below the axis.

    Args:
        before: [n]; None for figures between the two sides, which have one histogram and a line at `neutral`.
        after: [n] finite, as before.
        means: of each side, which may be weighted and so not be those of the values.
    """
    height = 150
    sides = {"before": before, "after": after} if before is not None else {"": after}
    bins = histogram_bins(np.concatenate([values for values in sides.values() if values is not None]))
    with drawing(height) as figure:
        axes = figure.add_axes((30 / WIDTH, 42 / height, 1 - 46 / WIDTH, (height - 52) / height))
        tallest = 0
        for (name, values), mean in zip_longest(sides.items(), means):
            assert values is not None
            counts = np.histogram(np.clip(values, bins[0], bins[-1]), bins)[0]
            tallest = max(tallest, int(counts.max()))
            colour, dashes = _SIDE_STYLES.get(name, ("after", "-"))
            if name != "before":
                axes.stairs(counts, bins, fill=True, color=COLOURS[colour], alpha=0.18, linewidth=0)
            axes.stairs(counts, bins, color=COLOURS[colour], linestyle=dashes, linewidth=1.5)
            if mean is not None:
                x = float(np.clip(mean, bins[0], bins[-1]))
                face = COLOURS["page"] if name == "before" else COLOURS[colour]
                axes.plot(
                    [x], [0], marker="^", markersize=7, color=COLOURS[colour], markerfacecolor=face, clip_on=False
                )
        if before is None and neutral is not None and bins[0] <= neutral <= bins[-1]:
            axes.axvline(neutral, color=COLOURS["muted"], linewidth=1)
        axes.set_xlim(bins[0], bins[-1])
        axes.set_ylim(0, tallest * 1.08)
        axes.set_yticks([0, tallest])
        axes.set_xlabel(axis_label)
        axes.tick_params("x", pad=6)
        _few_ticks(axes, bins[0], bins[-1])
        said = ", ".join(
            f"{name or 'mean'} {mean:.4g}" for name, mean in zip(sides, means, strict=False) if mean is not None
        )
        label = f"Histogram of {len(after):,} rows, {axis_label}. Means: {said}. Tallest bar: {tallest:,} rows"
        return to_svg(figure, label, prefix)


def histogram_bins(values: Floats) -> Floats:
    """Edges; whole numbers have one bin each where these are few. Far tails are left to the outermost bins."""
    low, high = float(values.min()), float(values.max())
    is_whole = bool(np.all(values == np.round(values)))
    if is_whole and high - low < _MAX_BINS:
        return np.arange(low, high + 2) - 0.5
    inner_low, inner_high = (float(end) for end in np.quantile(values, (0.005, 0.995)))
    middle = inner_high - inner_low
    if middle > 0 and high - low > 3 * middle:
        low, high = max(low, inner_low - middle / 4), min(high, inner_high + middle / 4)
    if low == high:
        return np.array([low - 0.5, low + 0.5])
    if not is_whole:
        return np.linspace(low, high, _MAX_BINS + 1)
    low, high = math.floor(low), math.ceil(high)
    width = math.ceil((high - low + 1) / _MAX_BINS)  # bins of unequal counts of whole numbers would look like teeth
    num = math.ceil((high - low + 1) / width)
    return np.arange(num + 1, dtype=np.float64) * width + (low - 0.5)


def curve(found: Curve, prefix: str) -> Markup:
    """Lines over x with their bands, and a legend above."""
    has_long_names = any(len(series.name) > 22 for series in found.series)
    num_columns = 1 if has_long_names else 2
    legend = _LEGEND_HEIGHT * math.ceil(len(found.series) / num_columns) if len(found.series) > 1 else 0
    height = 192 + legend
    with drawing(height) as figure:
        axes = figure.add_axes((46 / WIDTH, 40 / height, 1 - 58 / WIDTH, (height - legend - 48) / height))
        axes.grid(axis="y", color=COLOURS["line"], linewidth=0.5)
        axes.set_axisbelow(True)
        for place, series in enumerate(found.series):
            colour, dashes = _SIDE_STYLES.get(series.name, _SERIES_STYLES[place % len(_SERIES_STYLES)])
            x, y = _plottable(series.x), _plottable(series.y)
            if series.low is not None and series.high is not None:
                low, high = _plottable(series.low), _plottable(series.high)
                axes.fill_between(x, low, high, color=COLOURS[colour], alpha=0.15, linewidth=0)
            marker = "o" if len(x) == 1 else None
            label = one_line(series.name, 48)
            axes.plot(x, y, color=COLOURS[colour], linestyle=dashes, linewidth=1.75, label=label, marker=marker)
        axes.set_xlabel(one_line(found.x_label))
        axes.yaxis.set_major_locator(_locator(4))
        axes.xaxis.set_major_locator(_locator(6))
        axes.margins(x=0.02)
        if len(found.series) > 1:
            axes.legend(
                loc="lower left",
                bbox_to_anchor=(0, (height - legend) / height),
                bbox_transform=figure.transFigure,
                ncols=num_columns,
                frameon=False,
                borderpad=0,
                borderaxespad=0,
                handlelength=2.2,
            )
        return to_svg(figure, _curve_in_words(found), prefix)


def _locator(num: int) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(num)


def _curve_in_words(found: Curve) -> str:
    parts = []
    for series in found.series:
        values = [(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None and math.isfinite(y)]
        if values:
            (x0, y0), (x1, y1) = values[0], values[-1]
            parts.append(f"{series.name}: {y0:.4g} at {x0:.4g}, {y1:.4g} at {x1:.4g}")
    return f"{found.title}: {found.y_label} over {found.x_label}. " + "; ".join(parts)


def _plottable(values: Sequence[float | None]) -> Floats:
    """NaN breaks the line; matplotlib cannot place infinity."""
    numbers = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    return np.where(np.isfinite(numbers), numbers, np.nan)
