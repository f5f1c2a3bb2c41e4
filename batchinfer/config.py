"""Frozen, validated configuration of the engine. Unknown keys and impossible values are errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVDtype = Literal["auto", "fp8"]
Policy = Literal["prefix", "fcfs", "priority"]

#: KV positions per attention tile. Tiles lie at fixed absolute positions, whatever the block size.
TILE = 64
BLOCK_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine runs. None of these changes a token or a logprob, except `dtype`, `kv_dtype` and
    `device`.

    On a GPU that takes `deterministic`: without it, what runs beside a row may change its last bits.

    Attributes:
        dtype: of weights and, unless `kv_dtype` says otherwise, of KV. "auto": bfloat16 where the checkpoint is
            16-bit or quantised and the device computes it natively, else float32.
        kv_dtype: of KV. "auto": that of the weights. "fp8": 8 bits for a number, and a scale in fp32 for the key and
            the value of each token and KV head: about half the memory of 16 bits, and log-probabilities that differ.
        device: "auto" (a GPU if one is there, else the CPU), "cpu", "cuda", "cuda:1", ...
        threads: CPU threads; None: the physical cores this process may use.
        max_batch_tokens: token budget of a step, prompt chunks and decodes together.
        max_num_seqs: sequences running at once.
        kv_memory_bytes: size of the KV pool; None: what the job can use, at most half of the free memory, or on a
            GPU what steps leave of it.
        block_size: tokens per KV block, one of 16, 32, 64, 128, 256.
        policy: order of admission: "prefix" (depth-first through the prefix tree), "fcfs", "priority".
        prefix_sharing: compute shared prefixes once.
        max_model_len: most tokens of prompt and output together; None: what the model was made for.
        deterministic: on a GPU, a row's bits do not depend on its company; costs some speed. On a CPU they never do.
    """

    dtype: Dtype = "auto"
    kv_dtype: KVDtype = "auto"
    device: str = "auto"
    threads: int | None = None
    max_batch_tokens: int = 2048
    max_num_seqs: int = 256
    kv_memory_bytes: int | None = None
    block_size: int = TILE
    policy: Policy = "prefix"
    prefix_sharing: bool = True
    max_model_len: int | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in get_args(Dtype):
            raise ValueError(f"dtype must be one of {', '.join(get_args(Dtype))}, got {self.dtype!r}")
        if self.kv_dtype not in get_args(KVDtype):
            raise ValueError(f"kv_dtype must be one of {', '.join(get_args(KVDtype))}, got {self.kv_dtype!r}")
        if self.policy not in get_args(Policy):
            raise ValueError(f"policy must be one of {', '.join(get_args(Policy))}, got {self.policy!r}")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {self.block_size!r}")
        for name in ("threads", "max_batch_tokens", "max_num_seqs", "kv_memory_bytes", "max_model_len"):
            value = getattr(self, name)
            if value is None and name in ("threads", "kv_memory_bytes", "max_model_len"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number from 1, got {value!r}")
