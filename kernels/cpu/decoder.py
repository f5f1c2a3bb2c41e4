"""A decoder over the C++ kernels: the same model as models/decoder.py, in bf16 on a CPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer.engine.sampler import DrawColumns
from batchinfer.kernels.cpu.library import Batch, Layer, Model, load_library
from batchinfer.kernels.reference import TargetLogprobs
from batchinfer.models.decoder import GreedyDraw, StepInputs, zeroed_pages
from batchinfer.models.rope import rope_tables
from batchinfer.models.spec import DecoderSpec
from batchinfer.models.weights import DecoderWeights

#: What `bi_times` tells, in its order.
PARTS = ("products", "attention", "head", "rope_and_kv", "norms", "sampling", "planning")
#: Query heads wider than this do not fit the kernels' buffers.
MAX_HEAD_DIM = 256


def unsupported(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the C++ kernels cannot run this model; None: they can."""
    if device.type != "cpu":
        return f"the device is {device}"
    if dtype != torch.bfloat16:
        return f"the dtype is {dtype}, the kernels are bfloat16"
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(spec, name) % 16:
            return f"{name} {getattr(spec, name)} is no multiple of 16"
    if spec.head_dim > MAX_HEAD_DIM:
        return f"head_dim {spec.head_dim} is above {MAX_HEAD_DIM}"
    if spec.rope.dim % 2:
        return f"the rotated part of a head is odd: {spec.rope.dim}"
    return None


@dataclass(frozen=True, slots=True)
class HeadResult:
    """What the head says of each row without its logits."""

    top: Tensor  # [rows] fp32; NaN if some logit was not finite
    argmax: Tensor  # [rows] int32; of the ids that may be drawn
    lse: Tensor | None  # [rows] fp32
    entropy: Tensor | None  # [rows] fp32
    target_logit: Tensor | None  # [rows] fp32
    logits: Tensor | None  # [rows, vocab] fp32


@dataclass(frozen=True, slots=True)
class PackedKV:
    """The pool in the kernels' layout: [layers, blocks, kv heads, K and V, ...], see attention.h."""

    data: Tensor  # [num_layers, num_blocks, 2 * block_size * num_kv_heads * head_dim] bf16
    block_size: int
    library: ctypes.CDLL

    @property
    def num_blocks(self) -> int:
        return self.data.shape[1]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        sources, targets = torch.tensor(pairs, dtype=torch.int64).T.contiguous()
        if torch.isin(sources, targets).any():  # a source is read before it is written
            self.data[:, targets] = self.data[:, sources]
            return
        layer, block = (stride * self.data.itemsize for stride in self.data.stride()[:2])
        self.library.bi_copy_blocks(
            self.data.data_ptr(), len(self.data), layer, block, sources.data_ptr(), targets.data_ptr(), len(pairs)
        )

    def clear_blocks(self, blocks: list[int]) -> None:
        self.data[:, torch.tensor(blocks, dtype=torch.int64)] = 0


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def interleaved(gate_up: Tensor) -> Tensor:
    """Gate rows, then up rows -> 16 of the gate, 16 of up, and so on: both are in registers together."""
    gate, up = gate_up.view(2, -1, 16, *gate_up.shape[1:])
    return torch.stack((gate, up), dim=1).reshape(gate_up.shape)


def core_of_cpu(cores: list[set[int]]) -> NDArray[np.int32]:
    """The number of each CPU's core; -1: it is in none of them."""
    numbers = np.full(1 + max((cpu for core in cores for cpu in core), default=-1), -1, np.int32)
    for index, core in enumerate(cores):
        numbers[list(core)] = index
    return numbers


