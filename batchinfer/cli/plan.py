"""batchinfer plan: what a run would have to do, without the model's weights."""

from __future__ import annotations

from batchinfer.cli import options as o
from batchinfer.cli.report import given, print_data, print_json
from batchinfer.plan_report import plan_run
from batchinfer.settings import job_settings, load_config


def plan(
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
    n: o.N = None,
    dtype: o.Dtype = None,
    kv_dtype: o.KvDtype = None,
    device: o.Device = None,
    max_model_len: o.MaxModelLen = None,
    max_batch_tokens: o.MaxBatchTokens = None,
    max_num_seqs: o.MaxNumSeqs = None,
    json: o.Json = False,
    debug: o.Debug = False,
) -> int:
    """Print what completing PROMPTS takes: tokens, possible sharing, KV memory, FLOPs and bytes. No weights are read.

    Every sample is taken to be as long as it may be; see --max-tokens.

    Example:

        batchinfer plan prompts.parquet --model smollm2-135m --max-tokens 64
    """
    settings = job_settings(given(locals()), load_config(config) if config else {}, config, needs_output=False)
    report = plan_run(settings)
    if json:
        print_json(report.to_dict())
    else:
        print_data(report.to_text())
    return 0
