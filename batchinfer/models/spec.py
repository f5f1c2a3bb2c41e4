"""What a decoder looks like, read from a Hugging Face config: the one table of supported families.

To add a family, add a row to `FAMILIES`; the decoder (decoder.py) is driven by the `DecoderSpec` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from batchinfer.errors import InputError


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding, as `transformers` parametrises it.

    `kind` is one of default, linear, llama3, yarn; anything else is refused when the config is read.
    """

    kind: str
    theta: float
    dim: int  # rotated channels of a head; head_dim unless partial_rotary_factor is set
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    attention_factor: float | None = None  # yarn; None: derived
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    freq_factors: tuple[float, ...] | None = None  # [dim / 2] divisors of the frequencies (GGUF rope_freqs.weight)


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A pre-norm decoder with grouped-query attention and a gated MLP."""

    architecture: str  # e.g. "LlamaForCausalLM"
    vocab_size: int  # rows of the embedding, padding included
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position: int  # positions the model was made for, rope scaling included
    tie_word_embeddings: bool
    qkv_bias: bool  # Qwen2; Llama with attention_bias
    o_bias: bool  # Llama with attention_bias
    mlp_bias: bool
    qk_norm: bool  # Qwen3: RMSNorm over head_dim on q and k before rope
    hidden_act: str  # "silu"
    sliding_windows: tuple[int | None, ...]  # [num_layers]; W: a query sees itself and the W - 1 keys before it
    dtype: str | None  # dtype of the checkpoint: "bfloat16", ...; None: not stated


#: Bytes of the scale that each key and each value of an fp8 KV cache has, for each token and KV head.
KV_SCALE_BYTES = 4


def kv_bytes_per_token(spec: DecoderSpec, number_bytes: int, scale_bytes: int = 0) -> int:
    """KV of a token in all layers.

    Args:
        number_bytes: of each number; 1 is fp8.
        scale_bytes: of each vector; KV_SCALE_BYTES for fp8.
    """
    return 2 * spec.num_layers * spec.num_kv_heads * (spec.head_dim * number_bytes + scale_bytes)


#: Where a family's config says whether a linear layer has a bias: a key of the config, or a fixed answer.
BiasRule = bool | str
#: "none": full attention; "all": every layer has `sliding_window`; "layer_types": as the list of that name says.
SlidingRule = Literal["none", "all", "layer_types"]


@dataclass(frozen=True, slots=True)
class Family:
    """What a model class fixes, and what its config means when it leaves a key out (as in transformers 5)."""

    architecture: str
    model_type: str
    max_position: int  # default of max_position_embeddings
    num_kv_heads: int | None = None  # default of num_key_value_heads; None: num_attention_heads
    head_dim: int | None = None  # default of head_dim; None: hidden_size / num_attention_heads
    qkv_bias: BiasRule = False
    o_bias: BiasRule = False
    mlp_bias: BiasRule = False
    qk_norm: bool = False
    sliding: SlidingRule = "none"
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of further keys
    gguf_arch: str | None = None  # general.architecture that stands for it


FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        Family(
            "LlamaForCausalLM",
            "llama",
            2048,
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mlp_bias="mlp_bias",
            gguf_arch="llama",
        ),
        # Mistral files in GGUF say "llama" too.
        Family(
            "MistralForCausalLM",
            "mistral",
            131072,
            num_kv_heads=8,
            sliding="all",
            defaults={"sliding_window": 4096},
        ),
        Family(
            "Qwen2ForCausalLM",
            "qwen2",
            32768,
            num_kv_heads=32,
            qkv_bias=True,
            sliding="layer_types",
            defaults={"sliding_window": 4096, "max_window_layers": 28},
            gguf_arch="qwen2",
        ),
        Family(
            "Qwen3ForCausalLM",
            "qwen3",
            32768,
            num_kv_heads=32,
            head_dim=128,
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            sliding="layer_types",
            defaults={"sliding_window": 4096, "max_window_layers": 28},
            gguf_arch="qwen3",
        ),
    )
}


def choose_max_model_len(asked: int | None, spec: DecoderSpec, model: str) -> int:
    """Most tokens of prompt and output together. Raises InputError for more than the model was made for."""
    if asked is not None and asked > spec.max_position:
        raise InputError(f"--max-model-len {asked} is above the {spec.max_position} tokens that {model} was made for")
    return asked or spec.max_position
