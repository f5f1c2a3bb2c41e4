"""transformers' side of comparisons: tiny random models saved as folders, log-probabilities of whole sequences."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NUM_IDS = 320
SHAPE = {
    "vocab_size": NUM_IDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def save_model(family: str, folder: Path, num_ids: int = NUM_IDS, **values: Any) -> Any:
    """Save a model and a tokenizer of `num_ids` words (w0, w1, ...) in the folder; returns the transformers model.

    Weights are random, of a scale at which attention is sharp and predictions differ from token to token:
    a wrong mask, position or norm moves logits by far more than the tests' tolerances.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SHAPE | values))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _randomise(name, parameter)
    model.save_pretrained(folder)
    _save_tokenizer(folder, num_ids)
    return model


def _randomise(name: str, parameter: torch.Tensor) -> None:
    if name.endswith("norm.weight"):
        parameter.normal_(1, 0.2)
    elif name.endswith("bias"):
        parameter.normal_(0, 0.3)
    elif name.endswith(("q_proj.weight", "k_proj.weight")):
        parameter.normal_(0, 1.5 * parameter.shape[1] ** -0.5)
    elif name.endswith("embed_tokens.weight"):
        parameter.normal_(0, 0.5)
    else:
        parameter.normal_(0, parameter.shape[1] ** -0.5)


def _save_tokenizer(folder: Path, num_ids: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(num_ids)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def full_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """Log-softmax at every position of the whole sequence, computed at once and alone: [len(ids), vocab] fp32."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), -1)


def parity_recipe() -> ModuleType:
    """recipes/parity.py, which is a script and not part of the package."""
    path = Path(__file__).parents[1] / "recipes" / "parity.py"
    spec = importlib.util.spec_from_file_location("parity_recipe", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
