"""Offline LLM batch inference: whole datasets of prompts in, completions out.

    from batchinfer import Engine, SamplingParams

    engine = Engine("smollm2-135m")
    completions = engine.generate(["The capital of France is"], SamplingParams(max_tokens=16))
    scores = engine.score([("The capital of France is", " Paris")])

The names below are imported at first use, so that `import batchinfer` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from batchinfer.version import __version__

if TYPE_CHECKING:
    from batchinfer.config import EngineConfig
    from batchinfer.engine.engine import Engine
    from batchinfer.errors import InputError
    from batchinfer.scoring.api import score
    from batchinfer.scoring.result import RowScore
    from batchinfer.types import Completion, FinishReason, Prompt, RowError, SamplingParams

# public name -> module that defines it
_EXPORTS = {
    "Completion": "batchinfer.types",
    "Engine": "batchinfer.engine.engine",
    "EngineConfig": "batchinfer.config",
    "FinishReason": "batchinfer.types",
    "InputError": "batchinfer.errors",
    "Prompt": "batchinfer.types",
    "RowError": "batchinfer.types",
    "RowScore": "batchinfer.scoring.result",
    "SamplingParams": "batchinfer.types",
    "score": "batchinfer.scoring.api",
}

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "InputError",
    "Prompt",
    "RowError",
    "RowScore",
    "SamplingParams",
    "__version__",
    "score",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
