"""Whether a job's memory grows with the number of its rows.

    python recipes/bench/memory.py --rows 10000,200000 --write docs/jobs.md

Each point is a process `batchinfer run` on a tiny random Llama, so that rows and not the model take the memory; its
resident set is sampled as it runs, and its peak is what the system counted. Rows differ, carry a column that no prompt
is made of, and log-probabilities are kept, the most probable tokens' too.

Prints a Markdown table and one JSON line last. With --write the table and the plot go to the document's sections
memory:peak and memory:plot.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import publish

SAMPLE_S = 0.1
_MIB = 2**20


@dataclass(frozen=True)
class Measured:
    """One run.

    Attributes:
        peak_bytes: of the resident set, as the system counted it up to the last sample.
        samples: (seconds since the start, bytes of the resident set).
    """

    peak_bytes: int
    wall_s: float
    samples: list[tuple[float, int]]


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parse(arguments)
    if args.write:
        publish.check_document(args.write)
    runs: dict[int, Measured] = {}
    with tempfile.TemporaryDirectory(prefix="memory-") as name:
        folder = Path(name)
        model = args.model or str(make_model(folder / "model"))
        for num_rows in args.rows:
            prompts = folder / f"{num_rows}.parquet"
            write_prompts(prompts, num_rows)
            runs[num_rows] = run(args, prompts, model, folder / f"out-{num_rows}")
            peak_mib = runs[num_rows].peak_bytes / _MIB
            print(f"{num_rows} rows: {peak_mib:.0f} MiB, {runs[num_rows].wall_s:.0f} s", flush=True)
    result = {
        "rows": {rows: {"peak_bytes": run.peak_bytes, "wall_s": round(run.wall_s, 1)} for rows, run in runs.items()},
        "growth": growth(runs),
        "window": args.window,
        "max_tokens": args.max_tokens,
        "machine": publish.describe_machine(),
        "commit": publish.commit(),
    }
    table = section(result)
    print(f"\n{table}")
    if args.write:
        plot = publish.beside(args.write, "memory.svg")
        draw(runs, plot)
        publish.write_section(args.write, "memory:peak", table)
        publish.write_section(
            args.write, "memory:plot", publish.picture(args.write, plot, "Resident memory while jobs run")
        )
    print(json.dumps(result, allow_nan=False))


def growth(runs: dict[int, Measured]) -> float:
    """How much higher the peak of the most rows is than that of the fewest, 0.1 for a tenth."""
    return runs[max(runs)].peak_bytes / runs[min(runs)].peak_bytes - 1.0


def section(result: dict[str, Any]) -> str:
    rows = [
        [f"{int(rows):,}", f"{of['peak_bytes'] / _MIB:,.0f} MiB", f"{of['wall_s']:,.0f}"]
        for rows, of in result["rows"].items()
    ]
    return (
        publish.markdown_table(["rows", "peak of the resident set", "seconds"], rows)
        + f"\n\nThe most rows peak {100 * result['growth']:+.1f} % beside the fewest. Tiny random Llama, "
        f"{result['max_tokens']} tokens a row with `--logprobs 5`, `--window {result['window']}`; {result['machine']}, "
        f"commit {result['commit']}."
    )


def make_model(folder: Path) -> Path:
    """A random Llama of two small layers with a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    set_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


def write_prompts(path: Path, num_rows: int) -> None:
    """A window at a time, so that this process stays small too."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string()), ("unused", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, 4096):
            ids = range(start, min(num_rows, start + 4096))
            columns = [ids, [f"Item {i}: {i * 7919 % 99991} apples" for i in ids], [f"{i} " * 100 for i in ids]]
            writer.write_table(pa.table([pa.array(list(column)) for column in columns], schema=schema))


def run(args: argparse.Namespace, prompts: Path, model: str, output: Path) -> Measured:
    """Raises SystemExit with the end of its standard error if it fails."""
    options = {
        "--model": model,
        "--output": output,
        "--max-tokens": args.max_tokens,
        "--logprobs": 5,
        "--window": args.window,
        "--kv-memory": args.kv_memory,
    }
    words = [str(word) for pair in options.items() for word in pair]
    command = [publish.BATCHINFER, "run", str(prompts), *words, "--ignore-eos", "--quiet"]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        samples, peak_bytes = [], 0
        while process.poll() is None:
            # Not getrusage(), whose peak of a child begins with what its parent had.
            found = sizes(process.pid)
            samples.append((time.monotonic() - began, found["VmRSS"]))
            peak_bytes = max(peak_bytes, found["VmHWM"])
            time.sleep(SAMPLE_S)
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"the run failed with {process.returncode}:\n{errors.read()[-2000:]}")
    return Measured(peak_bytes, time.monotonic() - began, samples)


def sizes(pid: int) -> dict[str, int]:
    """Bytes of the resident set now (VmRSS) and at its peak (VmHWM); 0 for a process that has just ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        text = ""
    found = {name: int(size) * 1024 for name, size in re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", text, re.MULTILINE)}
    return {"VmRSS": 0, "VmHWM": 0, **found}


def draw(runs: dict[int, Measured], path: Path) -> None:
    """Against the part of the run that has passed, as the runs are of very different lengths."""
    figure = publish.new_figure()
    axes = figure.subplots()
    for num_rows, measured in runs.items():
        points = [(at_s, size) for at_s, size in measured.samples if size]
        times = [100 * at_s / measured.wall_s for at_s, _ in points]
        axes.plot(times, [size / _MIB for _, size in points], label=f"{num_rows:,} rows ({measured.wall_s:,.0f} s)")
    axes.set_xlabel("time passed, % of the run")
    axes.set_ylabel("resident memory, MiB")
    axes.set_ylim(bottom=0)
    axes.legend()
    publish.save_plot(figure, path)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=lambda text: [int(one) for one in text.split(",")], default=[10_000, 200_000])
    parser.add_argument("--model", help="default: a tiny random one is made")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--kv-memory", default="32MiB")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
