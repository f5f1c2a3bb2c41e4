"""The rows of two runs, paired: what evaluators read.

A *pair* is one sample of one prompt before and the same one after. A *prompt* is what the samples
of one input row have in common. A *cluster* is what is resampled together when intervals are made:
all rows of equal prompts, or of one value of `--cluster-column`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa

    from batchinfer.evals.result import RunIdentity

TokenIdArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Side:
    """One run's outputs in the order of the pairs. Every sequence has length num_pairs.

    Attributes:
        texts: None where the row failed or the column is null.
        token_ids: exactly the sampled ids; None as a whole where the input has no such column (plain texts).
        logprobs: nats, one for each of `token_ids`; None as a whole where the run stored none.
        finish_reasons: stop, length or error; None where unknown.
        num_output_tokens: -1 where unknown.
        errors: why a row has no output; None where it has one.
        run: the run that made them; `run.metadata` is all that its file says.
    """

    texts: Sequence[str | None]
    finish_reasons: Sequence[str | None]
    errors: Sequence[str | None]
    num_output_tokens: npt.NDArray[np.int64]
    token_ids: Sequence[TokenIdArray | None] | None
    logprobs: Sequence[FloatArray | None] | None
    run: RunIdentity


@dataclass(frozen=True, slots=True)
class PairedRows:
    """Pairs in the input order of `before`, samples ascending.

    Attributes:
        ids: [num_pairs] what rows were paired by: the id column's value, else the row's number.
        sample_index: [num_pairs]
        prompt_index: [num_pairs] 0 .. num_prompts - 1, ascending; the samples of a prompt share theirs.
        cluster_index: [num_pairs] 0 .. num_clusters - 1; rows of a prompt lie in the same cluster.
        inputs: [num_pairs] the input columns of `before`, as Arrow data, repeated for each sample.
        references: [num_pairs] text, None where null; None as a whole without a reference column.
        prompt_column: input column with what the model was given; None where unknown.
        paired_by: "column 'id'", "prompt", ..., for people.
        num_unpaired_before, num_unpaired_after: rows that the other side lacks.
        num_prompts_differ: pairs whose two prompts are not the same; None where prompts are unknown.
        num_row_params_differ: the same of the rows' own sampling parameters.
        notes: on how rows were paired, such as ids that occur twice. Shown with the warnings.
    """

    ids: Sequence[Any]
    sample_index: npt.NDArray[np.int64]
    prompt_index: npt.NDArray[np.int64]
    cluster_index: npt.NDArray[np.int64]
    inputs: pa.Table
    before: Side
    after: Side
    references: Sequence[str | None] | None = None
    reference_column: str | None = None
    cluster_column: str | None = None
    id_column: str | None = None
    prompt_column: str | None = None
    paired_by: str = "row number"
    num_unpaired_before: int = 0
    num_unpaired_after: int = 0
    num_prompts_differ: int | None = None
    num_row_params_differ: int | None = None
    notes: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_prompts(self) -> int:
        return int(self.prompt_index[-1]) + 1 if len(self) else 0

    @property
    def num_clusters(self) -> int:
        return int(self.cluster_index.max()) + 1 if len(self) else 0

    @property
    def max_samples(self) -> int:
        """Most paired samples of a prompt."""
        return int(np.bincount(self.prompt_index).max()) if len(self) else 0

    @property
    def have_token_ids(self) -> bool:
        return self.before.token_ids is not None and self.after.token_ids is not None

    @property
    def have_logprobs(self) -> bool:
        return self.have_token_ids and self.before.logprobs is not None and self.after.logprobs is not None

    @property
    def first_pair_of_prompt(self) -> npt.NDArray[np.int64]:
        """[num_prompts] index of each prompt's first pair."""
        return np.unique(self.prompt_index, return_index=True)[1]

    @property
    def prompt_ranges(self) -> list[range]:
        """The pairs of each prompt."""
        borders = [*self.first_pair_of_prompt.tolist(), len(self)]
        return [range(start, stop) for start, stop in pairwise(borders)]

    @property
    def cluster_of_prompt(self) -> npt.NDArray[np.int64]:
        """[num_prompts]"""
        return self.cluster_index[self.first_pair_of_prompt]
