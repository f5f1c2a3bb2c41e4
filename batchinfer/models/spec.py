"""What a decoder looks like, read from a Hugging Face config: the one table of supported families.

To add a family, add a row to `FAMILIES`; the decoder (decoder.py) is driven by the `DecoderSpec` alone.
"""

from __future__ import annotations

from dataclasses import dataclass


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
