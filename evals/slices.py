"""The metrics over the rows that share a value of an input column, such as a task family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from batchinfer.errors import InputError
from batchinfer.evals.aggregate import estimate, valid_rows
from batchinfer.evals.protocol import MetricScores
from batchinfer.evals.result import Notice, SliceResult
from batchinfer.evals.row_keys import cell_keys
from batchinfer.evals.rows import PairedRows

MAX_SLICES = 50


def check_slice_columns(pairs: PairedRows, columns: Sequence[str]) -> None:
    """Raises InputError naming a column that does not exist."""
    for column in columns:
        if column not in pairs.inputs.column_names:
            names = ", ".join(pairs.inputs.column_names)
            raise InputError(f"--slice-by {column}: {pairs.before.run.path} has no such column. Columns: {names}")


def slice_metrics(
    scores: Sequence[MetricScores], pairs: PairedRows, columns: Sequence[str], seed: int
) -> tuple[list[SliceResult], list[Notice]]:
    """Each metric over each value of each column, the most frequent values first."""
    results: list[SliceResult] = []
    notices: list[Notice] = []
    for column in columns:
        keys = cell_keys(pairs.inputs.column(column))
        counts = Counter(keys).most_common()
        if len(counts) > MAX_SLICES:
            notices.append(
                Notice("many_slices", f"{column!r} has {len(counts)} values: only the {MAX_SLICES} most frequent shown")
            )
        keys_array = np.empty(len(keys), dtype=object)
        keys_array[:] = keys
        for value, _ in counts[:MAX_SLICES]:
            is_in = np.array([key is value or key == value for key in keys_array], dtype=bool)
            results += [_slice(one, pairs, is_in, column, str(value), seed) for one in scores]
    return results, notices


def _slice(
    scores: MetricScores, pairs: PairedRows, is_in: np.ndarray, column: str, value: str, seed: int
) -> SliceResult:
    is_prompt = scores.spec.level == "prompt"
    mask = is_in[pairs.first_pair_of_prompt] if is_prompt else is_in
    rows = valid_rows(scores, pairs.cluster_of_prompt if is_prompt else pairs.cluster_index, mask)
    found = estimate(scores, rows, seed, num_resamples=1_999)
    return SliceResult(column, value, scores.spec.name, found.n, found.before, found.after, found.difference)
