"""Rope tables against the rotary embedding that transformers runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchinfer.errors import InputError
from batchinfer.models.hf_config import read_hf_config
from batchinfer.models.rope import inverse_frequencies, rope_tables
from batchinfer.models.spec import RopeSpec

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 512},
    "llama3 32x": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 128},
    "yarn": YARN,
    "yarn mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn mscale alone": YARN | {"mscale": 0.707},
    "yarn attention factor": YARN | {"attention_factor": 1.25},
    "yarn betas": YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
    "yarn 40x": YARN | {"factor": 40.0, "original_max_position_embeddings": 128},
}


def config_values(rope: dict[str, Any], theta: float) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": rope | {"rope_theta": theta},
    }


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1e6])
@pytest.mark.parametrize("name", KINDS)
def test_equal_to_transformers_up_to_four_times_the_original_length(name: str, theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = config_values(KINDS[name], theta)
    spec = read_hf_config(values, "config.json")
    theirs = LlamaRotaryEmbedding(LlamaConfig(**values))
    freqs, scaling = inverse_frequencies(spec.rope)
    assert torch.equal(freqs, theirs.inv_freq)
    assert scaling == pytest.approx(theirs.attention_scaling, abs=0)

    num_positions = 4 * KINDS[name].get("original_max_position_embeddings", 512)
    cos, sin = rope_tables(spec.rope, num_positions)
    assert cos.shape == sin.shape == (num_positions, 32)
    assert cos.dtype == torch.float32
    their_cos, their_sin = theirs(torch.zeros(1), torch.arange(num_positions)[None])
    torch.testing.assert_close(torch.cat([cos, cos], -1), their_cos[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat([sin, sin], -1), their_sin[0], atol=1e-5, rtol=0)


def test_freq_factors_divide_the_frequencies() -> None:
    plain, _ = inverse_frequencies(RopeSpec("default", 10000.0, 8))
    slowed, _ = inverse_frequencies(RopeSpec("default", 10000.0, 8, freq_factors=(1.0, 2.0, 4.0, 8.0)))
    assert torch.equal(slowed * torch.tensor([1.0, 2.0, 4.0, 8.0]), plain)


def test_unknown_kind_is_named() -> None:
    with pytest.raises(InputError, match="'longrope'"):
        rope_tables(RopeSpec("longrope", 10000.0, 8), 4)
