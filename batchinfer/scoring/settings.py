"""What a scoring job is told to do, checked before any work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from batchinfer.config import EngineConfig
from batchinfer.errors import InputError
from batchinfer.scoring.chat import TURN_CHOICES, Turns
from batchinfer.scoring.encode import BOS_CHOICES, Bos
from batchinfer.settings import SETTINGS, Origins, Setting, engine_config, setting

_SHARED = ("prompts", "messages_column", "system", "limit", "model", "adapter")  # with `run`, beside engine and output
_OF_RUNS = ("policy", "output_format", "max_row_errors", "flush_seconds", "flush_rows")

SCORE_SETTINGS: dict[str, Setting] = {
    one.name: one
    for one in (
        *(SETTINGS[name] for name in _SHARED),
        setting("input", "text_column", "string"),
        setting("input", "context_column", "string"),
        setting("input", "continuation_column", "string"),
        setting("score", "turns", "string", flag="--score"),
        setting("score", "bos", "string"),
        setting("score", "window", "integer"),
        setting("score", "stride", "integer"),
        setting("score", "token_logprobs", "boolean"),
        setting("score", "entropies", "boolean"),
        *(one for one in SETTINGS.values() if one.section in ("engine", "output") and one.name not in _OF_RUNS),
    )
}


@dataclass(frozen=True, slots=True)
class ScoreSettings:
    """One scoring job, as asked for. Nothing has been opened yet.

    Attributes:
        texts: what holds the texts; see dataset.source.open_source.
        output_prefix: None: nothing, or "score_" for the output of a run, which has a column error itself.
        window, stride: None: see Window.of.
    """

    texts: str
    model: str
    output: Path
    engine: EngineConfig
    adapter: str | None = None
    text_column: str | None = None
    context_column: str | None = None
    continuation_column: str | None = None
    messages_column: str | None = None
    system: str | None = None
    limit: int | None = None
    turns: Turns = "assistant"
    bos: Bos = "auto"
    window: int | None = None
    stride: int | None = None
    token_logprobs: bool = False
    entropies: bool = False
    output_prefix: str | None = None
    overwrite: bool = False
    strict: bool = False


_OTHERS = {field.name for field in fields(ScoreSettings)} - {"texts", "model", "output", "engine"}
_CHOICES = {"turns": TURN_CHOICES, "bos": BOS_CHOICES}


def score_settings(flags: Mapping[str, Any], config: Mapping[str, Any], config_path: Path | None) -> ScoreSettings:
    """Flags over config file over defaults. Both map setting names to values that somebody gave.

    Raises InputError naming the flag or the key in the file whose value is missing or impossible.
    """
    origin = Origins(flags, config_path, SCORE_SETTINGS)
    merged = {**config, **flags}
    for name, flag in (("prompts", "TEXTS"), ("model", "--model"), ("output", "--output")):
        if not merged.get(name):
            raise InputError(f"{flag} is missing; give it, or {SCORE_SETTINGS[name].config_name} in a --config file")
    for name, choices in _CHOICES.items():
        if merged.get(name, choices[0]) not in choices:
            raise InputError(f"{origin(name)} must be one of {', '.join(choices)}, got {merged[name]!r}")
    for name in ("limit", "window", "stride"):
        if merged.get(name, 1) < 1:
            raise InputError(f"{origin(name)} must be at least 1, got {merged[name]}")
    return ScoreSettings(
        texts=merged["prompts"],
        model=merged["model"],
        output=Path(merged["output"]),
        engine=engine_config(merged, origin),
        **{name: merged[name] for name in _OTHERS if name in merged},
    )
