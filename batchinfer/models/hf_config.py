"""config.json and generation_config.json of a model in Hugging Face layout.

Both generations of rope keys are read: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchinfer.errors import InputError
from batchinfer.models.rope import ROPE_KINDS
from batchinfer.models.spec import FAMILIES, BiasRule, DecoderSpec, Family, RopeSpec
from batchinfer.types import SamplingParams


def read_hf_config(config: Mapping[str, Any], where: str) -> DecoderSpec:
    """The model's shape from a parsed config.json; `where` names the file in errors.

    Raises InputError naming the key: missing, impossible, or asking for what is not supported.
    """
    return _ConfigReader(config, where, _find_family(config, where)).read()


def read_eos_token_ids(config: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """`eos_token_id`, an int or a list, of a config or generation config; empty when absent."""
    value = config.get("eos_token_id")
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise InputError(f"{where}: eos_token_id must be a token id or a list of them, got {value!r}")
    return ids


def read_generation_defaults(generation_config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Sampling values that the model asks for, as SamplingParams fields.

    `do_sample: true`: the temperature (1.0 if not written), top_k, top_p and min_p written there; what is not
    written is off. Otherwise greedy, and a temperature left over there is ignored. `repetition_penalty` and
    `max_new_tokens` (as max_tokens) are always taken; nothing else is used.
    """
    defaults: dict[str, Any] = {}
    if generation_config.get("do_sample") is True:
        defaults["temperature"] = 1.0
        names = {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
    else:
        defaults |= {"temperature": 0.0} if generation_config.get("do_sample") is False else {}
        names = {}
    names |= {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
    defaults |= {ours: generation_config[key] for key, ours in names.items() if generation_config.get(key) is not None}
    try:
        SamplingParams.from_mapping(defaults)
    except ValueError as e:
        raise InputError(f"{where}: {e}") from e
    return defaults


def _find_family(config: Mapping[str, Any], where: str) -> Family:
    architectures, model_type = config.get("architectures"), config.get("model_type")
    if not architectures:
        matches = [family for family in FAMILIES.values() if family.model_type == model_type]
        if matches:
            return matches[0]
        architectures = [f"model_type {model_type!r}"]
    if not isinstance(architectures, list) or architectures[0] not in FAMILIES:
        name = architectures[0] if isinstance(architectures, list) else architectures
        raise InputError(f"{where}: architecture {name} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[architectures[0]]


@dataclass(slots=True)
class _ConfigReader:
    config: Mapping[str, Any]
    where: str
    family: Family

    def read(self) -> DecoderSpec:
        if self.config.get("quantization_config"):
            method = self.config["quantization_config"].get("quant_method", "?")
            raise self._error(
                f"quantization_config (quant_method {method!r}) is not supported; use unquantised weights"
            )
        act = self.config.get("hidden_act", "silu")
        if act != "silu":
            raise self._error(f"hidden_act {act!r} is not supported by {self.family.architecture}; supported: silu")
        hidden, num_heads = self._count("hidden_size"), self._count("num_attention_heads")
        num_kv_heads = self._count("num_key_value_heads", self.family.num_kv_heads or num_heads)
        if num_heads % num_kv_heads:
            raise self._error(
                f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        head_dim = self._head_dim(hidden, num_heads)
        num_layers = self._count("num_hidden_layers")
        max_position = self._count("max_position_embeddings", self.family.max_position)
        rope = self._rope(head_dim, max_position)
        return DecoderSpec(
            architecture=self.family.architecture,
            vocab_size=self._count("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self._count("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self._number(self.config, "rms_norm_eps", 1e-6),
            rope=rope,
            max_position=self._max_position(rope, max_position),
            tie_word_embeddings=self._flag("tie_word_embeddings"),
            qkv_bias=self._bias(self.family.qkv_bias),
            o_bias=self._bias(self.family.o_bias),
            mlp_bias=self._bias(self.family.mlp_bias),
            qk_norm=self.family.qk_norm,
            hidden_act=act,
            sliding_windows=self._sliding_windows(num_layers),
            dtype=self._dtype(),
        )

    def _error(self, message: str) -> InputError:
        return InputError(f"{self.where}: {message}")

    def _count(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if value is None:
            raise self._error(f"missing key {key}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._error(f"{key} must be a whole number from 1, got {value!r}")
        return value

    def _number(self, values: Mapping[str, Any], key: str, default: float | None = None) -> float:
        value = values.get(key)
        value = default if value is None else value
        if value is None:
            raise self._error(f"missing key {key}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self._error(f"{key} must be a number above 0, got {value!r}")
        return float(value)

    def _flag(self, key: str) -> bool:
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._error(f"{key} must be true or false, got {value!r}")
        return bool(value)

    def _bias(self, rule: BiasRule) -> bool:
        return rule if isinstance(rule, bool) else self._flag(rule)

    def _head_dim(self, hidden: int, num_heads: int) -> int:
        default = self.family.head_dim or hidden // num_heads
        head_dim = self._count("head_dim", default)
        if self.config.get("head_dim") is None and self.family.head_dim is None and hidden % num_heads:
            raise self._error(f"hidden_size {hidden} is not a multiple of num_attention_heads {num_heads}")
        if head_dim % 2:
            raise self._error(f"head_dim {head_dim} is odd; rotary embedding needs pairs of channels")
        return head_dim

    def _dtype(self) -> str | None:
        value = self.config.get("dtype") or self.config.get("torch_dtype")
        return None if value is None else str(value).removeprefix("torch.")

    def _sliding_windows(self, num_layers: int) -> tuple[int | None, ...]:
        if self.family.sliding == "none":
            return (None,) * num_layers
        # null is "no window"; only an absent key means the class's default.
        window = self.config.get("sliding_window", self.family.defaults["sliding_window"])
        if self.family.sliding == "layer_types" and not self._flag("use_sliding_window"):
            window = None
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise self._error(f"sliding_window must be a whole number from 1 or null, got {window!r}")
        if self.family.sliding == "all":
            return (window,) * num_layers
        return tuple(window if slides else None for slides in self._sliding_layers(num_layers, window))

    def _sliding_layers(self, num_layers: int, window: int | None) -> list[bool]:
        types = self.config.get("layer_types")
        if types is None:
            first = self.config.get("max_window_layers", self.family.defaults["max_window_layers"])
            return [window is not None and index >= first for index in range(num_layers)]
        if not isinstance(types, list) or len(types) != num_layers:
            raise self._error(f"layer_types must be a list of {num_layers} names, got {types!r}")
        unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
        if unknown:
            raise self._error(f"layer type {unknown[0]!r} in layer_types is not supported")
        if "sliding_attention" in types and window is None:
            raise self._error("layer_types has sliding_attention, but sliding_window is off")
        return [kind == "sliding_attention" for kind in types]

    def _rope(self, head_dim: int, max_position: int) -> RopeSpec:
        # `rope_scaling`, where present, wins, as in transformers.
        values = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}
        if not isinstance(values, Mapping) or any(isinstance(value, Mapping) for value in values.values()):
            raise self._error("rope parameters per layer type are not supported")
        kind = values.get("rope_type", values.get("type", "default"))
        if kind not in ROPE_KINDS:
            raise self._error(f"unknown rope type {kind!r}; supported: {', '.join(ROPE_KINDS)}")
        partial = values.get("partial_rotary_factor", self.config.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise self._error(f"partial_rotary_factor {partial!r} is not supported by {self.family.architecture}")
        theta = self._number(values, "rope_theta", self._number(self.config, "rope_theta", 10000.0))
        if kind == "default":
            return RopeSpec("default", theta, head_dim)
        if kind == "linear":
            return RopeSpec("linear", theta, head_dim, factor=self._number(values, "factor"))
        stated = self.config.get("original_max_position_embeddings", values.get("original_max_position_embeddings"))
        original = (
            max_position
            if stated is None
            else int(self._number({"original_max_position_embeddings": stated}, "original_max_position_embeddings"))
        )
        if kind == "llama3":
            return self._llama3(values, theta, head_dim, original)
        return self._yarn(values, theta, head_dim, original, max_position)

    def _llama3(self, values: Mapping[str, Any], theta: float, head_dim: int, original: int) -> RopeSpec:
        low, high = self._number(values, "low_freq_factor"), self._number(values, "high_freq_factor")
        if high <= low:
            raise self._error(f"high_freq_factor {high} must be above low_freq_factor {low}")
        return RopeSpec(
            "llama3",
            theta,
            head_dim,
            factor=self._number(values, "factor"),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )

    def _yarn(
        self, values: Mapping[str, Any], theta: float, head_dim: int, original: int, max_position: int
    ) -> RopeSpec:
        def optional(key: str) -> float | None:
            return None if values.get(key) is None else self._number(values, key)

        return RopeSpec(
            "yarn",
            theta,
            head_dim,
            factor=self._number(values, "factor", max_position / original),
            original_max_position=original,
            beta_fast=self._number(values, "beta_fast", 32.0),
            beta_slow=self._number(values, "beta_slow", 1.0),
            truncate=bool(values.get("truncate", True)),
            attention_factor=optional("attention_factor"),
            mscale=optional("mscale"),
            mscale_all_dim=optional("mscale_all_dim"),
        )

    def _max_position(self, rope: RopeSpec, max_position: int) -> int:
        """`max_position_embeddings`, or what yarn stretches the original context to, if that is more.

        Some configs state the stretched length (163840 = 40 * 4096), some the original one (32768 with factor 4);
        only the original length is ever multiplied.
        """
        if rope.kind != "yarn" or rope.original_max_position is None:
            return max_position
        return max(max_position, int(rope.factor * rope.original_max_position))
