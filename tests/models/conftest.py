"""Tiny models in Hugging Face layout and in GGUF, written by the libraries that people use to write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
#: Byte-level characters of the 256 bytes, in GPT-2's order, then merges built on them.
_MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o"), ("1", "2"), ("Ġ", "Ġ")]


@pytest.fixture
def hf_model() -> Callable[..., Any]:
    """family, folder, config values -> the transformers model saved there (random weights, biases and norms too)."""

    def make(family: str, folder: Path, **values: Any) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **(SHAPE | values))
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.1)
        model.save_pretrained(folder)
        return model

    return make


@pytest.fixture
def byte_tokenizer() -> Callable[..., Any]:
    """folder -> a byte-level BPE saved there as tokenizer.json and tokenizer_config.json; its transformers twin."""

    def make(folder: Path, adds_bos: bool = True, chat_template: str | None = None) -> Any:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens = ["<unk>", "<s>", "</s>", *alphabet, *(left + right for left, right in _MERGES)]
        vocab = {token: index for index, token in enumerate(tokens)}
        backend = Tokenizer(models.BPE(vocab=vocab, merges=_MERGES))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<unk>", "<s>", "</s>")])
        if adds_bos:
            backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        fast = PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=chat_template
        )
        fast.save_pretrained(folder)
        return fast

    return make


@pytest.fixture
def gguf_model(tmp_path: Path) -> Callable[..., Path]:
    """Write a tiny GGUF model: tensors by GGUF name as float32, stored as `kind`; metadata may be overridden."""

    def make(
        tensors: dict[str, np.ndarray],
        kind: str = "F32",
        arch: str = "llama",
        name: str = "tiny.gguf",
        drop: tuple[str, ...] = (),
        **metadata: Any,
    ) -> Path:
        import gguf

        path = tmp_path / name
        writer = gguf.GGUFWriter(path, arch)
        values: dict[str, Any] = {
            "block_count": 2,
            "context_length": 256,
            "embedding_length": 256,
            "feed_forward_length": 256,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10000.0,
        }
        for key, value in (values | metadata).items():
            if key in drop:
                continue
            full = key if "general." in key or key.startswith(("split.", "tokenizer.")) else f"{arch}.{key}"
            _add_value(writer, full, value)
        quant = gguf.GGMLQuantizationType[kind]
        for tensor_name, array in tensors.items():
            if array.ndim == 1 or kind == "F32":
                writer.add_tensor(tensor_name, array.astype(np.float32))
            else:
                writer.add_tensor(tensor_name, gguf.quantize(array.astype(np.float32), quant), raw_dtype=quant)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def _add_value(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture
def gguf_tensors() -> Callable[..., dict[str, np.ndarray]]:
    """Random tensors of a 2-layer model with 256 channels, 4 heads, 2 KV heads, 32 tokens, by GGUF name."""

    def make(tied: bool = True, qkv_bias: bool = False, qk_norm: bool = False) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (32, 256), "output_norm.weight": (256,)}
        if not tied:
            shapes["output.weight"] = (32, 256)
        for layer in range(2):
            rows = {"attn_q": 256, "attn_k": 128, "attn_v": 128, "attn_output": 256, "ffn_gate": 256, "ffn_up": 256}
            shapes |= {f"blk.{layer}.{name}.weight": (size, 256) for name, size in (rows | {"ffn_down": 256}).items()}
            shapes |= {f"blk.{layer}.{name}.weight": (256,) for name in ("attn_norm", "ffn_norm")}
            if qkv_bias:
                shapes |= {f"blk.{layer}.{name}.bias": (rows[name],) for name in ("attn_q", "attn_k", "attn_v")}
            if qk_norm:
                shapes |= {f"blk.{layer}.{name}.weight": (64,) for name in ("attn_q_norm", "attn_k_norm")}
        return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}

    return make
