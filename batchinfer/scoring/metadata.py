"""What a file of scores says of itself: JSON under a Parquet key of its own, beside that of a run."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from batchinfer.metadata import model_description
from batchinfer.version import __version__

if TYPE_CHECKING:
    from batchinfer.models.source import ModelSource
    from batchinfer.scoring.columns import ScoreColumns
    from batchinfer.scoring.encode import TextEncoder
    from batchinfer.scoring.settings import ScoreSettings
    from batchinfer.scoring.summary import ScoreSummary
    from batchinfer.scoring.windows import Window

METADATA_KEY = "batchinfer.score"

#: The softmax of the head is taken in this dtype, whatever dtype the model runs in.
HEAD_DTYPE = "float32"


def metadata_key(prefix: str) -> str:
    """Scores of two models in one file have different prefixes, and each says what it is."""
    return f"{METADATA_KEY}.{prefix}" if prefix else METADATA_KEY


def token_policy(
    columns: ScoreColumns, encoder: TextEncoder, window: Window, settings: ScoreSettings
) -> dict[str, Any]:
    """Which tokens are scored, and in what context."""
    policy: dict[str, Any] = {
        "window": window.size,
        "stride": window.stride,
        "min_context": window.min_context,
        "first_token": "never scored: it has no context",
    }
    if columns.messages is not None:
        return {**policy, "turns": settings.turns, "bos": "as the chat template writes it; context, never scored"}
    if columns.run is not None:
        return {**policy, "bos": "as in the run", "scored": "the output's token ids, as the run stored them"}
    if columns.holds_ids:
        return {**policy, "bos": "as in the token ids"}
    how = "in front of every text; context, never scored" if encoder.adds_bos else "none"
    scored = "all tokens with a context" if columns.text is not None else "the continuation, tokenized with the context"
    return {**policy, "bos": how, "bos_option": encoder.bos, "scored": scored}


def score_metadata(
    settings: ScoreSettings,
    columns: ScoreColumns,
    model: ModelSource,
    digests: dict[str, str | None],
    engine_settings: dict[str, Any],
    summary: ScoreSummary,
    names: list[str],
) -> dict[str, str]:
    """Parquet key-value metadata: one key, strict JSON. `names` are the result columns without prefix."""
    from batchinfer.scoring.output import DEFINITIONS

    figures = summary.to_dict()
    for name in ("output", "policy", "seconds"):
        del figures[name]
    description = {
        "version": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model_description(model),
        "digests": digests,
        "policy": summary.policy,
        "head_dtype": HEAD_DTYPE,
        "columns": {name: DEFINITIONS[name] for name in names},
        "engine": engine_settings,
        "input": {
            "texts": settings.texts,
            "limit": settings.limit,
            "columns": columns.to_dict(),
            "system": settings.system,
        },
        "corpus": figures,
    }
    return {metadata_key(settings.output_prefix or ""): json.dumps(description, allow_nan=False, ensure_ascii=False)}
