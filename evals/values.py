"""One figure per row: a number, or null with the reason for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class RowValues:
    """`values` [num_rows] float64, NaN where null; `null_reasons` maps exactly the null rows to why."""

    values: npt.NDArray[np.float64]
    null_reasons: dict[int, str]

    def __post_init__(self) -> None:
        nulls = set(np.flatnonzero(np.isnan(self.values)).tolist())
        assert nulls == set(self.null_reasons), "every null has a reason, and no other row has one"

    def __len__(self) -> int:
        return len(self.values)

    @classmethod
    def of(cls, values: Iterable[float | str]) -> RowValues:
        """A string is a null and its reason. NaN is taken for null too; infinity stays a value."""
        numbers: list[float] = []
        reasons: dict[int, str] = {}
        for row, value in enumerate(values):
            if isinstance(value, str):
                reasons[row] = value
                numbers.append(np.nan)
            else:
                number = float(value)
                if np.isnan(number):
                    reasons[row] = "not a number"
                numbers.append(number)
        return cls(np.array(numbers, dtype=np.float64), reasons)

    def reason(self, row: int) -> str | None:
        return self.null_reasons.get(row)
