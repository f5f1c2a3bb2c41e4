"""Every family and what its config can switch, in fp32: log-probabilities and greedy tokens equal transformers'.

transformers runs each sequence alone and whole, with eager attention; we run all of them together in chunks,
with their shared prefixes computed once.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_models import full_logprobs, save_model

from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.types import Completion, SamplingParams

NUM_STEPS = 20
TOLERANCE = 1e-4
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MIXED = ["full_attention", "sliding_attention", "sliding_attention"]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama multi-head": {"num_key_value_heads": 4},
    "llama grouped": {},
    "llama multi-query": {"num_key_value_heads": 1},
    "llama tied": {"tie_word_embeddings": True},
    "llama biases": {"attention_bias": True, "mlp_bias": True},
    "llama head_dim": {"head_dim": 24},
    "mistral": {"sliding_window": None},
    "mistral head_dim": {"sliding_window": None, "head_dim": 32},
    "qwen2": {},
    "qwen2 tied": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "qwen3 biases": {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True},
}
#: Prompts are up to 150 tokens: more than twice the original length of the stretched ones.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 64},
    "yarn": YARN,
    "yarn mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn attention factor": YARN | {"attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2},
}
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "mistral over tiles": {"sliding_window": 70},
    "qwen2 mixed": {"use_sliding_window": True, "sliding_window": 8, "layer_types": MIXED},
    "qwen2 last layers": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3 mixed": {"use_sliding_window": True, "sliding_window": 8, "layer_types": MIXED, "head_dim": 32},
}


def shared_prompts(*lengths: int) -> list[list[int]]:
    """Prompts of these lengths: prefixes of two sequences, each followed by three tokens of its own."""
    rng = random.Random(1)
    stems = [[rng.randrange(300) for _ in range(max(lengths))] for _ in range(2)]
    rows = [stems[i % 2][: length - 3] + [rng.randrange(300) for _ in range(3)] for i, length in enumerate(lengths)]
    # The same twice, and one that ends where others go on.
    return [*rows, rows[0], stems[0][: lengths[0] - 3], stems[1][:33]]


def run_engine(folder: Path, prompts: list[list[int]], chunk: int = 16) -> list[Completion]:
    """Greedy, with all log-probabilities: at each step those of the whole vocabulary."""
    config = EngineConfig(
        dtype="float32", device="cpu", threads=1, block_size=16, max_batch_tokens=chunk, max_num_seqs=4
    )
    engine = Engine(str(folder), config)
    engine.check_integrity = True
    wanted = SamplingParams(max_tokens=NUM_STEPS, ignore_eos=True, logprobs=1000, prompt_logprobs=True)
    completions = [samples[0] for samples in engine.generate(prompts, wanted)]
    assert engine.stats.num_prompt_tokens_reused > 0
    assert engine.stats.num_steps > sum(map(len, prompts)) / chunk / 2
    return completions


def assert_logprobs_equal(model: Any, prompts: list[list[int]], completions: list[Completion]) -> None:
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.error is None
        theirs = full_logprobs(model, prompt + completion.token_ids)

        assert completion.prompt_logprobs is not None
        assert completion.prompt_logprobs[0] is None
        ours = torch.tensor(completion.prompt_logprobs[1:])
        expected = theirs[: len(prompt) - 1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)

        assert completion.top_logprobs is not None
        steps = torch.zeros(NUM_STEPS, theirs.shape[1])
        for step, pairs in enumerate(completion.top_logprobs):
            ids, values = zip(*pairs, strict=True)
            assert len(set(ids)) == theirs.shape[1]
            steps[step, list(ids)] = torch.tensor(values)
        torch.testing.assert_close(steps, theirs[len(prompt) - 1 : -1], atol=TOLERANCE, rtol=0)


def assert_tokens_equal(model: Any, prompts: list[list[int]], completions: list[Completion], **options: Any) -> None:
    """All prompts in one batch, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    theirs = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NUM_STEPS, **options)
    assert [completion.token_ids for completion in completions] == theirs[:, width:].tolist()


def check(family: str, folder: Path, prompts: list[list[int]], chunk: int = 16, **values: Any) -> None:
    """Save a model, run the prompts on both sides, compare."""
    model = save_model(family, folder, **values)
    completions = run_engine(folder, prompts, chunk)
    assert_logprobs_equal(model, prompts, completions)
    assert_tokens_equal(model, prompts, completions)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    check(name.split()[0], tmp_path, shared_prompts(6, 20, 36, 70, 17), **FAMILIES[name])


@pytest.mark.parametrize("name", ROPES)
def test_rope_variants(name: str, tmp_path: Path) -> None:
    rope = {"rope_theta": 10000.0} | ROPES[name]
    check("llama", tmp_path, shared_prompts(9, 40, 70, 150), 48, head_dim=32, rope_parameters=rope)


@pytest.mark.parametrize("chunk", [4, 16])
@pytest.mark.parametrize("name", WINDOWS)
def test_sliding_windows(name: str, chunk: int, tmp_path: Path) -> None:
    prompts = shared_prompts(6, 7, 8, 9, 20, 90)
    check(name.split()[0], tmp_path, prompts, chunk, **WINDOWS[name])


def test_head_beside_tied_embeddings(tmp_path: Path) -> None:
    """A head of its own in the file of a model that says tied is what transformers uses, too."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    save_model("llama", tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    prompts = shared_prompts(6, 20, 36)
    completions = run_engine(tmp_path, prompts)
    assert_logprobs_equal(model, prompts, completions)
    assert_tokens_equal(model, prompts, completions)


def test_padded_vocabulary(tmp_path: Path) -> None:
    """320 rows, 300 of them with a token: the others are never drawn, logprobs stay those of the whole vocabulary."""
    model = save_model("llama", tmp_path, num_ids=300)
    with torch.no_grad():
        model.lm_head.weight[300:] *= 2
    model.save_pretrained(tmp_path)
    prompts = shared_prompts(6, 20, 36, 70)
    completions = run_engine(tmp_path, prompts)
    assert_logprobs_equal(model, prompts, completions)
    assert_tokens_equal(model, prompts, completions, suppress_tokens=list(range(300, 320)))
    best = [pairs[0][0] for completion in completions for pairs in completion.top_logprobs or []]
    assert sum(token_id >= 300 for token_id in best) > 10
