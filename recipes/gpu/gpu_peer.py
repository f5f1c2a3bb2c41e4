"""The same weights and prompts through transformers: are the tokens the same, and how fast is `generate_batch`?"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

from gpu_model import random_prompts, run_engine
from gpu_setup import Check, run_part

if TYPE_CHECKING:
    from batchinfer.models.weights import DecoderWeights

#: How attention is tried: as transformers chooses, which is flash attention where it finds it; with torch alone; and
#: by an implementation's name in older releases.
ATTENTION: dict[str, dict[str, Any]] = {
    "as transformers chooses": {},
    "sdpa": {"auto_switch_to_flash": False},
    "sdpa_paged": {"implementation": "sdpa_paged"},
}


def make_peer(check: Check) -> Any:
    """transformers' Llama with random weights, made on the device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    spec = check.spec
    values: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope.theta},
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "attn_implementation": "sdpa",
    }
    config = LlamaConfig(**values)
    with torch.device(check.device):
        default = torch.get_default_dtype()
        torch.set_default_dtype(check.dtype)
        try:
            model = LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(default)
    for name, weight in model.named_parameters():
        if "norm" not in name:  # so that predictions are neither certain nor all alike
            weight.data.normal_(std=1.0 if "embed" in name else weight.shape[-1] ** -0.5)
    return model


def weights_of(peer: Any) -> DecoderWeights:
    """The same numbers in our layout; single tensors are shared."""
    import torch

    from batchinfer.models.weights import DecoderWeights, LayerWeights

    layers = []
    for layer in peer.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        layers.append(
            LayerWeights(
                attn_norm=layer.input_layernorm.weight.data,
                qkv=torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]).detach(),
                qkv_bias=None,
                q_norm=None,
                k_norm=None,
                o=attention.o_proj.weight.data,
                o_bias=None,
                mlp_norm=layer.post_attention_layernorm.weight.data,
                gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach(),
                gate_up_bias=None,
                down=mlp.down_proj.weight.data,
                down_bias=None,
            )
        )
    return DecoderWeights(
        peer.model.embed_tokens.weight.data, layers, peer.model.norm.weight.data, peer.lm_head.weight.data
    )


def generate(
    check: Check, peer: Any, prompts: list[list[int]], *, implementation: str | None = None, **batching: Any
) -> tuple[float, list[list[int]]]:
    """Seconds of a second run through `generate_batch`, and each prompt's tokens."""
    from transformers import GenerationConfig

    if implementation is not None:
        peer.set_attn_implementation(implementation)

    settings = GenerationConfig(
        max_new_tokens=check.sizes.output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    if check.sizes.is_dry:  # by itself it takes most of the memory that is free
        batching |= {"num_blocks": 8, "max_batch_tokens": 64}
    options: dict[str, Any] = {}
    if batching:
        from transformers import ContinuousBatchingConfig

        options["continuous_batching_config"] = ContinuousBatchingConfig(**batching)
    try:
        for _ in range(1 if check.sizes.is_dry else 2):  # the second finds pool and graphs of the first
            began = time.perf_counter()
            found = peer.generate_batch(inputs=prompts, generation_config=settings, persistent_manager=True, **options)
            seconds = time.perf_counter() - began
    finally:
        peer.destroy_cached_continuous_batching_manager()
    tokens = [list(output.generated_tokens) for output in found.values()]
    if len(tokens) != len(prompts) or not all(tokens):
        raise RuntimeError(f"{len(tokens)} of {len(prompts)} prompts came back, {sum(map(bool, tokens))} with tokens")
    return seconds, tokens


def run_peer(check: Check, peer: Any, prompts: list[list[int]]) -> tuple[float, list[list[int]], str]:
    """With the first way of attention that works; its name."""
    errors = []
    for name, options in ATTENTION.items():
        try:
            return *generate(check, peer, prompts, **options), name
        except Exception as error:
            errors.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    raise RuntimeError("generate_batch does not work here: " + "; ".join(errors))


def check_logits(check: Check, peer: Any, model: Any, prompts: list[list[int]]) -> None:
    """Prompt log-probabilities of both, on a few prompts."""
    import numpy as np
    import torch

    from batchinfer.config import EngineConfig
    from batchinfer.engine.engine import Engine
    from batchinfer.models.random_model import NoText
    from batchinfer.types import Prompt, SamplingParams

    some = [ids[:64] for ids in prompts[:4]]
    with torch.inference_mode():
        logits = peer(torch.tensor(some, device=check.device)).logits.float()
    theirs = logits.log_softmax(-1)[:, :-1].gather(2, torch.tensor(some, device=check.device)[:, 1:, None])[..., 0]
    engine = Engine.from_parts(
        model, NoText(check.spec.vocab_size), (), 128, EngineConfig(kv_memory_bytes=_kv_bytes(check, 8 * 128))
    )
    params = SamplingParams(max_tokens=1, prompt_logprobs=True)
    rows = [Prompt(i, np.array(ids, dtype=np.int32), params, key=i) for i, ids in enumerate(some)]
    ours = {done.row_index: done.prompt_logprobs for done in engine.run(rows)}
    found = torch.tensor([ours[i][1:] for i in range(len(some))])  # type: ignore[index]
    difference = (found - theirs.cpu()).abs()
    check.report.put(logprob_difference_mean=difference.mean().item(), logprob_difference_max=difference.max().item())
    if not difference.mean().item() < 0.1:
        check.report.fail(f"log-probabilities are {difference.mean().item():.3f} nats from transformers' on average")


def _kv_bytes(check: Check, tokens: int) -> int:
    spec = check.spec
    return 2 * tokens * spec.num_layers * spec.num_kv_heads * spec.head_dim * check.dtype.itemsize


def part(check: Check) -> None:
    import torch

    from batchinfer.kernels.triton.decoder import TritonDecoder

    report, sizes = check.report, check.sizes
    peer = make_peer(check)
    model = TritonDecoder(check.spec, weights_of(peer), check.spec.max_position)
    prompts = random_prompts(check)
    num_tokens = sizes.prompts * sizes.output_tokens
    with report.guarded("logits"):
        check_logits(check, peer, model, prompts)
    seconds, tokens = run_engine(check, model, prompts)
    report.put(ours_s=seconds, ours_output_tokens_per_s=num_tokens / seconds)
    gc.collect()  # our pool
    torch.cuda.empty_cache()
    with report.guarded("generate_batch"):
        peer_seconds, peer_tokens, attention = run_peer(check, peer, prompts)
        same_first = sum(a[0] == b[0] for a, b in zip(tokens, peer_tokens, strict=True))
        report.put(
            peer_attention=attention,
            peer_implementation=peer.config._attn_implementation,
            peer_s=peer_seconds,
            peer_output_tokens_per_s=sum(map(len, peer_tokens)) / peer_seconds,
            times_peer=peer_seconds / seconds,
            same_first_tokens=same_first / len(prompts),
        )


if __name__ == "__main__":
    run_part(part)
