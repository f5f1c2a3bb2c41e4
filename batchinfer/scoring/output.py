"""Row scores -> Arrow columns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinfer.output.arrays import error_column, list_column
from batchinfer.output.schema import ERROR_TYPE, added_fields
from batchinfer.scoring.result import RowScore

#: What the fields of scores say of themselves begins with this, so that a run's own columns keep their names.
KIND = "score."

_COLUMNS: dict[str, pa.DataType] = {
    "num_scored_tokens": pa.int32(),
    "num_scored_bytes": pa.int64(),
    "num_scored_words": pa.int64(),
    "nll": pa.float64(),
    "perplexity": pa.float64(),
    "bits_per_byte": pa.float64(),
    "is_greedy": pa.bool_(),
    "sees_all": pa.bool_(),
    "scored_token_ids": pa.list_(pa.int32()),
    "token_logprobs": pa.list_(pa.float32()),
    "token_entropies": pa.list_(pa.float32()),
    "error": ERROR_TYPE,
}

#: Of each column, for the metadata and the documentation. All logarithms are natural, all sums in fp64.
DEFINITIONS = {
    "num_scored_tokens": "tokens that were scored; the first token of a text has no context and is none of them",
    "num_scored_bytes": "UTF-8 bytes of the text of the scored tokens, special tokens left out",
    "num_scored_words": "words of that text, separated by whitespace",
    "nll": "minus the sum of the log-probabilities of the scored tokens, in nats, from an fp32 log-softmax of the "
    "model's own logits; null where no token was scored",
    "perplexity": "exp(nll / num_scored_tokens)",
    "bits_per_byte": "nll / ln 2 / num_scored_bytes",
    "is_greedy": "every scored token is the most probable one in its place (the lowest id of equals)",
    "sees_all": "every scored token was read with all that stands before it; false: the row was cut in windows",
    "scored_token_ids": "the tokens that were scored",
    "token_logprobs": "log-probability of each scored token, in nats",
    "token_entropies": "entropy of the distribution that each scored token was predicted from, in nats",
    "error": "why nothing was scored; the code nothing_to_score is no failure",
}


def score_fields(
    input_names: Collection[str], *, token_logprobs: bool, entropies: bool, prefix: str = ""
) -> list[pa.Field]:
    """The columns that scoring adds. Raises InputError if an input column has one of their names."""
    wanted = {
        "scored_token_ids": token_logprobs or entropies,
        "token_logprobs": token_logprobs,
        "token_entropies": entropies,
    }
    columns = {name: type_ for name, type_ in _COLUMNS.items() if wanted.get(name, True)}
    return added_fields(columns, input_names, prefix, KIND)


class ScoreResultColumns:
    """See output.writer.ResultColumns."""

    def build_column(self, name: str, type_: pa.DataType, results: Sequence[RowScore]) -> pa.Array:
        return _BUILDERS[name.removeprefix(KIND)](results, type_)

    def num_bytes(self, results: Sequence[RowScore]) -> npt.NDArray[np.int64]:
        return np.array([64 + sum(len(array) * 4 for array in _arrays(row)) for row in results], dtype=np.int64)


def _arrays(row: RowScore) -> list[npt.NDArray[Any]]:
    arrays = (row.token_ids, row.token_logprobs, row.token_entropies)
    return [array for array in arrays if array is not None]


def _plain(name: str) -> Callable[[Sequence[RowScore], pa.DataType], pa.Array]:
    return lambda rows, type_: pa.array([getattr(row, name) for row in rows], type=type_)


def _lists(name: str) -> Callable[[Sequence[RowScore], pa.DataType], pa.Array]:
    return lambda rows, type_: list_column([getattr(row, name) for row in rows], type_)


_BUILDERS: dict[str, Callable[[Sequence[RowScore], pa.DataType], pa.Array]] = {
    **{name: _plain(name) for name in _COLUMNS},
    "scored_token_ids": _lists("token_ids"),
    "token_logprobs": _lists("token_logprobs"),
    "token_entropies": _lists("token_entropies"),
    "error": lambda rows, type_: error_column([row.error for row in rows], type_),
}
