"""What is compiled ahead of time: a kernel with the shapes and types of a model that it would be launched for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with what it is specialised for, as a launch with such arguments would compile it.

    `signature` holds the type of every parameter that is no constexpr, in any order: "*bf16", "fp32", "i32",
    or "i32:16" for an integer that is a multiple of 16. Pointers are taken to be aligned to 16 bytes, which
    is what torch gives; "*bf16:1" is one that is not.
    """

    label: str  # what it is for: "llama-3-8b qkv, bf16"
    kernel: Any  # a triton.jit function
    signature: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, Any]  # see launch.options
    product: str = ""  # variants of the same one give a row the same bits, so they multiply by the same instructions

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes that kernels are specialised for."""

    name: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int

    @property
    def qkv(self) -> int:
        """Columns of the fused projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


LLAMA_8B = ModelShape("llama-3-8b", 4096, 14336, 32, 8, 128, 128256)
SMOLLM2_135M = ModelShape("smollm2-135m", 576, 1536, 9, 3, 64, 49152)
SHAPES = (LLAMA_8B, SMOLLM2_135M)

#: Types of weights and activations, by Triton's names.
DTYPES = ("bf16", "fp16")
