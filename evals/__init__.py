"""Evaluation of completions: what changed between two runs, with error bars.

    from batchinfer.evals import compare

    result = compare("before.parquet", "after.parquet", metrics=["accuracy", "length"])
    print(result.metric("accuracy").difference)

One evaluator per file, in metrics/ and beside it; the names below are imported at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchinfer.evals.comparison import compare
    from batchinfer.evals.output import write_comparison
    from batchinfer.evals.protocol import EvalContext, EvalOptions, Evaluator, MetricScores, MetricSpec, Needs, Scores
    from batchinfer.evals.result import ComparisonResult
    from batchinfer.evals.rows import PairedRows
    from batchinfer.evals.values import RowValues

# public name -> module that defines it
_EXPORTS = {
    "ComparisonResult": "batchinfer.evals.result",
    "EvalContext": "batchinfer.evals.protocol",
    "EvalOptions": "batchinfer.evals.protocol",
    "Evaluator": "batchinfer.evals.protocol",
    "MetricScores": "batchinfer.evals.protocol",
    "MetricSpec": "batchinfer.evals.protocol",
    "Needs": "batchinfer.evals.protocol",
    "PairedRows": "batchinfer.evals.rows",
    "RowValues": "batchinfer.evals.values",
    "Scores": "batchinfer.evals.protocol",
    "compare": "batchinfer.evals.comparison",
    "write_comparison": "batchinfer.evals.output",
}

__all__ = [
    "ComparisonResult",
    "EvalContext",
    "EvalOptions",
    "Evaluator",
    "MetricScores",
    "MetricSpec",
    "Needs",
    "PairedRows",
    "RowValues",
    "Scores",
    "compare",
    "write_comparison",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value  # the next access does not come here
    return value
