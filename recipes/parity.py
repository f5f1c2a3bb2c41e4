"""Greedy tokens of batchinfer beside those of transformers' `generate`, both in fp32, on the same prompts.

    python recipes/parity.py data/quickstart.parquet --model smollm2-135m --rows 16 --max-tokens 32

Both get the ids of batchinfer's tokenizer. transformers runs eager attention on batches padded on the left; a GGUF
file is dequantised by transformers' own reader. Rows are taken evenly spread over the file.

Two programs add numbers in different orders, so where two tokens are all but equally probable either may win.
A row may differ only there: its two tokens' logits lie less than --near-tie apart. Otherwise the exit code is 1.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import torch
from torch import Tensor

from batchinfer.config import EngineConfig
from batchinfer.dataset.columns import find_columns
from batchinfer.dataset.prompts import build_prompts
from batchinfer.dataset.source import open_source
from batchinfer.engine.engine import Engine
from batchinfer.errors import InputError
from batchinfer.models.source import ModelSource, resolve_model
from batchinfer.types import Completion, Prompt, SamplingParams


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step at which the two sides took different tokens."""

    step: int
    ours: int
    theirs: int
    gap: float  # transformers' logit of its token minus that of ours


@dataclass(frozen=True, slots=True)
class RowParity:
    """One row, compared up to the first difference: behind it the two sides see different texts."""

    num_tokens: int  # compared, the first that differs included
    num_near_ties: int  # steps whose two best logits lie less than the limit apart
    smallest_gap: float  # between the two best logits of a step
    max_logprob_difference: float  # over our tokens, nats
    difference: Difference | None


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        source = resolve_model(args.model)
        params = SamplingParams(max_tokens=args.max_tokens, logprobs=0)
        ids, prompts = read_prompts(args.prompts, args.prompt_column, source, args.rows, params)
    except (InputError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    began = time.perf_counter()
    completions = run_ours(source, prompts, args.threads)
    ours_s = time.perf_counter() - began
    print(f"batchinfer: {len(prompts)} rows in {ours_s:.0f} s", flush=True)

    began = time.perf_counter()
    rows: dict[int, RowParity] = {}
    for row, logits in run_theirs(source, prompts, args.max_tokens, args.batch_size):
        rows[row] = compare(completions[row], logits, source, args.near_tie)
    theirs_s = time.perf_counter() - began
    print(f"transformers: {len(prompts)} rows in {theirs_s:.0f} s", flush=True)
    return report(ids, [rows[row] for row in range(len(prompts))], args.near_tie, ours_s, theirs_s)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare greedy tokens with transformers, in fp32.")
    parser.add_argument("prompts", help="Parquet or JSON Lines file")
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder or GGUF file")
    parser.add_argument("--prompt-column", help="default: prompt or text")
    parser.add_argument("--rows", type=positive, default=64, help="rows, evenly spread over the file")
    parser.add_argument("--max-tokens", type=positive, default=32)
    parser.add_argument("--batch-size", type=positive, default=8, help="of transformers")
    parser.add_argument("--near-tie", type=float, default=1e-4, help="logits closer than this count as equal")
    parser.add_argument("--threads", type=positive, help="of both; default: the physical cores")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"{value} is below 1")
    return value


