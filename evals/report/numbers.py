"""Numbers as people read them: shares in percent, as many digits as the interval supports, real minus signs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from batchinfer.evals.result import Cell, Estimate, MetricResult, Table

NONE = "–"
#: Units of MetricSpec that are shown under another name.
_UNITS = {"share": "%"}
_DIFFERENCE_UNITS = {"share": "points"}
#: Unit of the rows -> of exp of their mean.
_EXP_UNITS = {"nats/token": "perplexity"}


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How the numbers of one metric are written.

    Attributes:
        unit: what stands beside a value.
        difference_unit: the same beside a difference: a share that falls from 62 % to 58 % falls by 4 points.
        factor: 100 for shares, else 1.
        decimals: so many that the interval's half has two significant digits.
    """

    unit: str
    difference_unit: str
    factor: float
    decimals: int

    @classmethod
    def of(cls, unit: str, *estimates: Estimate | None) -> NumberFormat:
        """For the last of `estimates` with an interval; without one four significant digits of the largest mean."""
        factor = 100.0 if unit == "share" else 1.0
        widths = [
            (one.high - one.low) / 2 * factor
            for one in estimates
            if one is not None and one.low is not None and one.high is not None and one.high > one.low
        ]
        means = [abs(one.mean) * factor for one in estimates if one is not None and one.mean]
        if widths:
            decimals = _decimals(widths[-1], 2)
        else:
            decimals = _decimals(max(means), 4) if means else 1
        return cls(_UNITS.get(unit, unit), _DIFFERENCE_UNITS.get(unit, unit), factor, decimals)

    @classmethod
    def of_metric(cls, metric: MetricResult) -> NumberFormat:
        """Of its estimates. With the summary exp_mean these are not in the rows' unit."""
        unit = metric.spec.unit
        if metric.spec.summary == "exp_mean":
            unit = _EXP_UNITS.get(unit, f"exp({unit})")
        return cls.of(unit, metric.before, metric.after, metric.difference)

    @classmethod
    def of_rows(cls, metric: MetricResult) -> NumberFormat:
        """Of single rows' values."""
        return cls.of(metric.spec.unit)

    def value(self, number: float | None) -> str:
        """Without the unit."""
        return NONE if number is None else plain(number * self.factor, self.decimals)

    def signed(self, number: float | None) -> str:
        return NONE if number is None else plain(number * self.factor, self.decimals, is_signed=True)

    def interval(self, estimate: Estimate, *, is_signed: bool) -> str:
        """[low, high], or nothing where there is none."""
        if estimate.low is None or estimate.high is None:
            return ""
        write = self.signed if is_signed else self.value
        return f"[{write(estimate.low)}, {write(estimate.high)}]"

    def with_unit(self, number: float | None, *, is_difference: bool = False) -> str:
        """Unsigned, with its unit: "62.4 %", "4.1 points", "17.5 tokens"."""
        text = self.value(number)
        unit = self.difference_unit if is_difference else self.unit
        return text if number is None or not unit else f"{text}\u00a0{unit}"


def plain(number: float, decimals: int, *, is_signed: bool = False) -> str:
    if not math.isfinite(number):
        return {math.inf: "+∞" if is_signed else "∞", -math.inf: "−∞"}.get(number, NONE)
    if number and not 1e-6 <= abs(number) < 1e12:
        text = f"{number:{'+' if is_signed else ''}.3g}"
    else:
        number = round(number, decimals) + 0.0  # no minus zero
        sign = "+" if is_signed and number > 0 else ""
        text = f"{sign}{number:,.{decimals}f}"
    return text.replace("-", "−")


def figure(number: float | None, *, is_signed: bool = False) -> str:
    """A number without an interval, such as one row's: whole, or with four significant digits."""
    if number is None:
        return NONE
    is_whole = math.isfinite(number) and number == int(number)
    return plain(number, 0 if is_whole else _decimals(abs(number), 4), is_signed=is_signed)


def table_cells(table: Table) -> list[list[str]]:
    """The cells as text. The fractions of a column have equally many decimals, four digits of the largest."""
    columns = [_column_cells([row[place] for row in table.rows]) for place in range(len(table.columns))]
    return [list(row) for row in zip(*columns, strict=True)]


def _column_cells(cells: list[Cell]) -> list[str]:
    fractions = [abs(cell) for cell in cells if isinstance(cell, float) and math.isfinite(cell)]
    decimals = _decimals(max(fractions), 4) if any(fractions) else 0
    return [_cell(cell, decimals) for cell in cells]


def _cell(cell: Cell, decimals: int) -> str:
    if cell is None:
        return NONE
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return plain(cell, 0)
    return plain(cell, decimals) if isinstance(cell, float) else cell


def p_value(number: float | None) -> str:
    if number is None:
        return NONE
    return "<\u2009.0001" if number < 0.0001 else f"{number:.4f}" if number < 0.01 else f"{number:.3f}"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """ "1 row", "12 rows" """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _decimals(size: float, significant: int) -> int:
    """Decimals that show `significant` digits of a number of this size, 0 to 6."""
    if not math.isfinite(size) or size <= 0:
        return 2
    return min(6, max(0, significant - 1 - math.floor(math.log10(size))))
