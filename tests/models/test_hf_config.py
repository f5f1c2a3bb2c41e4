"""config.json -> DecoderSpec: equal to what transformers makes of the same file; everything else is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchinfer.errors import InputError
from batchinfer.models.hf_config import read_eos_token_ids, read_generation_defaults, read_hf_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SHAPE = {key: value for key, value in BASE.items() if key != "architectures"} | {"num_key_value_heads": 2}


def read(**values: Any) -> Any:
    return read_hf_config(BASE | values, "config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_by_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **SHAPE, tie_word_embeddings=True, rms_norm_eps=1e-5)
    config.architectures = [FAMILIES[family]]
    config.save_pretrained(tmp_path)
    spec = read_hf_config(json.loads((tmp_path / "config.json").read_text()), "config.json")
    assert spec.architecture == FAMILIES[family]
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads) == (4, 4, 2)
    assert spec.head_dim == (getattr(config, "head_dim", None) or 16)
    assert spec.max_position == config.max_position_embeddings
    assert spec.rope.theta == config.rope_parameters["rope_theta"]
    assert spec.rms_norm_eps == 1e-5
    assert spec.tie_word_embeddings
    assert spec.qkv_bias == (family == "qwen2")
    assert spec.qk_norm == (family == "qwen3")


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_left_out_mean_what_they_mean_in_transformers(family: str) -> None:
    from transformers import AutoConfig

    values = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
    values["num_attention_heads"] = 32
    values["hidden_size"] = 512
    config = AutoConfig.for_model(family, **values)
    spec = read_hf_config(values | {"model_type": family}, "config.json")
    assert spec.architecture == FAMILIES[family]
    assert spec.num_kv_heads == config.num_key_value_heads
    assert spec.head_dim == (getattr(config, "head_dim", None) or 16)
    assert spec.max_position == config.max_position_embeddings
    assert spec.rms_norm_eps == config.rms_norm_eps
    assert spec.tie_word_embeddings == config.tie_word_embeddings
    assert spec.sliding_windows == (getattr(config, "sliding_window", None),) * 4


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"use_sliding_window": False, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4},
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_sliding_windows(family: str, values: dict[str, Any]) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **SHAPE, **values)
    expected = tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)
    assert read(**SHAPE, **values, architectures=[FAMILIES[family]]).sliding_windows == expected


@pytest.mark.parametrize(("value", "expected"), [(8, 8), (None, None)])
def test_mistral_sliding_window_is_on_every_layer(value: int | None, expected: int | None) -> None:
    spec = read(architectures=["MistralForCausalLM"], num_key_value_heads=2, sliding_window=value)
    assert spec.sliding_windows == (expected,) * 4


def test_llama_has_no_sliding_window() -> None:
    assert read(sliding_window=8).sliding_windows == (None,) * 4


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    ],
)
def test_old_and_new_rope_keys(rope: dict[str, Any]) -> None:
    spec = read(**rope)
    assert (spec.rope.kind, spec.rope.factor, spec.rope.theta) == ("linear", 2.0, 5000.0)


def test_null_rope_scaling_is_default() -> None:
    assert read(rope_theta=5000.0, rope_scaling=None).rope.kind == "default"


@pytest.mark.parametrize(
    ("max_position", "factor", "original", "expected"),
    [
        (163840, 40.0, 4096, 163840),  # states the stretched length: the factor is not applied again
        (32768, 4.0, 32768, 131072),  # states the original length
        (32768, 4.0, None, 131072),
        (40960, 4.0, 32768, 131072),
    ],
)
def test_yarn_length(max_position: int, factor: float, original: int | None, expected: int) -> None:
    rope: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if original is not None:
        rope["original_max_position_embeddings"] = original
    assert read(max_position_embeddings=max_position, rope_scaling=rope).max_position == expected


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_other_scalings_leave_the_stated_length(kind: str) -> None:
    rope = {"rope_type": kind, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert read(max_position_embeddings=4096, rope_scaling=rope).max_position == 4096


@pytest.mark.parametrize(("text", "expected"), [("torch.bfloat16", "bfloat16"), ("float16", "float16")])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype(key: str, text: str, expected: str) -> None:
    assert read(**{key: text}).dtype == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": None, "model_type": "mamba"}, "'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "unknown rope type 'dynamic'"),
        ({"rope_scaling": {"type": "su"}}, "unknown rope type 'su'"),
        ({"rope_scaling": {"type": "linear"}}, "missing key factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a number above 0, got '2'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"hidden_size": 66}, "hidden_size 66"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"vocab_size": None}, "missing key vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1, got 0"),
        ({"num_hidden_layers": "4"}, "got '4'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4, "layer_types": ["full_attention"]},
            "layer_types must be a list of 4 names",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4, "layer_types": ["chunked_attention"] * 4},
            "'chunked_attention'",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 4, "layer_types": ["sliding_attention"] * 4},
            "sliding_window is off",
        ),
    ],
)
def test_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=r"config\.json") as error:
        read(**values)
    assert message in str(error.value)


@pytest.mark.parametrize(("value", "expected"), [(2, (2,)), ([2, 5], (2, 5)), (None, ()), ([], ())])
def test_eos_ids(value: Any, expected: tuple[int, ...]) -> None:
    assert read_eos_token_ids({"eos_token_id": value}, "x") == expected


@pytest.mark.parametrize("value", ["2", [2, None], -1, True])
def test_bad_eos_ids(value: Any) -> None:
    with pytest.raises(InputError, match="eos_token_id"):
        read_eos_token_ids({"eos_token_id": value}, "x")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 20}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": True, "top_k": 20, "min_p": 0.1}, {"temperature": 1.0, "top_k": 20, "min_p": 0.1}),
        ({"do_sample": True, "temperature": None, "top_k": None}, {"temperature": 1.0}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"max_new_tokens": 77, "max_length": 20}, {"max_tokens": 77}),
        ({"num_beams": 4, "typical_p": 0.5, "eos_token_id": 2}, {}),
    ],
)
def test_generation_defaults(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read_generation_defaults(config, "generation_config.json") == expected


def test_impossible_generation_defaults_are_named() -> None:
    with pytest.raises(InputError, match=r"generation_config.json: top_p"):
        read_generation_defaults({"do_sample": True, "top_p": 1.5}, "generation_config.json")
