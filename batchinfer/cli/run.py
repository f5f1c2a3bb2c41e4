"""batchinfer run: prompts in, completions out."""

from __future__ import annotations

import sys

from batchinfer.cli import options as o
from batchinfer.cli.report import given, print_data, print_json
from batchinfer.interrupt import InterruptSignals
from batchinfer.job import run_job
from batchinfer.progress import progress_for
from batchinfer.settings import job_settings, load_config

#: To end within 5 s of a signal.
_DEADLINE_S = 4.0
_LAST_WORDS = (
    "a step was taking long, and completions since the last flush are run again: to continue, run the same command "
    "again (without --overwrite)"
)


def run(
    prompts: o.Prompts = None,
    prompt_column: o.PromptColumn = None,
    messages_column: o.MessagesColumn = None,
    id_column: o.IdColumn = None,
    priority_column: o.PriorityColumn = None,
    system: o.System = None,
    limit: o.Limit = None,
    window: o.Window = None,
    config: o.Config = None,
    model: o.Model = None,
    adapter: o.Adapter = None,
    max_tokens: o.MaxTokens = None,
    min_tokens: o.MinTokens = None,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    min_p: o.MinP = None,
    repetition_penalty: o.RepetitionPenalty = None,
    presence_penalty: o.PresencePenalty = None,
    frequency_penalty: o.FrequencyPenalty = None,
    seed: o.Seed = None,
    n: o.N = None,
    stop: o.Stop = None,
    stop_token_ids: o.StopTokenId = None,
    include_stop: o.IncludeStop = None,
    ignore_eos: o.IgnoreEos = None,
    logprobs: o.Logprobs = None,
    logprobs_mode: o.LogprobsMode = None,
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
    output: o.Output = None,
    overwrite: o.Overwrite = None,
    output_format: o.OutputFormat = None,
    output_prefix: o.OutputPrefix = None,
    strict: o.Strict = None,
    max_row_errors: o.MaxRowErrors = None,
    flush_seconds: o.FlushSeconds = None,
    flush_rows: o.FlushRows = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> int:
    """Complete every prompt of PROMPTS and write the completions, in input order, to OUT.

    All input columns are kept. A bad row is an error of that row, in the column error; the run goes on.
    A run that was stopped, however, goes on where it was when the same command is given again.

    Example:

        batchinfer run prompts.parquet --model smollm2-135m --max-tokens 64 --output completions.parquet
    """
    flags = given(locals())
    settings = job_settings(flags, load_config(config) if config else {}, config)
    progress = progress_for(sys.stderr, quiet=quiet)
    with InterruptSignals(_DEADLINE_S, _LAST_WORDS) as signals:
        try:
            summary = run_job(settings, progress, check_interrupt=signals.check)
        finally:
            progress.close()
    if json:
        if not quiet:
            print(summary.to_text(), file=sys.stderr)
        print_json(summary.to_dict())
    else:
        print_data(summary.to_text())
    return summary.exit_code(strict=settings.strict)
