"""batchinfer score: log-likelihoods and perplexities of given texts."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from batchinfer.cli import options as o
from batchinfer.cli.report import given, print_data, print_json
from batchinfer.interrupt import InterruptSignals
from batchinfer.progress import progress_for
from batchinfer.scoring.job import run_score
from batchinfer.scoring.settings import SCORE_SETTINGS, score_settings
from batchinfer.settings import load_config

SCORE = "Score"

Texts = Annotated[
    str | None,
    typer.Argument(
        metavar="TEXTS",
        help="Parquet file, folder or glob; JSONL; hf:NAME[:CONFIG]@SPLIT; a saved dataset; the output of a run.",
        show_default=False,
        rich_help_panel=o.INPUT,
    ),
]
TextColumn = Annotated[
    str | None,
    typer.Option(help="Column with text or token ids. Default: found when named text.", rich_help_panel=o.INPUT),
]
ContextColumn = Annotated[
    str | None,
    typer.Option(
        help="Column with what stands before the continuation and is not scored. Default: context.",
        rich_help_panel=o.INPUT,
    ),
]
ContinuationColumn = Annotated[
    str | None,
    typer.Option(help="Column with what is scored after the context. Default: continuation.", rich_help_panel=o.INPUT),
]
Turns = Annotated[
    str | None,
    typer.Option(
        "--score",
        metavar="TURNS",
        help="Of messages: assistant, the turns of the assistant; or all. Default: assistant.",
        rich_help_panel=SCORE,
    ),
]
Bos = Annotated[
    str | None,
    typer.Option(
        metavar="WHEN",
        help="A beginning-of-sequence token as context: auto, as the tokenizer does; always; never. Default: auto.",
        rich_help_panel=SCORE,
    ),
]
Window = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Longest piece that is read at once. Default: the model's context.",
        rich_help_panel=SCORE,
    ),
]
Stride = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Of longer rows: tokens that each further window scores, after context. Default: the window.",
        rich_help_panel=SCORE,
    ),
]
TokenLogprobs = Annotated[
    bool | None,
    typer.Option(
        "--token-logprobs/--no-token-logprobs",
        help="Write the log-probability of each token. Default: no.",
        rich_help_panel=SCORE,
        show_default=False,
    ),
]
Entropies = Annotated[
    bool | None,
    typer.Option(
        "--entropies/--no-entropies",
        help="Write the entropy at each token. Default: no.",
        rich_help_panel=SCORE,
        show_default=False,
    ),
]


def score(
    prompts: Texts = None,
    text_column: TextColumn = None,
    context_column: ContextColumn = None,
    continuation_column: ContinuationColumn = None,
    messages_column: o.MessagesColumn = None,
    system: o.System = None,
    limit: o.Limit = None,
    config: o.Config = None,
    model: o.Model = None,
    adapter: o.Adapter = None,
    turns: Turns = None,
    bos: Bos = None,
    window: Window = None,
    stride: Stride = None,
    token_logprobs: TokenLogprobs = None,
    entropies: Entropies = None,
    dtype: o.Dtype = None,
    kv_dtype: o.KvDtype = None,
    device: o.Device = None,
    max_model_len: o.MaxModelLen = None,
    threads: o.Threads = None,
    max_batch_tokens: o.MaxBatchTokens = None,
    max_num_seqs: o.MaxNumSeqs = None,
    kv_memory: o.KvMemory = None,
    block_size: o.BlockSize = None,
    prefix_sharing: o.PrefixSharing = None,
    deterministic: o.Deterministic = None,
    output: o.Output = None,
    overwrite: o.Overwrite = None,
    output_prefix: o.OutputPrefix = None,
    strict: o.Strict = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> int:
    """Score TEXTS, teacher-forced: nll, perplexity, bits per byte of each row, and of all rows together.

    Scored is the column text; or continuation after context; or the assistant's turns of messages; or the outputs
    of a run. What rows have in common at their beginning is computed once.

    Example:

        batchinfer score texts.parquet --model smollm2-135m --output scores.parquet
    """
    settings = score_settings(given(locals()), load_config(config, SCORE_SETTINGS) if config else {}, config)
    progress = progress_for(sys.stderr, quiet=quiet)
    with InterruptSignals() as signals:
        try:
            summary = run_score(settings, progress, check_interrupt=signals.check)
        finally:
            progress.close()
    if json:
        if not quiet:
            print(summary.to_text(), file=sys.stderr)
        print_json(summary.to_dict())
    else:
        print_data(summary.to_text())
    return summary.exit_code(strict=settings.strict)
