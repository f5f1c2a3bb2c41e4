"""A tiny Llama folder, written without transformers so that tests that use it stay quick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def write_tiny_llama(
    folder: Path, *, config: dict[str, Any] | None = None, generation: dict[str, Any] | None = None, chat: bool = True
) -> Path:
    """Make a model folder. Values of `config` and `generation` go to the two JSON files; None removes a key."""
    values = {key: value for key, value in {**CONFIG, **(config or {})}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    _write_weights(folder)
    _write_tokenizer(folder, CHAT_TEMPLATE if chat else None)
    return folder


def _write_weights(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    hidden, inner, heads, kv_heads = 32, 48, 2, 1
    head_dim = hidden // heads
    tensors = {"model.embed_tokens.weight": draw(272, hidden), "model.norm.weight": torch.ones(hidden)}
    for layer in range(2):
        name = f"model.layers.{layer}."
        tensors |= {
            name + "input_layernorm.weight": torch.ones(hidden),
            name + "post_attention_layernorm.weight": torch.ones(hidden),
            name + "self_attn.q_proj.weight": draw(heads * head_dim, hidden),
            name + "self_attn.k_proj.weight": draw(kv_heads * head_dim, hidden),
            name + "self_attn.v_proj.weight": draw(kv_heads * head_dim, hidden),
            name + "self_attn.o_proj.weight": draw(hidden, heads * head_dim),
            name + "mlp.gate_proj.weight": draw(inner, hidden),
            name + "mlp.up_proj.weight": draw(inner, hidden),
            name + "mlp.down_proj.weight": draw(hidden, inner),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(folder: Path, chat_template: str | None) -> None:
    """Bytes, and <s> in front."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens[:2]])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if chat_template is not None:
        values["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
