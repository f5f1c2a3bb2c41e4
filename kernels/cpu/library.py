"""Loads the C++ kernels: the build for the best instruction set that this machine has."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from batchinfer.errors import InputError
from batchinfer.kernels.cpu.build import sources_digest

#: Best first. Each is a shared library of the same source; see build.py.
INSTRUCTION_SETS = ("avx512_bf16", "avx2", "portable")
#: Names one of them, or "none": plain torch. For tests and for comparing.
FORCE_VARIABLE = "BATCHINFER_CPU_KERNELS"

_P, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class Layer(ctypes.Structure):
    """`bi_layer` of kernels.cpp."""

    _fields_ = [  # ctypes wants a plain list
        *((name, _P) for name in ("attn_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias", "mlp_norm")),
        *((name, _P) for name in ("gate_up", "gate_up_bias", "down", "down_bias")),
        ("window", _I32),
    ]


class Model(ctypes.Structure):
    """`bi_model` of kernels.cpp."""

    _fields_ = [
        *((name, _I32) for name in ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads")),
        *((name, _I32) for name in ("head_dim", "rope_dim")),
        ("eps", _F32),
        ("scale", _F32),
        *((name, _P) for name in ("embed", "final_norm", "cos", "sin")),
        ("layers", ctypes.POINTER(Layer)),
    ]


class Batch(ctypes.Structure):
    """`bi_batch` of kernels.cpp."""

    _fields_ = [
        ("num_tokens", _I32),
        ("num_seqs", _I32),
        ("block_size", _I32),
        ("max_blocks", _I64),
        *((name, _P) for name in ("token_ids", "slots", "block_tables", "query_starts", "query_lens")),
        ("kv_cache", _P),
        ("layer_stride", _I64),
    ]


_MODEL, _BATCH = ctypes.POINTER(Model), ctypes.POINTER(Batch)
_SIGNATURES: dict[str, list[type]] = {
    "bi_bind_threads": [_P, _I32],
    "bi_pack": [_P, _P, _I32, _I32],
    "bi_linear": [_P, _P, _P, _P, _I32, _I32, _I32],
    "bi_linear_add": [_P, _P, _P, _P, _I32, _I32, _I32],
    "bi_gate_up_silu": [_P, _P, _P, _P, _I32, _I32, _I32],
    "bi_rms_norm": [_P, _P, _P, _F32, _P, _I32, _I32],
    "bi_silu_and_mul": [_P, _P, _I32, _I32],
    "bi_head": [_P, _P, _I32, _I32, _I32, _I32, _P, _P, _P, _P, _P, _P, _P],
    "bi_sample": [_P, _I32, _I32, _P, _P, _P, _P, _P, _P, _I32, _P],
    "bi_tree_attention": [_MODEL, _BATCH, _I32, _P, _P],
    "bi_rope_and_store_kv": [_MODEL, _BATCH, _P, _P, _P, _P, _P, _P],
    "bi_copy_blocks": [_P, _I32, _I64, _I64, _P, _P, _I32],
    "bi_forward": [_MODEL, _BATCH, _P, _I32, _P],
    "bi_times": [_P],
}


def library_path(instruction_set: str) -> Path:
    return Path(__file__).parent / f"libbatchinfer_{instruction_set}.so"


def supported_instruction_sets() -> list[str]:
    """Those that this processor can run, best first."""
    flags: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                flags = set(line.split(":", 1)[1].split())
                break
    except OSError:
        pass
    out = []
    if {"avx512_bf16", "avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
        out.append("avx512_bf16")
    if {"avx2", "fma"} <= flags:
        out.append("avx2")
    return [*out, "portable"]


#: Return 0, or 1 where there was no memory.
_WITH_STATUS = {"bi_forward"}


class LibraryError(Exception):
    """A library that is not there or cannot be used; says why."""


def forced_instruction_set() -> str | None:
    """What the environment asks for: an instruction set, "torch", or None: the best.

    Raises InputError if it does not exist or cannot run here.
    """
    forced = os.environ.get(FORCE_VARIABLE)
    if not forced:
        return None
    if forced == "none":
        return "torch"
    if forced not in INSTRUCTION_SETS:
        raise InputError(f"{FORCE_VARIABLE} must be one of {', '.join(INSTRUCTION_SETS)}, none; got {forced!r}")
    if forced not in supported_instruction_sets():
        raise InputError(f"{FORCE_VARIABLE}={forced}: this processor cannot run it")
    try:
        load_library(forced)
    except LibraryError as error:
        raise InputError(f"{FORCE_VARIABLE}={forced}: {error}") from None
    return forced


@cache
def load_library(instruction_set: str) -> ctypes.CDLL:
    """Raises LibraryError."""
    # torch first: the kernels then run on the OpenMP runtime that it has loaded, so there is one.
    import torch  # noqa: F401

    path = library_path(instruction_set)
    if not path.exists():
        raise LibraryError(f"the {instruction_set} kernels are not built")
    try:
        library = ctypes.CDLL(str(path))
        for name in ("bi_isa", "bi_sources"):
            getattr(library, name).restype = ctypes.c_char_p
            getattr(library, name).argtypes = []
        if library.bi_sources().decode() != sources_digest():
            raise LibraryError(f"the {instruction_set} kernels were built from other sources, build them again")
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int32 if name in _WITH_STATUS else None
    except (OSError, AttributeError) as error:
        raise LibraryError(f"the {instruction_set} kernels do not load: {error}") from None
    return library
