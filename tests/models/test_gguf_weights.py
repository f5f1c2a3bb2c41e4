"""GGUF files: metadata, dequantization, order of rows; faults named."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.errors import InputError
from batchinfer.models.gguf import unpermute
from batchinfer.models.gguf_file import TENSOR_TYPES, GGUFFile
from batchinfer.models.rope import inverse_frequencies
from batchinfer.models.source import ModelSource, resolve_model
from batchinfer.models.spec import RopeSpec
from batchinfer.models.weights import DecoderWeights

# The gguf package dequantizes these but does not quantize to them: their blocks are made of random bytes.
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def load(path: Path) -> DecoderWeights:
    return resolve_model(str(path)).load_weights(torch.float32, torch.device("cpu"))


def llama_cpp_permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py writes it."""
    return (
        weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def test_unpermute_is_the_inverse_of_the_converter() -> None:
    rows = np.arange(4 * 16 * 3).reshape(64, 3)
    assert (unpermute(llama_cpp_permute(rows, 4), 4) == rows).all()
    assert (unpermute(rows, 4) != rows).any()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_every_tensor_is_in_its_place(arch: str, kind: str, gguf_model: Any, gguf_tensors: Any) -> None:
    import gguf

    tensors = gguf_tensors(tied=False, qkv_bias=arch == "qwen2", qk_norm=arch == "qwen3")
    source = resolve_model(str(gguf_model(tensors, kind, arch)))
    weights = source.load_weights(torch.float32, torch.device("cpu"))
    quant = gguf.GGMLQuantizationType[kind]

    def expect(ours: torch.Tensor, *names: str) -> None:
        parts = []
        for name in names:
            array = tensors[name]
            if array.ndim == 2 and kind != "F32":
                array = gguf.dequantize(gguf.quantize(array, quant), quant)
            heads = {"attn_q": 4, "attn_k": 2}.get(name.split(".")[-2])
            parts.append(unpermute(array, heads) if arch == "llama" and heads else array)
        assert np.array_equal(ours.numpy(), np.concatenate(parts)), names

    expect(weights.embed, "token_embd.weight")
    expect(weights.final_norm, "output_norm.weight")
    expect(weights.lm_head, "output.weight")
    for i, layer in enumerate(weights.layers):
        p = f"blk.{i}."
        expect(layer.attn_norm, p + "attn_norm.weight")
        expect(layer.qkv, p + "attn_q.weight", p + "attn_k.weight", p + "attn_v.weight")
        expect(layer.o, p + "attn_output.weight")
        expect(layer.mlp_norm, p + "ffn_norm.weight")
        expect(layer.gate_up, p + "ffn_gate.weight", p + "ffn_up.weight")
        expect(layer.down, p + "ffn_down.weight")
        if arch == "qwen2":
            assert layer.qkv_bias is not None
            expect(layer.qkv_bias, p + "attn_q.bias", p + "attn_k.bias", p + "attn_v.bias")
        if arch == "qwen3":
            assert layer.q_norm is not None
            assert layer.k_norm is not None
            expect(layer.q_norm, p + "attn_q_norm.weight")
            expect(layer.k_norm, p + "attn_k_norm.weight")


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants_as_the_gguf_package_dequantizes_them(kind: str, gguf_model: Any, gguf_tensors: Any) -> None:
    import gguf

    quant = gguf.GGMLQuantizationType[kind]
    tensors = gguf_tensors()
    path = gguf_model(tensors, "Q8_0", "qwen2", drop=())
    block, size = gguf.GGML_QUANT_SIZES[quant]
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 0x3C, (32, 256 // block * size), dtype=np.uint8)  # small bytes: no inf or nan scales
    path = _with_embedding(path, tensors, blocks, quant)
    with_type = GGUFFile(path)
    assert with_type.tensors["token_embd.weight"].type_name == kind
    assert np.array_equal(with_type.read("token_embd.weight"), gguf.dequantize(blocks, quant))
    assert kind in TENSOR_TYPES


def _with_embedding(path: Path, tensors: dict[str, np.ndarray], blocks: np.ndarray, quant: Any) -> Path:
    import gguf

    out = path.with_name("k.gguf")
    writer = gguf.GGUFWriter(out, "llama")
    for name, array in tensors.items():
        if name == "token_embd.weight":
            writer.add_tensor(name, blocks, raw_dtype=quant)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_unsupported_type_is_named(gguf_model: Any, gguf_tensors: Any) -> None:
    import gguf

    blocks = np.zeros((32, 256 // 256 * 66), dtype=np.uint8)
    quant = gguf.GGMLQuantizationType.IQ2_XXS
    path = _with_embedding(gguf_model(gguf_tensors()), gguf_tensors(), blocks, quant)
    with pytest.raises(InputError, match=r"token_embd\.weight has type IQ2_XXS"):
        resolve_model(str(path))


def test_llama_bias_is_unpermuted_too(gguf_model: Any, gguf_tensors: Any) -> None:
    tensors = gguf_tensors(qkv_bias=True)
    weights = load(gguf_model(tensors))
    bias = weights.layers[0].qkv_bias
    assert bias is not None
    assert np.array_equal(bias[:256].numpy(), unpermute(tensors["blk.0.attn_q.bias"], 4))
    assert np.array_equal(bias[256:384].numpy(), unpermute(tensors["blk.0.attn_k.bias"], 2))
    assert np.array_equal(bias[384:].numpy(), tensors["blk.0.attn_v.bias"])


def test_spec(gguf_model: Any, gguf_tensors: Any) -> None:
    spec = resolve_model(str(gguf_model(gguf_tensors(), "Q8_0"))).spec
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size, spec.num_layers) == (32, 256, 256, 2)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.max_position) == (4, 2, 64, 256)
    assert spec.rms_norm_eps == 1e-5  # float32 in the file
    assert spec.rope == RopeSpec("default", 10000.0, 64)
    assert spec.tie_word_embeddings
    assert spec.dtype == "bfloat16"


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_dtype(kind: str, dtype: str, gguf_model: Any, gguf_tensors: Any) -> None:
    assert resolve_model(str(gguf_model(gguf_tensors(), kind))).spec.dtype == dtype


def test_without_output_the_head_is_tied(gguf_model: Any, gguf_tensors: Any) -> None:
    weights = load(gguf_model(gguf_tensors(tied=True)))
    assert weights.lm_head is weights.embed


def test_rope_frequency_factors_are_used(gguf_model: Any, gguf_tensors: Any) -> None:
    """Llama 3 in GGUF: its scaling is in a tensor of divisors; they must give the frequencies of transformers."""
    llama3 = RopeSpec(
        "llama3", 5e5, 64, factor=8.0, original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    plain, _ = inverse_frequencies(RopeSpec("default", 5e5, 64))
    expected, _ = inverse_frequencies(llama3)
    tensors = gguf_tensors() | {"rope_freqs.weight": (plain / expected).numpy()}
    source = resolve_model(str(gguf_model(tensors, **{"rope.freq_base": 5e5})))
    freqs, _ = inverse_frequencies(source.spec.rope)
    torch.testing.assert_close(freqs, expected, rtol=3e-7, atol=0)
    source.load_weights(torch.float32, torch.device("cpu"))  # not left over as an unknown tensor

    wrong = gguf_tensors() | {"rope_freqs.weight": np.ones(7, dtype=np.float32)}
    with pytest.raises(InputError, match="has 7 values, expected 32"):
        resolve_model(str(gguf_model(wrong, name="wrong.gguf")))


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope.scaling.type": "none"}, RopeSpec("default", 10000.0, 64)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, RopeSpec("linear", 10000.0, 64, factor=2.0)),
        ({"rope.scale_linear": 2.0}, RopeSpec("linear", 10000.0, 64, factor=2.0)),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
            },
            RopeSpec("yarn", 10000.0, 64, factor=4.0, original_max_position=64),
        ),
    ],
)
def test_rope_scaling(metadata: dict[str, Any], expected: RopeSpec, gguf_model: Any, gguf_tensors: Any) -> None:
    assert resolve_model(str(gguf_model(gguf_tensors(), **metadata))).spec.rope == expected


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"drop": ("block_count",)}, "missing key llama.block_count"),
        ({"drop": ("attention.layer_norm_rms_epsilon",)}, "missing key llama.attention.layer_norm_rms_epsilon"),
        ({"arch": "gemma2"}, "architecture 'gemma2' is not supported"),
        ({"expert_count": 8}, "llama.expert_count = 8"),
        ({"rope.scaling.type": "longrope"}, "unknown rope type 'longrope'"),
        ({"rope.dimension_count": 32}, "llama.rope.dimension_count = 32"),
        ({"attention.head_count": 7}, "7 heads"),
        ({"attention.head_count": 0}, "got 0"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"attention.sliding_window": 8, "arch": "qwen2"}, "qwen2.attention.sliding_window = 8"),
    ],
)
def test_refused_by_name(metadata: dict[str, Any], message: str, gguf_model: Any, gguf_tensors: Any) -> None:
    with pytest.raises(InputError) as error:
        resolve_model(str(gguf_model(gguf_tensors(), **metadata)))
    assert message in str(error.value)


