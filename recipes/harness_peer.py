"""lm-evaluation-harness with its Hugging Face back end, on a model of batchinfer's: for the recipes that compare."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from batchinfer.models.source import ModelSource
from batchinfer.models.tokenizer import Tokenizer


def load_harness(source: ModelSource, dtype: torch.dtype, batch_size: int, max_length: int | None = None) -> Any:
    """An `HFLM` of the same weights and tokenizer, on the CPU. Nothing is downloaded.

    Args:
        max_length: tokens read at once; None: the model's context.
    Raises ImportError if lm-eval is not installed (it is in the extra `dev`).
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from lm_eval.models.huggingface import HFLM
    from parity import load_transformers

    model = load_transformers(source, dtype)
    model.set_attn_implementation("sdpa")  # its own default, and the faster one
    return HFLM(
        pretrained=model,
        tokenizer=hf_tokenizer(source.tokenizer),
        batch_size=batch_size,
        max_length=max_length or source.spec.max_position,
        add_bos_token=False,  # what it puts before a rolling text itself is enough
        device="cpu",
    )


def hf_tokenizer(tokenizer: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    # A copy: transformers turns truncation and padding on and off in the one that it is given.
    backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokenizer.special_tokens)


def loglikelihood(harness: Any, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
    """(sum of log-probabilities of the continuation, all of its tokens are the most probable ones) of each pair."""
    return harness.loglikelihood(_requests("loglikelihood", pairs), disable_tqdm=True)


def rolling(harness: Any, texts: Sequence[str]) -> list[float]:
    """Log-likelihood of each text, from a prefix token on."""
    return harness.loglikelihood_rolling(
        _requests("loglikelihood_rolling", [(text,) for text in texts]), disable_tqdm=True
    )


def _requests(kind: str, arguments: Sequence[tuple[str, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=one, idx=0, metadata=("recipe", place, 1))
        for place, one in enumerate(arguments)
    ]
