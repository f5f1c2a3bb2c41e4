"""Fused weights from safetensors folders: equal to the transformers state dict; faults named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchinfer.errors import InputError
from batchinfer.models.source import resolve_model
from batchinfer.models.weights import DecoderWeights

FAMILIES = {
    "llama": {},
    "llama biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3 biases": {"head_dim": 16, "attention_bias": True},
}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return resolve_model(str(folder)).load_weights(dtype, torch.device("cpu"))


def rewrite(folder: Path, change: Any) -> None:
    """Apply `change` to the tensors of the one safetensors file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def set_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def assert_equal(weights: DecoderWeights, state: dict[str, torch.Tensor]) -> None:
    """Every tensor of the state dict is in its place, nothing else is there."""

    def expect(ours: torch.Tensor | None, *names: str) -> None:
        theirs = [state[name] for name in names if name in state]
        assert len(theirs) == (0 if ours is None else len(names)), names
        if ours is not None:
            assert ours.is_contiguous()
            assert torch.equal(ours, torch.cat(theirs)), names

    expect(weights.embed, "model.embed_tokens.weight")
    expect(weights.final_norm, "model.norm.weight")
    expect(weights.lm_head, "lm_head.weight")
    for i, layer in enumerate(weights.layers):
        p = f"model.layers.{i}."
        qkv = [f"{p}self_attn.{x}_proj" for x in "qkv"]
        expect(layer.attn_norm, p + "input_layernorm.weight")
        expect(layer.qkv, *(name + ".weight" for name in qkv))
        expect(layer.qkv_bias, *(name + ".bias" for name in qkv))
        expect(layer.q_norm, p + "self_attn.q_norm.weight")
        expect(layer.k_norm, p + "self_attn.k_norm.weight")
        expect(layer.o, p + "self_attn.o_proj.weight")
        expect(layer.o_bias, p + "self_attn.o_proj.bias")
        expect(layer.mlp_norm, p + "post_attention_layernorm.weight")
        expect(layer.gate_up, p + "mlp.gate_proj.weight", p + "mlp.up_proj.weight")
        expect(layer.gate_up_bias, p + "mlp.gate_proj.bias", p + "mlp.up_proj.bias")
        expect(layer.down, p + "mlp.down_proj.weight")
        expect(layer.down_bias, p + "mlp.down_proj.bias")


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_to_the_state_dict(name: str, hf_model: Any, tmp_path: Path) -> None:
    model = hf_model(name.split()[0], tmp_path, **FAMILIES[name])
    weights = load(tmp_path)
    assert len(weights.layers) == 2
    assert_equal(weights, model.state_dict())
    assert weights.lm_head is not weights.embed


def test_conversion_to_another_dtype(hf_model: Any, tmp_path: Path) -> None:
    model = hf_model("qwen2", tmp_path)
    assert_equal(load(tmp_path, torch.bfloat16), {k: v.to(torch.bfloat16) for k, v in model.state_dict().items()})


def test_sharded(hf_model: Any, tmp_path: Path) -> None:
    model = hf_model("llama", tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert_equal(load(tmp_path / "many"), model.state_dict())


def test_tied_without_head(hf_model: Any, tmp_path: Path) -> None:
    hf_model("llama", tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    weights = load(tmp_path)
    assert weights.lm_head is weights.embed


@pytest.mark.parametrize("equal", [True, False])
def test_tied_with_head_in_the_file_as_in_transformers(equal: bool, hf_model: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    hf_model("llama", tmp_path, tie_word_embeddings=True)
    rewrite(
        tmp_path,
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone() * (1 if equal else 2)}),
    )
    weights = load(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(weights.lm_head, theirs.lm_head.weight)
    assert (weights.lm_head is weights.embed) == equal


def test_untied_without_head_names_it(hf_model: Any, tmp_path: Path) -> None:
    hf_model("llama", tmp_path)
    rewrite(tmp_path, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(InputError, match=r"missing tensors: lm_head\.weight.*not tied"):
        load(tmp_path)


def test_missing_tensors_are_named(hf_model: Any, tmp_path: Path) -> None:
    hf_model("llama", tmp_path)
    rewrite(tmp_path, lambda t: [t.pop(name) for name in list(t) if "layers.1.mlp" in name or "norm" in name])
    with pytest.raises(InputError, match=r"model\.layers\.0\.input_layernorm\.weight.*and 4 more"):
        load(tmp_path)


def test_extra_tensor_is_named(hf_model: Any, tmp_path: Path) -> None:
    hf_model("llama", tmp_path)
    rewrite(tmp_path, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(InputError, match=r"does not have: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(tmp_path)


def test_more_layers_than_the_config_says(hf_model: Any, tmp_path: Path) -> None:
    hf_model("llama", tmp_path)
    set_config(tmp_path, num_hidden_layers=1)
    with pytest.raises(InputError, match=r"model\.layers\.1\."):
        load(tmp_path)


def test_old_rotary_buffers_are_ignored(hf_model: Any, tmp_path: Path) -> None:
    model = hf_model("llama", tmp_path)
    rewrite(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert_equal(load(tmp_path), model.state_dict())


def test_wrong_shape_is_named(hf_model: Any, tmp_path: Path) -> None:
    hf_model("llama", tmp_path)
    set_config(tmp_path, vocab_size=321)
    with pytest.raises(InputError, match=r"embed_tokens\.weight has shape \[320, 64\].*\[321, 64\]"):
        load(tmp_path)


def test_unsupported_tensor_type_is_named(hf_model: Any, tmp_path: Path) -> None:
    hf_model("llama", tmp_path)
    rewrite(tmp_path, lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(InputError, match=r"model\.norm\.weight has type I8"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 400, -1])
def test_cut_file(keep: int, hf_model: Any, tmp_path: Path) -> None:
    hf_model("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"model\.safetensors: not a whole safetensors file"):
        load(tmp_path)


def test_missing_shard_is_named(hf_model: Any, tmp_path: Path) -> None:
    model = hf_model("llama", tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="60KB")
    shard = sorted((tmp_path / "many").glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(InputError, match=shard.name):
        resolve_model(str(tmp_path / "many"))


def test_index_that_lies_is_named(hf_model: Any, tmp_path: Path) -> None:
    model = hf_model("llama", tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="60KB")
    path = tmp_path / "many" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"model\.extra\.weight"):
        load(tmp_path / "many")
    index["weight_map"]["model.extra.weight"] = "../one/model.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(InputError, match="not a file of this folder"):
        resolve_model(str(tmp_path / "many"))


def test_pytorch_files_only(hf_model: Any, tmp_path: Path) -> None:
    hf_model("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin: convert"):
        resolve_model(str(tmp_path))