def test_mistral_sliding_window(gguf_model: Any, gguf_tensors: Any) -> None:
    spec = resolve_model(str(gguf_model(gguf_tensors(), **{"attention.sliding_window": 8}))).spec
    assert spec.sliding_windows == (8, 8)


def test_missing_and_extra_tensors_are_named(gguf_model: Any, gguf_tensors: Any) -> None:
    tensors = gguf_tensors()
    norm = tensors.pop("blk.1.ffn_norm.weight")
    with pytest.raises(InputError, match=r"missing tensors: model\.layers\.1\.post_attention_layernorm\.weight"):
        load(gguf_model(tensors))
    extra = tensors | {"blk.1.ffn_norm.weight": norm, "blk.0.attn_sinks.weight": norm}
    with pytest.raises(InputError, match=r"blk\.0\.attn_sinks\.weight"):
        load(gguf_model(extra, name="extra.gguf"))
    with pytest.raises(InputError, match=r"missing tensor token_embd\.weight"):
        load(gguf_model({"output_norm.weight": norm}, name="none.gguf"))


def test_every_cut_is_an_input_error(gguf_model: Any, gguf_tensors: Any) -> None:
    path = gguf_model(gguf_tensors(), "Q8_0")
    whole = path.read_bytes()
    header = whole.index(b"blk.1.ffn_down.weight") + 64
    for size in (*range(0, header, 29), len(whole) // 2, len(whole) - 33):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=r"tiny\.gguf"):
            resolve_model(str(path))


@pytest.mark.parametrize("data", [b"", b"GGML" + bytes(64), b"GGUF" + struct.pack("<I", 1) + bytes(64)])
def test_not_gguf(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"x\.gguf"):
        resolve_model(str(path))


def test_absurd_lengths_do_not_exhaust_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    key = b"a.b"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    for value in (struct.pack("<IQ", 8, 2**62), struct.pack("<IIQ", 9, 8, 2**62), struct.pack("<IIQ", 9, 4, 2**62)):
        path.write_bytes(head + value + bytes(64))
        with pytest.raises(InputError, match="not a whole GGUF file"):
            resolve_model(str(path))


@pytest.fixture(scope="module")
def embedded() -> ModelSource:
    return resolve_model("smollm2-135m")


def test_embedded_model_equals_the_gguf_packages_reading(embedded: ModelSource) -> None:
    """Three layers and the embedding, through the slow reader and the order of rows written out here."""
    import gguf

    weights = embedded.load_weights(torch.float32, torch.device("cpu"))
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(embedded.path).tensors}
    assert len(reader) == 272

    def expect(ours: torch.Tensor, *names: str) -> None:
        parts = []
        for name in names:
            array = gguf.dequantize(reader[name].data, reader[name].tensor_type)
            heads = {"attn_q": 9, "attn_k": 3}.get(name.split(".")[-2])
            if heads:
                half = array.shape[0] // heads // 2
                array = array[
                    [h * 2 * half + 2 * i + part for h in range(heads) for part in (0, 1) for i in range(half)]
                ]
            parts.append(array)
        assert np.array_equal(ours.numpy(), np.concatenate(parts)), names

    expect(weights.embed, "token_embd.weight")
    assert weights.lm_head is weights.embed
    for i in (0, 13, 29):
        p, layer = f"blk.{i}.", weights.layers[i]
        expect(layer.qkv, p + "attn_q.weight", p + "attn_k.weight", p + "attn_v.weight")
        expect(layer.gate_up, p + "ffn_gate.weight", p + "ffn_up.weight")
        expect(layer.down, p + "ffn_down.weight")
        expect(layer.o, p + "attn_output.weight")
        expect(layer.attn_norm, p + "attn_norm.weight")


def test_embedded_spec(embedded: ModelSource) -> None:
    spec = embedded.spec
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.vocab_size, spec.max_position, spec.rope.theta) == (49152, 8192, 100000.0)
    assert embedded.eos_token_ids == (2,)
    assert embedded.generation_defaults == {}


def test_flipped_header_bytes_are_input_errors_or_harmless(gguf_model: Any, gguf_tensors: Any) -> None:
    """No byte of the header, whatever it becomes, makes anything but an InputError or another readable file."""
    path = gguf_model(gguf_tensors())
    whole = path.read_bytes()
    refused = 0
    for place in range(0, whole.index(b"blk.0.attn_q.weight"), 3):
        data = bytearray(whole)
        data[place] ^= 0xFF
        path.write_bytes(data)
        try:
            resolve_model(str(path))
        except InputError:
            refused += 1
    assert refused > 50


def test_impossible_alignment(gguf_model: Any, gguf_tensors: Any) -> None:
    path = gguf_model(gguf_tensors(), **{"general.alignment": 0})
    with pytest.raises(InputError, match=r"tiny\.gguf"):
        resolve_model(str(path))
