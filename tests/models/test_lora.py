"""LoRA adapters against PEFT: the same merged weights, the same refusals, and an identity of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_models import save_model
from safetensors.torch import load_file, save_file

from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.errors import InputError
from batchinfer.models.lora import LoraCheckpoint, read_adapter
from batchinfer.models.source import ModelSource, resolve_model, with_adapter
from batchinfer.models.weights import DecoderWeights

CPU = torch.device("cpu")
ATTENTION = ["q_proj", "v_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MakeAdapter = Callable[..., tuple[Path, Path, Path]]


@pytest.fixture
def make_adapter(tmp_path: Path) -> MakeAdapter:
    """(base, adapter, base merged with it by PEFT): folders of a random tiny model and a random adapter on it."""

    def make(family: str = "llama", values: dict[str, Any] | None = None, **config: Any) -> tuple[Path, Path, Path]:
        from peft import LoraConfig, get_peft_model

        base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
        model = save_model(family, base, **(values or {}))
        model.name_or_path = str(base)
        peft_model = get_peft_model(
            model, LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": ATTENTION} | config)
        )
        with torch.no_grad():
            for name, parameter in peft_model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.2)
        peft_model.save_pretrained(adapter)
        peft_model.merge_and_unload().save_pretrained(merged)
        (merged / "tokenizer.json").write_text((base / "tokenizer.json").read_text())
        return base, adapter, merged

    return make


def tensors(weights: DecoderWeights) -> dict[str, torch.Tensor]:
    found = {"embed": weights.embed, "final_norm": weights.final_norm, "lm_head": weights.lm_head}
    for index, layer in enumerate(weights.layers):
        for name in layer.__slots__:
            if getattr(layer, name) is not None:
                found[f"{index}.{name}"] = getattr(layer, name)
    return found


def assert_equal(one: ModelSource, two: ModelSource, dtype: torch.dtype = torch.float32) -> None:
    ours, theirs = tensors(one.load_weights(dtype, CPU)), tensors(two.load_weights(dtype, CPU))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


VARIANTS: dict[str, dict[str, Any]] = {
    "attention": {},
    "all linear layers": {"target_modules": ALL},
    "rank stabilised": {"target_modules": ALL, "use_rslora": True},
    "patterns": {
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 8},
        "alpha_pattern": {"down_proj": 3, "0.self_attn.o_proj": 40},
    },
    "some layers": {"target_modules": ALL, "layers_to_transform": [1]},
    "the head": {"target_modules": ["lm_head", "q_proj"]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_weights_are_those_of_peft(variant: str, make_adapter: MakeAdapter) -> None:
    base, adapter, merged = make_adapter(values={"tie_word_embeddings": False}, **VARIANTS[variant])
    ours = resolve_model(str(adapter))
    assert_equal(ours, resolve_model(str(merged)))
    before, after = (tensors(source.load_weights(torch.float32, CPU)) for source in (resolve_model(str(base)), ours))
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_fused_layers_of_other_families(family: str, make_adapter: MakeAdapter) -> None:
    base, adapter, merged = make_adapter(family, target_modules=ALL)
    assert_equal(with_adapter(resolve_model(str(base)), str(adapter)), resolve_model(str(merged)))


def test_the_sum_is_rounded_once(make_adapter: MakeAdapter) -> None:
    """Of a bf16 model: fp32 base plus fp32 product, then bf16."""
    base, adapter, merged = make_adapter(target_modules=ALL)
    exact = tensors(resolve_model(str(merged)).load_weights(torch.float32, CPU))
    found = tensors(with_adapter(resolve_model(str(base)), str(adapter)).load_weights(torch.bfloat16, CPU))
    for name, value in found.items():
        assert torch.equal(value, exact[name].bfloat16()), name


def test_scores_and_tokens_are_those_of_the_merged_model(make_adapter: MakeAdapter) -> None:
    base, adapter, merged = make_adapter(target_modules=ALL)
    config = EngineConfig(dtype="float32", device="cpu", threads=1)
    texts = ["w1 w2 w3 w4", "w5 w6 w300"]
    found = {name: Engine(str(name), config).score(texts)[0].nll for name in (base, adapter, merged)}
    assert found[adapter] == found[merged] != found[base]


def test_an_adapter_names_its_base_or_is_given_one(make_adapter: MakeAdapter) -> None:
    base, adapter, _ = make_adapter()
    assert (resolve_model(str(adapter)).path, resolve_model(str(adapter)).name) == (base, str(adapter))
    edit(adapter, base_model_name_or_path="some/model-that-is-nowhere")
    with pytest.raises(InputError, match=r"base of adapter .* Name another with --model BASE --adapter"):
        resolve_model(str(adapter))
    assert with_adapter(resolve_model(str(base)), str(adapter)).name == str(base)
    edit(adapter, base_model_name_or_path=None)
    with pytest.raises(InputError, match="does not name its base: give --model BASE --adapter"):
        resolve_model(str(adapter))
    assert resolve_model(str(adapter), default_base=str(base)).path == base


def test_the_identity_includes_the_adapter(make_adapter: MakeAdapter) -> None:
    base, adapter, _ = make_adapter()
    plain, with_it = resolve_model(str(base)), resolve_model(str(adapter))
    digest = with_it.digest()
    assert digest != plain.digest()
    assert digest == with_adapter(plain, str(adapter)).digest()
    weights = load_file(adapter / "adapter_model.safetensors")
    weights[next(iter(weights))] += 1e-3
    save_file(weights, adapter / "adapter_model.safetensors")
    changed = with_it.digest()
    assert changed != digest
    edit(adapter, lora_alpha=13)
    assert resolve_model(str(adapter)).digest() != changed


def test_the_tokenizer_of_the_adapter_counts_if_it_has_one(make_adapter: MakeAdapter) -> None:
    base, adapter, _ = make_adapter()
    assert resolve_model(str(adapter)).tokenizer.digest() == resolve_model(str(base)).tokenizer.digest()
    (adapter / "tokenizer.json").write_text((base / "tokenizer.json").read_text())
    (adapter / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert resolve_model(str(adapter)).tokenizer.chat_template == "{{ messages[0].content }}"
    assert resolve_model(str(base)).tokenizer.chat_template is None


def edit(adapter: Path, **values: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"use_dora": True}, "use_dora = True is not supported: merge the adapter with peft"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = "),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_16"}, "trains on a changed base"),
        ({"init_lora_weights": "olora"}, "trains on a changed base"),
        ({"r": 0}, "r must be at least 1"),
        ({"r": None}, "r must be a number"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number"),
        ({"r": 8}, "for rank 8"),
        ({"rank_pattern": {"q_proj": "2"}}, "q_proj must be a number, got '2'"),
        ({"rank_pattern": {"q_proj": 0}}, "q_proj must be at least 1"),
        ({"alpha_pattern": {"(q_proj": 2}}, "no regular expression"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
    ],
)
def test_what_cannot_be_merged_is_refused(values: dict[str, Any], words: str, make_adapter: MakeAdapter) -> None:
    _, adapter, _ = make_adapter()
    edit(adapter, **values)
    with pytest.raises(InputError, match=words):
        resolve_model(str(adapter)).load_weights(torch.float32, CPU)


def test_adapters_of_real_peft_that_are_more_than_products(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    for number, (config, words) in enumerate(
        [
            ({"target_modules": ["embed_tokens"]}, "not supported"),
            ({"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]}, "modules_to_save"),
            ({"target_modules": ATTENTION, "modules_to_save": ["lm_head"]}, "modules_to_save"),
            ({"target_modules": ATTENTION, "use_dora": True}, "use_dora"),
            ({"target_modules": ATTENTION, "init_lora_weights": "pissa"}, "changed base"),
        ]
    ):
        base, adapter = tmp_path / f"base{number}", tmp_path / f"adapter{number}"
        model = save_model("llama", base, tie_word_embeddings=False)
        model.name_or_path = str(base)
        get_peft_model(model, LoraConfig(r=4, **config)).save_pretrained(adapter)
        with pytest.raises(InputError, match=words):
            resolve_model(str(adapter)).load_weights(torch.float32, CPU)


def test_another_base_is_refused(make_adapter: MakeAdapter, tmp_path: Path) -> None:
    _, adapter, _ = make_adapter(target_modules=ALL)
    save_model("llama", tmp_path / "wide", hidden_size=128)
    save_model("llama", tmp_path / "flat", num_hidden_layers=2)
    with pytest.raises(InputError, match="is this its base"):
        with_adapter(resolve_model(str(tmp_path / "wide")), str(adapter)).load_weights(torch.float32, CPU)
    with pytest.raises(InputError, match="is no layer of the base"):
        with_adapter(resolve_model(str(tmp_path / "flat")), str(adapter)).load_weights(torch.float32, CPU)


def test_a_tied_head_cannot_be_adapted(make_adapter: MakeAdapter) -> None:
    base, adapter, _ = make_adapter(values={"tie_word_embeddings": False}, target_modules=["lm_head"])
    config = json.loads((base / "config.json").read_text())
    weights = load_file(base / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(InputError, match="the model's head is its embedding"):
        resolve_model(str(adapter)).load_weights(torch.float32, CPU)


def test_broken_folders_are_named(make_adapter: MakeAdapter, tmp_path: Path) -> None:
    base, adapter, _ = make_adapter()
    source = resolve_model(str(base))
    with pytest.raises(InputError, match=r"no adapter_config\.json"):
        with_adapter(source, str(base))
    with pytest.raises(InputError, match="no such folder"):
        with_adapter(source, str(tmp_path / "none"))
    with pytest.raises(InputError, match=r"has the adapter .* already"):
        with_adapter(resolve_model(str(adapter)), str(adapter))
    weights = load_file(adapter / "adapter_model.safetensors")
    first = next(name for name in weights if "lora_A" in name)
    save_file({name: value for name, value in weights.items() if name != first}, adapter / "adapter_model.safetensors")
    with pytest.raises(InputError, match="lacks lora_A"):
        resolve_model(str(adapter)).load_weights(torch.float32, CPU)
    (adapter / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(InputError, match="not a whole safetensors file"):
        resolve_model(str(adapter)).load_weights(torch.float32, CPU)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(InputError, match="safe_serialization=True"):
        resolve_model(str(adapter))
    edit(adapter, base_model_name_or_path=str(adapter))
    save_file(weights, adapter / "adapter_model.safetensors")
    with pytest.raises(InputError, match="is itself an adapter"):
        resolve_model(str(adapter))


def test_a_quantised_base_gets_the_product_in_fp32() -> None:
    """Reading into fp32 first: no rounding of the base to bf16 in between."""

    class Base:
        def shapes(self) -> dict[str, tuple[int, ...]]:
            return {"layer.weight": (2, 2), "other.weight": (1,)}

        def read_into(self, name: str, out: torch.Tensor) -> None:
            out.copy_(torch.full(out.shape, 1 + 2**-8 + 2**-9))  # between two bf16 numbers

        def close(self) -> None:
            self.closed = True

    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 2}))
        pair = {"A": torch.full((1, 2), 2**-5), "B": torch.full((2, 1), 2**-5)}
        save_file(
            {f"base_model.model.layer.lora_{side}.weight": value for side, value in pair.items()},
            folder / "adapter_model.safetensors",
        )
        base = Base()
        checkpoint = LoraCheckpoint(base, read_adapter(folder))
        out = torch.empty(2, 2, dtype=torch.bfloat16)
        checkpoint.read_into("layer.weight", out)
        assert out.tolist() == torch.full((2, 2), 1 + 2**-8 + 2**-9 + 2**-9).bfloat16().tolist()
        plain = torch.empty(1, dtype=torch.bfloat16)
        checkpoint.read_into("other.weight", plain)
        assert plain.item() == pytest.approx(1 + 2**-7)
        checkpoint.close()
        assert base.closed