def read_prompts(
    path: str, column: str | None, source: ModelSource, num_rows: int, params: SamplingParams
) -> tuple[list[str], list[Prompt]]:
    """(ids or row numbers, prompts) of rows 0, k, 2 k, ... of the file."""
    rows = open_source(path)
    columns = find_columns(rows.schema, prompt=column)
    table = pa.concat_tables(rows.windows())
    step = max(1, table.num_rows // num_rows)
    taken = list(range(0, table.num_rows, step))[:num_rows]
    table = table.take(taken)
    prompts = build_prompts(table, 0, columns, source.tokenizer, params)
    ids = [str(i) for i in (table[columns.id].to_pylist() if columns.id else taken)]
    for row_id, prompt in zip(ids, prompts, strict=True):
        if prompt.error is not None:
            raise InputError(f"row {row_id}: {prompt.error.message}")
        prompt.params = params
    return ids, prompts


def run_ours(source: ModelSource, prompts: list[Prompt], threads: int | None) -> list[Completion]:
    engine = Engine(source, EngineConfig(dtype="float32", device="cpu", threads=threads))
    completions = sorted(engine.run(prompts), key=lambda completion: completion.row_index)
    for completion in completions:
        if completion.error is not None:
            raise RuntimeError(f"row {completion.row_index}: {completion.error.message}")
    return completions


def load_transformers(source: ModelSource, dtype: torch.dtype) -> Any:
    """The same model in transformers, with eager attention."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    if source.format == "gguf":
        model = _load_gguf(str(source.path)).to(dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(source.path, dtype=dtype, attn_implementation="eager")
    model.generation_config = GenerationConfig()
    return model.eval()


def _load_gguf(path: str) -> Any:
    # `from_pretrained(gguf_file=...)` does the same but asks for accelerate.
    from transformers import AutoConfig, AutoModelForCausalLM, modeling_gguf_pytorch_utils
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    values = load_gguf_checkpoint(path)["config"]
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    # Its progress bar goes to logs too, and has no switch.
    with patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda items, **_: items, create=True):
        tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - ({"lm_head.weight"} if config.tie_word_embeddings else set()):
        raise RuntimeError(f"{path}: transformers leaves {missing} unset and has no place for {unexpected}")
    model.tie_weights()
    return model


def run_theirs(
    source: ModelSource, prompts: list[Prompt], max_tokens: int, batch_size: int
) -> Iterator[tuple[int, Tensor]]:
    """(row, its logits [num_steps, vocab] fp32 at each greedy step), rows of like length together.

    Rows that end before the longest of their batch have further steps that mean nothing.
    """
    model = load_transformers(source, torch.float32)
    num_ids, vocab_size = source.tokenizer.num_ids, source.spec.vocab_size
    by_length = sorted(range(len(prompts)), key=lambda row: len(prompts[row].token_ids))
    for begin in range(0, len(by_length), batch_size):
        rows = by_length[begin : begin + batch_size]
        width = len(prompts[rows[-1]].token_ids)
        ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
        for at, row in enumerate(rows):
            tokens = torch.from_numpy(prompts[row].token_ids)
            ids[at, width - len(tokens) :] = tokens
            mask[at, width - len(tokens) :] = 1
        found = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=list(source.eos_token_ids) or None,
            pad_token_id=0,
            suppress_tokens=list(range(num_ids, vocab_size)) or None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        yield from zip(rows, torch.stack(found.logits, dim=1).float(), strict=True)


def compare(completion: Completion, logits: Tensor, source: ModelSource, near_tie: float) -> RowParity:
    """Our completion beside transformers' logits [num_steps, vocab] of the same row."""
    assert completion.logprobs is not None
    # Neither side draws from the rows of a padded vocabulary, but log-probabilities are over all of it.
    best = logits[:, : source.tokenizer.num_ids].topk(2, dim=-1)
    theirs = best.indices[:, 0].tolist()
    ends = [step for step, token in enumerate(theirs) if token in source.eos_token_ids]
    theirs = theirs[: ends[0] + 1] if ends else theirs
    ours = completion.token_ids
    steps = range(min(len(ours), len(theirs)))
    step = next((step for step in steps if ours[step] != theirs[step]), None)
    difference = None
    if step is not None:
        gap = float(logits[step, theirs[step]] - logits[step, ours[step]])
        difference = Difference(step, ours[step], theirs[step], gap)
    elif len(ours) != len(theirs):
        raise RuntimeError(f"row {completion.row_index}: {len(ours)} tokens beside {len(theirs)} that begin alike")
    count = len(steps) if step is None else step + 1
    gaps = (best.values[:count, 0] - best.values[:count, 1]).tolist()
    expected = torch.log_softmax(logits[:count], -1).gather(1, torch.tensor(ours[:count])[:, None])[:, 0]
    apart = (torch.tensor(completion.logprobs[:count]) - expected).abs()
    return RowParity(count, sum(gap < near_tie for gap in gaps), min(gaps), float(apart.max()), difference)


def report(ids: list[str], rows: list[RowParity], near_tie: float, ours_s: float, theirs_s: float) -> int:
    """Print what was found; the exit code."""
    import transformers

    num_wrong = 0
    for row_id, row in zip(ids, rows, strict=True):
        if row.difference is not None:
            is_tie = abs(row.difference.gap) < near_tie
            num_wrong += not is_tie
            print(f"{row_id}: {'near tie' if is_tie else 'DIFFERENT'}: {asdict(row.difference)}")
    num_equal = sum(row.difference is None for row in rows)
    result = {
        "num_rows": len(rows),
        "num_rows_equal": num_equal,
        "num_rows_differ_at_near_tie": len(rows) - num_equal - num_wrong,
        "num_rows_different": num_wrong,
        "num_tokens_compared": sum(row.num_tokens for row in rows),
        "num_near_ties": sum(row.num_near_ties for row in rows),
        "smallest_gap": min(row.smallest_gap for row in rows),
        "max_logprob_difference": max(row.max_logprob_difference for row in rows),
        "near_tie": near_tie,
        "batchinfer_s": round(ours_s, 1),
        "transformers_s": round(theirs_s, 1),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(f"{num_equal} of {len(rows)} rows equal, {num_wrong} different without a near tie")
    print(json.dumps(result))
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
