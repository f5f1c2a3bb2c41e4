"""What scoring is tested with: models whose probabilities are known by heart, and a tokenizer that merges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from fakes import TINY_SPEC, FakeTokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from torch import Tensor

from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.kernels.reference import TargetLogprobs
from batchinfer.models.decoder import KVCache, StepInputs
from batchinfer.models.tokenizer import Tokenizer

UNK, BOS, EOS = 0, 1, 2
_MERGES = [("a", "b"), ("ab", "c"), ("Ġ", "a"), ("l", "l")]  # Ġ is a space


class TableModel:
    """P(next id | id) from a table [vocab, vocab], whatever stands before."""

    def __init__(self, probabilities: Tensor) -> None:
        self.spec = replace(TINY_SPEC, vocab_size=len(probabilities))
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self._logits = probabilities.double().log().float()

    def make_kv(self, num_blocks: int, block_size: int) -> KVCache:
        return KVCache.make(self.spec, num_blocks, block_size, self.dtype, self.device)

    def forward(self, inputs: StepInputs, kv: KVCache) -> Tensor:
        return inputs.token_ids[:, None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits[hidden[:, 0].long()]

    def target_logprobs(self, hidden: Tensor, targets: Tensor) -> TargetLogprobs:
        logits = self.logits(hidden)
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs.clamp_min(-1e30)).sum(-1)
        return TargetLogprobs(logprobs.gather(1, targets[:, None])[:, 0], entropy, logits.argmax(-1))


def uniform(vocab_size: int = 256) -> Tensor:
    return torch.full((vocab_size, vocab_size), 1 / vocab_size)


def cyclic(vocab_size: int = 256, p: float = 0.9) -> Tensor:
    """The next id is the one after, with probability p; all others are equal."""
    table = torch.full((vocab_size, vocab_size), (1 - p) / (vocab_size - 1), dtype=torch.float64)
    places = torch.arange(vocab_size)
    table[places, (places + 1) % vocab_size] = p
    return table


def branching(branches: Mapping[int, int], vocab_size: int = 256) -> Tensor:
    """After id i all of the first branches[i] ids are equally probable; by default all."""
    table = torch.full((vocab_size, vocab_size), 1e-30, dtype=torch.float64)
    for token_id in range(vocab_size):
        num_next = branches.get(token_id, vocab_size)
        table[token_id, :num_next] = 1 / num_next
    return table


def table_engine(
    table: Tensor, tokenizer: Any = None, config: EngineConfig | None = None, max_model_len: int = 512
) -> Engine:
    engine = Engine.from_parts(TableModel(table), tokenizer or FakeTokenizer(), (EOS,), max_model_len, config)
    engine.check_integrity = True
    return engine


def merging_tokenizer(*, front: bool = False, behind: bool = False, chat_template: str | None = None) -> Tokenizer:
    """Bytes, with the tokens ab, abc, " a" and ll; adds <s> in front and </s> behind where asked to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", "<s>", "</s>", *alphabet, *(left + right for left, right in _MERGES)]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=_MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ("<unk>", "<s>", "</s>")])
    if front or behind:
        frame = ["<s>"] * front + ["$A"] + ["</s>"] * behind
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join(frame), special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, chat_template)
