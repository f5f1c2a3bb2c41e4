"""What an output file says of the run that made it: JSON under the Parquet key `batchinfer`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from batchinfer.params import ResolvedParams
from batchinfer.settings import JobSettings
from batchinfer.version import __version__

if TYPE_CHECKING:
    from batchinfer.job_input import InputRows
    from batchinfer.models.source import ModelSource
    from batchinfer.summary import RowCounts

METADATA_KEY = "batchinfer"

#: The softmax of the head is taken in this dtype, whatever dtype the model runs in.
HEAD_DTYPE = "float32"

LOGPROB_DEFINITIONS = {
    "raw": "natural log-softmax of the model's own logits, before penalties, temperature and truncation",
    "processed": "natural log of the probability in the distribution the token was drawn from: after penalties, "
    "banned ids, temperature, top_k, top_p and min_p, renormalised; greedy rows: at temperature 1, not truncated",
}


def model_digests(model: ModelSource) -> dict[str, str | None]:
    """sha256 of what tokens and logprobs depend on. Reads every weight file once."""
    template = model.tokenizer.chat_template
    return {
        "model": model.digest(),
        "tokenizer": model.tokenizer.digest(),
        "chat_template": None if template is None else _sha256(template),
    }


def model_description(model: ModelSource) -> dict[str, str | None]:
    adapter = model.adapter
    return {
        "name": model.name,
        "adapter": None if adapter is None else str(adapter.folder),
        "format": model.format,
        "architecture": model.spec.architecture,
    }


def output_metadata(
    settings: JobSettings,
    rows: InputRows,
    model: ModelSource,
    digests: dict[str, str | None],
    params: ResolvedParams,
    engine_settings: dict[str, Any],
    counted: RowCounts,
    engine_counts: Mapping[str, int],
    job: Mapping[str, Any],
) -> dict[str, str]:
    """Parquet key-value metadata: one key, strict JSON.

    Args:
        counted: the rows of the file.
        engine_counts: over all runs of the job.
        job: which job wrote it: its name, its identity, the stamp of its input.
    """
    description = {
        **job,
        "version": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model_description(model),
        "digests": digests,
        "params": params.to_dict(),
        "logprobs": _logprobs_meaning(params),
        "engine": engine_settings,
        "input": {
            "prompts": settings.prompts,
            "num_rows": counted.num_rows,
            "limit": settings.limit,
            "columns": {name: column for name, column in asdict(rows.columns).items() if column is not None},
            "system": settings.system,
        },
        "counts": {**counted.counts(), **engine_counts},
        "failed_by_code": counted.failed_by_code,
    }
    return {METADATA_KEY: json.dumps(description, allow_nan=False, ensure_ascii=False)}


def _logprobs_meaning(params: ResolvedParams) -> dict[str, Any]:
    """None for a mode that rows set themselves; each definition is given under its mode."""
    mode = None if "logprobs_mode" in params.row_fields else params.params.logprobs_mode
    definitions = LOGPROB_DEFINITIONS if mode is None else {mode: LOGPROB_DEFINITIONS[mode]}
    return {
        "mode": mode,
        "definition": definitions[mode] if mode else definitions,
        "prompt_logprobs": LOGPROB_DEFINITIONS["raw"],
        "head_dtype": HEAD_DTYPE,
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
