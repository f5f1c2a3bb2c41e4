"""Random models small enough to run thousands of steps, and analytic stubs whose tokens are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from fakes import TINY_SPEC, FakeTokenizer
from torch import Tensor

from batchinfer.attention.backend import ReferenceAttention
from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.kernels import reference
from batchinfer.kernels.cpu.decoder import CpuDecoder
from batchinfer.kernels.cpu.library import library_path, supported_instruction_sets
from batchinfer.models.decoder import Decoder, KVCache, StepInputs
from batchinfer.models.spec import DecoderSpec, RopeSpec
from batchinfer.models.weights import DecoderWeights, LayerWeights

#: Grouped-query, vocabulary padded beyond the tokenizer's 256 ids, odd sizes where they are allowed.
SMALL_SPEC = replace(
    TINY_SPEC,
    vocab_size=272,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    tie_word_embeddings=False,
    rope=RopeSpec("default", 10_000.0, 16),
    sliding_windows=(None, None),
)
EOS = (2, 5)
#: C++ kernels that were built and can run here.
INSTRUCTION_SETS = [name for name in supported_instruction_sets() if library_path(name).exists()]


class LetterTokenizer(FakeTokenizer):
    """Ids decode to letters, so that stop strings are met often."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + int(i) % 26) for i in ids)


def random_weights(spec: DecoderSpec, dtype: torch.dtype, seed: int = 0) -> DecoderWeights:
    """Weights of a scale that gives varied, not too certain predictions."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float | None = None) -> Tensor:
        return (torch.randn(shape, generator=generator) * (scale or shape[-1] ** -0.5)).to(dtype)

    def norm(size: int) -> Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator)).to(dtype)

    heads = spec.num_heads + 2 * spec.num_kv_heads
    embed = draw(spec.vocab_size, spec.hidden_size, scale=1.0)
    layers = [
        LayerWeights(
            attn_norm=norm(spec.hidden_size),
            qkv=draw(heads * spec.head_dim, spec.hidden_size),
            qkv_bias=draw(heads * spec.head_dim, scale=0.3) if spec.qkv_bias else None,
            q_norm=norm(spec.head_dim) if spec.qk_norm else None,
            k_norm=norm(spec.head_dim) if spec.qk_norm else None,
            o=draw(spec.hidden_size, spec.num_heads * spec.head_dim),
            o_bias=None,
            mlp_norm=norm(spec.hidden_size),
            gate_up=draw(2 * spec.intermediate_size, spec.hidden_size),
            gate_up_bias=None,
            down=draw(spec.hidden_size, spec.intermediate_size),
            down_bias=None,
        )
        for _ in range(spec.num_layers)
    ]
    head = embed if spec.tie_word_embeddings else draw(spec.vocab_size, spec.hidden_size, scale=0.3)
    return DecoderWeights(embed=embed, layers=layers, final_norm=norm(spec.hidden_size), lm_head=head)


def tiny_engine(
    config: EngineConfig | None = None,
    *,
    spec: DecoderSpec = SMALL_SPEC,
    dtype: torch.dtype = torch.float32,
    max_model_len: int = 256,
    weights: DecoderWeights | None = None,
    kernels: str | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Engine:
    """An engine over a random decoder and one letter per token; invariants are asserted after each step.

    Args:
        kernels: instruction set of the C++ kernels (bfloat16 only); None: plain torch.
        kv_dtype: of the KV of plain torch; None: dtype.
    """
    weights = weights or random_weights(spec, dtype)
    decoder = (
        Decoder(spec, weights, ReferenceAttention, max_model_len, kv_dtype)
        if kernels is None
        else CpuDecoder(spec, weights, kernels, max_model_len)
    )
    engine = Engine.from_parts(decoder, LetterTokenizer(), EOS, max_model_len, config)
    engine.check_integrity = True
    return engine


def kv_bytes(engine: Engine, num_blocks: int) -> int:
    """--kv-memory for so many blocks."""
    return num_blocks * engine.kv_bytes_per_token * engine.config.block_size


class ForcedModel:
    """A stub whose most probable token at position p is the one listed for p + 1, whatever came before.

    `tokens[p]` is what a greedy row of `num_prompt` tokens generates as its (p - num_prompt)-th token.
    """

    def __init__(self, num_prompt: int, tokens: Sequence[int], vocab_size: int = 320, margin: float = 10.0) -> None:
        self.spec = replace(TINY_SPEC, vocab_size=vocab_size)
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.num_prompt = num_prompt
        self.tokens = torch.tensor(tokens)
        self.margin = margin

    def make_kv(self, num_blocks: int, block_size: int) -> KVCache:
        return KVCache.make(self.spec, num_blocks, block_size, self.dtype, self.device)

    def forward(self, inputs: StepInputs, kv: KVCache) -> Tensor:
        return inputs.positions[:, None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        place = (hidden[:, 0].long() + 1 - self.num_prompt).clamp(0, len(self.tokens) - 1)
        return torch.nn.functional.one_hot(self.tokens[place], self.spec.vocab_size) * self.margin

    def target_logprobs(self, hidden: Tensor, targets: Tensor) -> reference.TargetLogprobs:
        logits = self.logits(hidden)
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return reference.TargetLogprobs(logprobs.gather(1, targets[:, None])[:, 0], entropy, logits.argmax(-1))


def forced_engine(
    tokens: Sequence[int],
    tokenizer: Any = None,
    *,
    num_prompt: int = 3,
    eos: tuple[int, ...] = EOS,
    vocab_size: int = 320,
    max_model_len: int = 256,
) -> Engine:
    """An engine whose greedy rows of `num_prompt` tokens generate `tokens`."""
    model = ForcedModel(num_prompt, tokens, vocab_size)
    engine = Engine.from_parts(model, tokenizer or FakeTokenizer(), eos, max_model_len)
    engine.check_integrity = True
    return engine
