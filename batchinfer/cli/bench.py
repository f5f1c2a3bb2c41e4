"""batchinfer bench: throughput of this machine on given prompts, beside the least time they can take on it."""

from __future__ import annotations

import json as jsonlib
import sys
from typing import Annotated

import typer

from batchinfer.bench.job import run_bench
from batchinfer.bench.show import to_drawn_text, to_text
from batchinfer.bench.startup import process_age_s
from batchinfer.cli import options as o
from batchinfer.cli.report import given, print_data
from batchinfer.interrupt import InterruptSignals
from batchinfer.progress import progress_for
from batchinfer.settings import job_settings, load_config

IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        "--ignore-eos/--honour-eos",
        help="Go on after the model's end-of-sequence ids, so that the amount of work is fixed. Default: ignore.",
        rich_help_panel=o.SAMPLING,
        show_default=False,
    ),
]


def bench(
    prompts: o.Prompts = None,
    prompt_column: o.PromptColumn = None,
    messages_column: o.MessagesColumn = None,
    id_column: o.IdColumn = None,
    system: o.System = None,
    limit: o.Limit = None,
    config: o.Config = None,
    model: o.Model = None,
    adapter: o.Adapter = None,
    max_tokens: o.MaxTokens = None,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    min_p: o.MinP = None,
    seed: o.Seed = None,
    n: o.N = None,
    ignore_eos: IgnoreEos = None,
    logprobs: o.Logprobs = None,
    prompt_logprobs: o.PromptLogprobs = None,
    dtype: o.Dtype = None,
    kv_dtype: o.KvDtype = None,
    device: o.Device = None,
    max_model_len: o.MaxModelLen = None,
    threads: o.Threads = None,
    max_batch_tokens: o.MaxBatchTokens = None,
    max_num_seqs: o.MaxNumSeqs = None,
    kv_memory: o.KvMemory = None,
    block_size: o.BlockSize = None,
    policy: o.Policy = None,
    prefix_sharing: o.PrefixSharing = None,
    deterministic: o.Deterministic = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> int:
    """Run PROMPTS, keep no results, and print how near the machine came to the least time they can take on it.

    The last line is one JSON object with all figures.

    Example:

        batchinfer bench prompts.parquet --model smollm2-135m --max-tokens 64
    """
    flags, startup_s = given(locals()), process_age_s()
    from_file = load_config(config) if config else {}
    settings = job_settings(flags, {"ignore_eos": True, **from_file}, config, needs_output=False)
    progress = progress_for(sys.stderr, quiet=quiet)
    with InterruptSignals() as signals:
        try:
            report = run_bench(settings, progress, startup_s=startup_s, check_interrupt=signals.check)
        finally:
            progress.close()
    if not json:
        print_data(to_drawn_text(report) if sys.stdout.isatty() else to_text(report))
    print_data(jsonlib.dumps(report.to_dict(), allow_nan=False, ensure_ascii=False))
    return 0