class CpuDecoder:
    """LanguageModel over `libbatchinfer_<instruction set>.so`. Takes the weights over: they are repacked."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, instruction_set: str, max_model_len: int) -> None:
        self.spec = spec
        self.dtype = torch.bfloat16
        self.device = torch.device("cpu")
        self.kernels = instruction_set
        self._library = load_library(instruction_set)
        self._keep: list[object] = []  # what the C side points to
        cos, sin = rope_tables(spec.rope, max_model_len)
        self._head = self._pack(weights.lm_head)
        layers = (Layer * spec.num_layers)()
        for index, layer in enumerate(weights.layers):
            layer.gate_up = interleaved(layer.gate_up)
            if layer.gate_up_bias is not None:
                layer.gate_up_bias = interleaved(layer.gate_up_bias)
            for name in ("qkv", "o", "gate_up", "down"):
                packed = self._pack(getattr(layer, name))
                setattr(layer, name, packed)  # the unpacked weight is freed at once
                setattr(layers[index], name, self._hold(packed))
            for name in ("attn_norm", "qkv_bias", "q_norm", "k_norm", "o_bias", "mlp_norm"):
                setattr(layers[index], name, self._hold(getattr(layer, name)))
            for name in ("gate_up_bias", "down_bias"):
                setattr(layers[index], name, self._hold(getattr(layer, name)))
            layers[index].window = spec.sliding_windows[index] or 0
        self._model = Model(
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rope_dim=spec.rope.dim,
            eps=spec.rms_norm_eps,
            scale=spec.head_dim**-0.5,
            embed=self._hold(weights.embed),
            final_norm=self._hold(weights.final_norm),
            cos=self._hold(cos.contiguous()),
            sin=self._hold(sin.contiguous()),
            layers=layers,
        )
        self._keep.append(layers)

    def _hold(self, tensor: Tensor | None) -> int | None:
        if tensor is not None:
            assert tensor.is_contiguous()
            self._keep.append(tensor)
        return _address(tensor)

    def _pack(self, weight: Tensor) -> Tensor:
        rows, columns = weight.shape
        out = torch.empty(-(-rows // 16) * 16 * columns, dtype=torch.bfloat16)
        self._library.bi_pack(weight.data_ptr(), out.data_ptr(), rows, columns)
        return out

    def bind_threads(self, cores: list[set[int]]) -> None:
        """Where there is a thread for each of the cores (sets of CPUs), keep each on its own while kernels run.

        For all models of this process. See binding.h for why.
        """
        numbers = core_of_cpu(cores)
        self._library.bi_bind_threads(numbers.ctypes.data, len(numbers))

    def make_kv(self, num_blocks: int, block_size: int) -> PackedKV:
        spec = self.spec
        per_block = 2 * block_size * spec.num_kv_heads * spec.head_dim
        data = zeroed_pages((spec.num_layers, num_blocks, per_block), self.dtype, self.device)
        return PackedKV(data, block_size, self._library)

    def _batch(self, inputs: StepInputs, kv: PackedKV) -> Batch:
        ragged = inputs.ragged
        return Batch(
            num_tokens=len(inputs.token_ids),
            num_seqs=len(ragged.query_lens),
            block_size=kv.block_size,
            max_blocks=ragged.block_tables.shape[1],
            token_ids=inputs.token_ids.data_ptr(),
            slots=inputs.slots.data_ptr(),
            block_tables=ragged.block_tables.ctypes.data,
            query_starts=ragged.query_starts.ctypes.data,
            query_lens=ragged.query_lens.ctypes.data,
            kv_cache=kv.data.data_ptr(),
            layer_stride=kv.data[0].numel(),
        )

    def forward(self, inputs: StepInputs, kv: PackedKV) -> Tensor:
        num_tokens, outputs = len(inputs.token_ids), inputs.outputs
        hidden = torch.empty((num_tokens, self.spec.hidden_size), dtype=torch.bfloat16)
        batch = self._batch(inputs, kv)
        num_outputs = num_tokens if outputs is None else len(outputs)
        failed = self._library.bi_forward(
            ctypes.byref(self._model), ctypes.byref(batch), _address(outputs), num_outputs, hidden.data_ptr()
        )
        if failed:
            raise MemoryError(f"no memory for a step of {num_tokens:,} tokens")
        return hidden

    def kernel_times(self) -> dict[str, float]:
        """Seconds that each part took since the last call, in all models of this process."""
        seconds = (ctypes.c_double * len(PARTS))()
        self._library.bi_times(seconds)
        return dict(zip(PARTS, seconds, strict=True))

    def head(
        self,
        hidden: Tensor,
        *,
        num_ids: int | None = None,
        targets: Tensor | None = None,
        wants_lse: bool = False,
        wants_entropy: bool = False,
        wants_logits: bool = False,
    ) -> HeadResult:
        """hidden [rows, hidden_size] bf16; targets [rows] int32."""
        rows, vocab = len(hidden), self.spec.vocab_size
        hidden = hidden.contiguous()

        def made(wanted: bool, *shape: int) -> Tensor | None:
            return torch.empty(shape or (rows,), dtype=torch.float32) if wanted else None

        out = HeadResult(
            top=torch.empty(rows, dtype=torch.float32),
            argmax=torch.empty(rows, dtype=torch.int32),
            lse=made(wants_lse or wants_entropy),
            entropy=made(wants_entropy),
            target_logit=made(targets is not None),
            logits=made(wants_logits, rows, vocab),
        )
        self._library.bi_head(
            hidden.data_ptr(),
            self._head.data_ptr(),
            rows,
            vocab,
            self.spec.hidden_size,
            vocab if num_ids is None else min(num_ids, vocab),
            *map(_address, (out.logits, out.top, out.argmax, out.lse, out.entropy, targets, out.target_logit)),
        )
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden, wants_logits=True).logits
        assert logits is not None
        return logits

    def greedy(self, hidden: Tensor, num_ids: int, *, wants_logprobs: bool) -> GreedyDraw:
        found = self.head(hidden, num_ids=num_ids, wants_lse=wants_logprobs)
        logprobs = None if found.lse is None else found.top - found.lse
        return GreedyDraw(found.argmax, logprobs, ~found.top.isnan())

    def draw(self, logits: Tensor, columns: DrawColumns, *, writes: bool) -> Tensor:
        ids = torch.empty(len(logits), dtype=torch.int32)
        arrays = (columns.temperature, columns.top_k, columns.top_p, columns.min_p, columns.keys, columns.positions)
        self._library.bi_sample(
            logits.data_ptr(), *logits.shape, *(array.ctypes.data for array in arrays), writes, ids.data_ptr()
        )
        return ids.long()

    def target_logprobs(self, hidden: Tensor, targets: Tensor) -> TargetLogprobs:
        found = self.head(hidden, targets=targets.to(torch.int32).contiguous(), wants_entropy=True)
        assert found.lse is not None
        assert found.entropy is not None
        assert found.target_logit is not None
        return TargetLogprobs(found.target_logit - found.lse, found.entropy, found.argmax.long())
