"""The whole engine on the Triton kernels, interpreted: near plain torch, and to the bit alone and in company."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from mixed_rows import outcome
from tiny_folder import write_tiny_llama
from tiny_models import SMALL_SPEC, LetterTokenizer, random_weights
from torch import Tensor
from typer.testing import CliRunner

from batchinfer.attention.backend import ReferenceAttention
from batchinfer.cli.main import app
from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv_memory import prompts_step
from batchinfer.engine.sampler import FusedDraw
from batchinfer.kernels.choice import FORCE_VARIABLE
from batchinfer.kernels.fp8_kv import FP8
from batchinfer.kernels.triton import graphs
from batchinfer.kernels.triton.decoder import TritonDecoder
from batchinfer.kernels.triton.launch import is_interpreted
from batchinfer.models.decoder import Decoder, FusedHead, KVCache, LanguageModel, StepInputs
from batchinfer.models.spec import RopeSpec
from batchinfer.types import Prompt, SamplingParams

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="needs TRITON_INTERPRET=1 before Triton is imported")

CPU = torch.device("cpu")
MAX_MODEL_LEN = 64
#: Grouped-query, one layer with a sliding window, a vocabulary beyond the tokenizer's ids; few programs to interpret.
SPEC = replace(
    SMALL_SPEC,
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    sliding_windows=(None, 8),
)
QWEN = replace(
    SPEC, num_heads=6, qk_norm=True, qkv_bias=True, head_dim=24, rope=RopeSpec("default", 1e4, 16), num_kv_heads=3
)


class Letters(LetterTokenizer):
    num_ids = 90


def engine_over(model: LanguageModel, **options: Any) -> Engine:
    config = EngineConfig(block_size=16, kv_memory_bytes=1 << 20, **options)
    engine = Engine.from_parts(model, Letters(), (2, 5), MAX_MODEL_LEN, config)
    engine.check_integrity = True
    return engine


def rows() -> list[Prompt]:
    """Greedy and drawn ones behind 20 tokens that all share: a block, and part of another."""
    rng = np.random.default_rng(0)
    stem = rng.integers(6, 90, 20)
    params = [
        SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=True, logprobs=0),
        SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.8, seed=1, logprobs=2),
        SamplingParams(max_tokens=2, ignore_eos=True),
        SamplingParams(
            max_tokens=3, ignore_eos=True, temperature=1.1, top_k=30, top_p=0.9, seed=3, prompt_logprobs=True
        ),
    ]
    return [
        Prompt(i, np.concatenate([stem, rng.integers(6, 90, n)]).astype(np.int32), params[i], key=i)
        for i, n in enumerate((1, 9, 4, 2))
    ]


def run(
    model: LanguageModel, prompts: list[Prompt], *, looks_ahead: bool = False, **options: Any
) -> dict[int, dict[str, Any]]:
    engine = engine_over(model, **options)
    engine.looks_ahead = looks_ahead
    return {done.row_index: outcome(done) for done in engine.run(prompts)}


@pytest.fixture(scope="module")
def fp8_alone(weights: Any) -> dict[int, dict[str, Any]]:
    """The same with KV in fp8."""
    model = TritonDecoder(SPEC, weights, MAX_MODEL_LEN, deterministic=True, kv_dtype=FP8)
    return {
        key: value for row in rows() for key, value in run(model, [row], max_num_seqs=1, prefix_sharing=False).items()
    }


def test_fp8_kv_is_that_of_plain_torch(weights: Any, fp8_alone: dict[int, dict[str, Any]]) -> None:
    """But where a sum in another order takes a number to the next code: then some of its bits are off."""
    expected = run(Decoder(SPEC, weights, ReferenceAttention, MAX_MODEL_LEN, FP8), rows())
    plain = run(Decoder(SPEC, weights, ReferenceAttention, MAX_MODEL_LEN), rows())
    errors, changes = [], []
    for row in (0, 3):
        scores, others, without = (each[row]["prompt_logprobs"][1:] for each in (fp8_alone, expected, plain))
        errors += np.abs(np.subtract(scores, others)).tolist()
        changes += np.abs(np.subtract(others, without)).tolist()
    assert np.mean(errors) < np.mean(changes) / 20
    assert np.max(errors) < 0.02


@pytest.mark.parametrize(
    "options", [{}, {"max_batch_tokens": 7, "max_num_seqs": 3}], ids=["together", "in chunks, three at a time"]
)
def test_every_row_equals_its_solo_run_in_fp8(
    weights: Any, fp8_alone: dict[int, dict[str, Any]], options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "STEPS_BEFORE", 0)
    model = TritonDecoder(SPEC, weights, MAX_MODEL_LEN, deterministic=True, kv_dtype=FP8, record=record)
    assert run(model, rows(), kv_dtype="fp8", **options) == fp8_alone


@dataclass
class Replayed:
    call: Callable[[], Tensor]
    hidden: Tensor

    def replay(self) -> None:
        self.hidden.copy_(self.call())


def record(call: Callable[[], Tensor]) -> Replayed:
    return Replayed(call, call())


@pytest.fixture(scope="module")
def weights() -> Any:
    return random_weights(SPEC, torch.float32)


@pytest.fixture(scope="module")
def alone(weights: Any) -> dict[int, dict[str, Any]]:
    """Each row by itself, nothing shared."""
    model = TritonDecoder(SPEC, weights, MAX_MODEL_LEN, deterministic=True)
    return {
        key: value for row in rows() for key, value in run(model, [row], max_num_seqs=1, prefix_sharing=False).items()
    }


def test_protocols(weights: Any) -> None:
    model = TritonDecoder(SPEC, weights, MAX_MODEL_LEN)
    assert isinstance(model, FusedHead)
    assert isinstance(model, FusedDraw)
    assert engine_over(model).kernels == "triton"
    assert engine_over(TritonDecoder(SPEC, weights, 64, deterministic=True)).kernels == "triton-deterministic"


def test_tokens_are_those_of_plain_torch(weights: Any, alone: dict[int, dict[str, Any]]) -> None:
    """Drawn ones too: the same random numbers."""
    expected = run(Decoder(SPEC, weights, ReferenceAttention, MAX_MODEL_LEN), rows())
    for row, found in alone.items():
        assert found["token_ids"] == expected[row]["token_ids"]
        for name in ("logprobs", "prompt_logprobs"):
            values = [value for value in found[name] or [] if value is not None]
            others = [value for value in expected[row][name] or [] if value is not None]
            assert values == pytest.approx(others, abs=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"max_batch_tokens": 7, "max_num_seqs": 3}], ids=["together", "in chunks, three at a time"]
)
def test_every_row_equals_its_solo_run(weights: Any, alone: dict[int, dict[str, Any]], options: dict[str, int]) -> None:
    model = TritonDecoder(SPEC, weights, MAX_MODEL_LEN, deterministic=True)
    assert run(model, rows(), **options) == alone


def test_every_row_equals_its_solo_run_looking_ahead(weights: Any, alone: dict[int, dict[str, Any]]) -> None:
    model = TritonDecoder(SPEC, weights, MAX_MODEL_LEN, deterministic=True)
    assert run(model, rows(), looks_ahead=True, max_batch_tokens=9, max_num_seqs=3) == alone


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_recorded_steps_change_nothing(
    weights: Any, alone: dict[int, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, looks_ahead: bool
) -> None:
    monkeypatch.setattr(graphs, "STEPS_BEFORE", 0)
    recorded = []
    model = TritonDecoder(
        SPEC, weights, MAX_MODEL_LEN, deterministic=True, record=lambda call: recorded.append(1) or record(call)
    )
    assert run(model, rows(), looks_ahead=looks_ahead) == alone
    assert recorded, "all rows decode together in some step"


def prompts(model: Any, num_tokens: int, longest: int, seed: int = 0) -> tuple[StepInputs, KVCache]:
    step = prompts_step(num_tokens, longest, 16, CPU)
    ids = torch.randint(0, SPEC.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    return replace(step, token_ids=ids), model.make_kv(step.ragged.block_tables.size, 16)


@pytest.mark.parametrize("spec", [SPEC, QWEN], ids=["llama", "qwen3 with biases, part of the head rotated"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_hidden_states_and_kv_are_those_of_plain_torch(spec: Any, deterministic: bool) -> None:
    weights = random_weights(spec, torch.float32, seed=1)
    expected = Decoder(spec, weights, ReferenceAttention, MAX_MODEL_LEN)
    found = TritonDecoder(spec, weights, MAX_MODEL_LEN, deterministic=deterministic)
    (step, kv), (_, other_kv) = prompts(found, 21, 18), prompts(expected, 21, 18)
    torch.testing.assert_close(found.forward(step, kv), expected.forward(step, other_kv), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kv.k, other_kv.k, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kv.v, other_kv.v, atol=1e-5, rtol=1e-5)


def test_half_precision_is_near(weights: Any) -> None:
    narrow = random_weights(SPEC, torch.float16)
    expected = Decoder(SPEC, weights, ReferenceAttention, MAX_MODEL_LEN)
    found = TritonDecoder(SPEC, narrow, MAX_MODEL_LEN, deterministic=True)
    (step, kv), (_, other_kv) = prompts(found, 9, 9), prompts(expected, 9, 9)
    hidden = found.forward(step, kv)
    assert hidden.dtype == torch.float16
    difference = (hidden.float() - expected.forward(step, other_kv)).abs()
    assert difference.mean() < 0.01


@pytest.mark.parametrize("outputs", [[], [4], [0, 3, 8]])
def test_only_the_outputs_are_computed_to_the_end(weights: Any, outputs: list[int]) -> None:
    model = TritonDecoder(SPEC, weights, MAX_MODEL_LEN, deterministic=True)
    step, kv = prompts(model, 9, 9)
    whole = model.forward(step, kv)
    some = model.forward(replace(step, outputs=torch.tensor(outputs, dtype=torch.int64)), kv)
    assert torch.equal(some[outputs], whole[outputs])
    assert torch.isfinite(some).all()


@pytest.mark.parametrize("layer", [0, 1])
def test_kv_that_is_not_finite_shows_in_rows_that_nobody_looks_at(layer: int) -> None:
    """What such a token computed must not be shared; see LanguageModel.forward."""
    weights = random_weights(SPEC, torch.float32)
    weights.layers[layer].qkv[-1, :] = float("inf")  # a channel of V
    model = TritonDecoder(SPEC, weights, MAX_MODEL_LEN)
    step, kv = prompts(model, 5, 5)
    hidden = model.forward(replace(step, outputs=torch.tensor([4])), kv)
    assert not torch.isfinite(hidden).all(-1).any()


def test_copies_of_blocks_read_before_they_write(weights: Any) -> None:
    kv = TritonDecoder(SPEC, weights, MAX_MODEL_LEN).make_kv(5, 16)
    values = torch.arange(5.0).repeat_interleave(16)[None, :, None, None].expand_as(kv.k)
    for pairs, expected in (([(1, 2), (1, 3), (1, 4)], [0, 1, 1, 1, 1]), ([(1, 2), (2, 1), (4, 0)], [4, 2, 1, 3, 4])):
        kv.k.copy_(values)
        kv.v.copy_(-values)
        kv.copy_blocks(pairs)
        assert kv.k.view(2, 5, -1)[:, :, 7].tolist() == [expected] * 2
        assert torch.equal(kv.v, -kv.k)
    kv.clear_blocks([3])
    assert kv.k.view(2, 5, -1).amax((0, 2)).tolist() == [4, 2, 1, 0, 4]


def test_the_command_runs_on_forced_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    model = write_tiny_llama(tmp_path / "model")
    pq.write_table(pa.table({"prompt": ["ab", "ac"]}), tmp_path / "p.parquet")
    found = {}
    for kernels in ("torch", "triton"):
        monkeypatch.setenv(FORCE_VARIABLE, kernels)
        output = tmp_path / f"{kernels}.parquet"
        words = ["run", tmp_path / "p.parquet", "--model", model, "--output", output, "--max-tokens", 2]
        words += ["--dtype", "float32", "--device", "cpu", "--deterministic"]
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        engine = json.loads(pq.read_metadata(output).metadata[b"batchinfer"])["engine"]
        assert engine["kernels"] == {"torch": "torch", "triton": "triton-deterministic"}[kernels]
        assert engine["deterministic"] is True
        found[kernels] = [row["output_token_ids"] for row in pq.read_table(output).to_pylist()]
    assert found["triton"] == found["torch"]
