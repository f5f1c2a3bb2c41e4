"""What did a fine-tune change? Trains a small LoRA on some prompts, and evaluates before and after on the others.

    python recipes/eval_demo.py data/quickstart.parquet --model smollm2-135m --output build/eval-demo

The file needs columns `prompt` and `reference`; each third row, by `family` if there is such a column, is for training.
The adapter (PEFT, rank 8, on the query and value projections) learns the references in a few supervised steps, in
bfloat16 on the CPU. Each example is only the end of its prompt, at most --context tokens, so that a step takes about a
second. Then `batchinfer eval` runs and compares both; options that are not the recipe's go to it:

    python recipes/eval_demo.py ... --metrics accuracy,length --gate 'accuracy>=-0.01'

The last line is the report's path. The same numbers come out again on the same machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from parity import load_transformers, positive
from torch import Tensor

from batchinfer.errors import InputError
from batchinfer.models.source import ModelSource, resolve_model
from batchinfer.models.tokenizer import Tokenizer

BATCHINFER = str(Path(sys.executable).with_name("batchinfer"))
RANK = 8
IGNORED = -100  # label of a token that is context, as torch's cross_entropy takes it
#: What an answer ends with: the prompts' own examples are set apart by a blank line.
END = "\n\n"


@dataclass(frozen=True, slots=True)
class Example:
    """token_ids [n] int64; labels [n]: the ids of the answer, IGNORED before it."""

    token_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]


def main(argv: Sequence[str] | None = None) -> int:
    args, more = parse_args(argv)
    try:
        source = resolve_model(args.model)
        train, held_out = split_rows(pq.read_table(args.prompts))
        examples = make_examples(train, source.tokenizer, args.context)
    except (InputError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    prompts, adapter, report = args.output / "prompts.parquet", args.output / "adapter", args.output / "report"
    pq.write_table(held_out, prompts)
    print(f"{train.num_rows} rows to train on, {held_out.num_rows} to evaluate on", flush=True)
    train_adapter(source, examples, adapter, num_steps=args.steps, batch_size=args.batch_size, seed=args.seed)

    command = [BATCHINFER, "eval", str(prompts), "--before", args.model, "--after", str(adapter)]
    command += ["--output", str(report), "--max-tokens", str(args.max_tokens), "--stop", END, "--noise-floor"]
    command += ["--slice-by", "family"] if "family" in held_out.column_names else []
    done = subprocess.run([*command, *more], check=False)
    if (report / "report.html").is_file():
        print(f"adapter: {adapter}\nreport: {report / 'report.html'}")
    return done.returncode


def parse_args(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """(options, those that are for `batchinfer eval`)"""
    parser = argparse.ArgumentParser(description="Train a small LoRA, evaluate before and after.", allow_abbrev=False)
    parser.add_argument("prompts", type=Path, help="Parquet file with columns prompt and reference")
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder or GGUF file")
    parser.add_argument("--output", type=Path, default=Path("build/eval-demo"), help="folder")
    parser.add_argument("--steps", type=positive, default=30)
    parser.add_argument("--batch-size", type=positive, default=4)
    parser.add_argument("--context", type=positive, default=160, help="tokens of a prompt's end to train on")
    parser.add_argument("--max-tokens", type=positive, default=48, help="of an output")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_known_args(argv)


def split_rows(table: pa.Table) -> tuple[pa.Table, pa.Table]:
    """(every third row of each family, the others). Raises InputError if a column or enough rows are missing."""
    missing = {"prompt", "reference"} - set(table.column_names)
    if missing:
        raise InputError(f"no column {', '.join(sorted(missing))}; there are {', '.join(table.column_names)}")
    families = table.column("family").to_pylist() if "family" in table.column_names else [None] * table.num_rows
    num_seen: dict[Any, int] = {}
    is_train = []
    for family in families:
        place = num_seen[family] = num_seen.get(family, -1) + 1
        is_train.append(place % 3 == 0)
    mask = np.array(is_train, dtype=bool)
    if not mask.any() or mask.all():
        raise InputError(f"{table.num_rows} rows are too few to train on some and evaluate on others")
    return table.filter(pa.array(mask)), table.filter(pa.array(~mask))


def make_examples(rows: pa.Table, tokenizer: Tokenizer, num_context: int) -> list[Example]:
    """The end of each prompt, and the reference as the model would write it: after a space, before a blank line."""
    rows = rows.filter(pc.and_(rows["prompt"].is_valid(), rows["reference"].is_valid()))
    prompts = tokenizer.encode_batch(rows.column("prompt").to_pylist())
    answers = [f" {reference}{END}" for reference in rows.column("reference").to_pylist()]
    examples = []
    for context, answer in zip(prompts, tokenizer.encode_batch(answers, add_special_tokens=False), strict=True):
        context = context[-num_context:]
        token_ids = np.concatenate([context, answer]).astype(np.int64)
        labels = token_ids.copy()
        labels[: len(context)] = IGNORED
        examples.append(Example(token_ids, labels))
    return examples


def train_adapter(
    source: ModelSource, examples: Sequence[Example], folder: Path, *, num_steps: int, batch_size: int, seed: int
) -> list[float]:
    """Write a PEFT adapter folder; returns the loss of each step, in nats per token of the answers."""
    from peft import LoraConfig, get_peft_model
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # about what peft calls in it
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model: Any = get_peft_model(load_transformers(source, torch.float32), config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    print(f"training {sum(p.numel() for p in trained):,} of {sum(p.numel() for p in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=num_steps)
    losses = []
    began = time.perf_counter()
    for step, batch in enumerate(batches(examples, num_steps, batch_size, seed), start=1):
        loss = answer_loss(model.get_base_model(), *padded(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 8 == 0 or step == num_steps:
            recent = sum(losses[-8:]) / len(losses[-8:])
            print(f"step {step} of {num_steps}, {time.perf_counter() - began:.0f} s: loss {recent:.2f}", flush=True)
    model.peft_config["default"].base_model_name_or_path = source.name
    # Whether the embeddings were resized it would ask of the hub.
    model.save_pretrained(folder, save_embedding_layers=False)
    return losses


def answer_loss(model: Any, token_ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Mean cross-entropy of the answers' tokens. Only they go through the head, which is costly."""
    answers = labels[:, 1:] != IGNORED  # position t predicts t + 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=token_ids, attention_mask=mask, use_cache=False).last_hidden_state
        logits = model.get_output_embeddings()(hidden[:, :-1][answers])
    return torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][answers])


def batches(examples: Sequence[Example], num: int, batch_size: int, seed: int) -> Iterator[list[Example]]:
    """`num` batches: the examples in one random order after the other."""
    generator = np.random.default_rng(seed)
    order: list[int] = []
    for _ in range(num):
        while len(order) < batch_size:
            order += generator.permutation(len(examples)).tolist()
        yield [examples[place] for place in order[:batch_size]]
        del order[:batch_size]


def padded(batch: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """(token ids, labels, attention mask), each [batch, longest] int64, filled up on the right."""
    shape = len(batch), max(len(example.token_ids) for example in batch)
    token_ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORED)
    for row, example in enumerate(batch):
        num = len(example.token_ids)
        token_ids[row, :num] = torch.from_numpy(example.token_ids)
        labels[row, :num] = torch.from_numpy(example.labels)
        mask[row, :num] = 1
    return token_ids, labels, mask


if __name__ == "__main__":
    sys.exit(main())
