"""The options of the commands. All default to None: "not given", so that a config file can speak.

What a value may be is checked in settings.py; the defaults named in the help are imported from
where they are used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchinfer.config import BLOCK_SIZES, EngineConfig
from batchinfer.settings import FLUSH_ROWS, FLUSH_SECONDS
from batchinfer.types import DEFAULT_MAX_TOKENS

_ENGINE = EngineConfig()

INPUT = "Input"
MODEL = "Model"
SAMPLING = "Sampling"
ENGINE = "Engine"
OUTPUT = "Output"

# Input
Prompts = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPTS",
        help="Parquet file, folder or glob; JSONL; OpenAI Batch JSONL; hf:NAME[:CONFIG]@SPLIT; a saved dataset.",
        show_default=False,
        rich_help_panel=INPUT,
    ),
]
PromptColumn = Annotated[
    str | None,
    typer.Option(
        help="Column with prompt text or token ids. Default: found when named prompt or text.", rich_help_panel=INPUT
    ),
]
MessagesColumn = Annotated[
    str | None,
    typer.Option(help="Column with chat messages. Default: found when named messages.", rich_help_panel=INPUT),
]
IdColumn = Annotated[
    str | None,
    typer.Option(
        help="Column that names rows for the random numbers. Default: found when named id or custom_id.",
        rich_help_panel=INPUT,
    ),
]
PriorityColumn = Annotated[
    str | None,
    typer.Option(help="Numbers; higher runs earlier. Needs --policy priority. Default: none.", rich_help_panel=INPUT),
]
System = Annotated[
    str | None,
    typer.Option(help="System message for chat rows that have none. Default: none.", rich_help_panel=INPUT),
]
Limit = Annotated[
    int | None, typer.Option(help="Use only the first LIMIT rows. Default: all rows.", rich_help_panel=INPUT)
]
Window = Annotated[
    int | None,
    typer.Option(
        metavar="ROWS",
        help="Rows that are planned together and share prefixes; each window is a part of the output. Default: 65536.",
        rich_help_panel=INPUT,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="TOML file with any of these options; flags win. Default: none.",
        rich_help_panel=INPUT,
    ),
]

# Model
Model = Annotated[
    str | None,
    typer.Option(
        help="Folder in Hugging Face layout, GGUF file, hub id, or alias (smollm2-135m). Required here or in --config.",
        rich_help_panel=MODEL,
    ),
]
Adapter = Annotated[
    str | None,
    typer.Option(
        help="PEFT LoRA adapter, a folder or hub id, merged into the model. As --model itself it brings its own base.",
        rich_help_panel=MODEL,
    ),
]
# Sampling
MaxTokens = Annotated[
    int | None,
    typer.Option(
        help=f"Most tokens to generate per sample. Default: the model's, else {DEFAULT_MAX_TOKENS}.",
        rich_help_panel=SAMPLING,
    ),
]
MinTokens = Annotated[
    int | None,
    typer.Option(help="Ignore ends and stops before this many tokens. Default: 0.", rich_help_panel=SAMPLING),
]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 is greedy. Default: the model's if it says do_sample, else 0.", rich_help_panel=SAMPLING),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Draw from the most probable tokens that reach this probability. Default: the model's, else 1 (all).",
        rich_help_panel=SAMPLING,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        help="Draw from this many most probable tokens. Default: the model's, else 0 (all).", rich_help_panel=SAMPLING
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Drop tokens less probable than this times the best one. Default: the model's, else 0 (none).",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        help="Divides logits of tokens seen in prompt or output. Default: the model's, else 1 (off).",
        rich_help_panel=SAMPLING,
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(help="Subtracted once from tokens already in the output. Default: 0.", rich_help_panel=SAMPLING),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(help="Subtracted for each time a token is in the output. Default: 0.", rich_help_panel=SAMPLING),
]
Seed = Annotated[
    int | None, typer.Option(help="Seed of the random numbers of every row. Default: 0.", rich_help_panel=SAMPLING)
]
N = Annotated[
    int | None,
    typer.Option("--n", help="Samples per prompt; each is a row of the output. Default: 1.", rich_help_panel=SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        help="End the output before this text. Repeatable. Default: none.",
        rich_help_panel=SAMPLING,
    ),
]
StopTokenId = Annotated[
    list[int] | None,
    typer.Option(
        "--stop-token-id",
        metavar="ID",
        help="End the output at this token id. Repeatable. Default: none.",
        rich_help_panel=SAMPLING,
    ),
]
IncludeStop = Annotated[
    bool | None,
    typer.Option(
        "--include-stop/--exclude-stop",
        help="Keep the stop text in the output. Default: exclude.",
        rich_help_panel=SAMPLING,
        show_default=False,
    ),
]
IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        "--ignore-eos/--honour-eos",
        help="Go on after the model's end-of-sequence ids. Default: honour.",
        rich_help_panel=SAMPLING,
        show_default=False,
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        help="Log-probability of each output token, and of the K most probable ones. Default: none.",
        rich_help_panel=SAMPLING,
    ),
]
LogprobsMode = Annotated[
    str | None,
    typer.Option(
        metavar="MODE",
        help="raw: of the model itself; processed: of what was drawn from. Default: raw.",
        rich_help_panel=SAMPLING,
    ),
]
PromptLogprobs = Annotated[
    bool | None,
    typer.Option(
        "--prompt-logprobs/--no-prompt-logprobs",
        help="Raw log-probability of each prompt token. Default: no.",
        rich_help_panel=SAMPLING,
        show_default=False,
    ),
]

# Engine
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="Format of weights and KV: float32, bfloat16, float16. Default: auto, which is bfloat16 where checkpoint "
        "and device use it.",
        rich_help_panel=ENGINE,
    ),
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="Format of KV: fp8 takes about half the memory of 16 bits, and changes log-probabilities and tokens. For "
        "GPUs: on a CPU it is slow. Default: auto, that of --dtype.",
        rich_help_panel=ENGINE,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1 and so on. Default: auto, a GPU if there is one.", rich_help_panel=ENGINE),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of prompt and output together. Default: what the model was made for.", rich_help_panel=ENGINE
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(help="CPU threads. Default: the physical cores this process may use.", rich_help_panel=ENGINE),
]
MaxBatchTokens = Annotated[
    int | None,
    typer.Option(
        help=f"Token budget of a step, prompt chunks and decodes together. Default: {_ENGINE.max_batch_tokens}.",
        rich_help_panel=ENGINE,
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(help=f"Sequences running at once. Default: {_ENGINE.max_num_seqs}.", rich_help_panel=ENGINE),
]
KvMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for KV, e.g. 4GiB or 512MB. Default: what the job can use, at most half of the free memory.",
        rich_help_panel=ENGINE,
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help=f"Tokens per KV block: {', '.join(map(str, BLOCK_SIZES))}. Default: {_ENGINE.block_size}.",
        rich_help_panel=ENGINE,
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        metavar="POLICY",
        help="Order of rows: prefix (along shared prefixes), fcfs (as they come) or priority (by --priority-column). "
        f"Default: {_ENGINE.policy}.",
        rich_help_panel=ENGINE,
    ),
]
PrefixSharing = Annotated[
    bool | None,
    typer.Option(
        "--prefix-sharing/--no-prefix-sharing",
        help="Compute shared prefixes once. Default: yes.",
        rich_help_panel=ENGINE,
        show_default=False,
    ),
]
Deterministic = Annotated[
    bool | None,
    typer.Option(
        "--deterministic/--no-deterministic",
        help="On a GPU: no row's result depends on its company, at some cost. On a CPU it never does. Default: no.",
        rich_help_panel=ENGINE,
        show_default=False,
    ),
]

# Output
Output = Annotated[
    str | None,
    typer.Option(
        metavar="OUT",
        help="Parquet file, if it ends in .parquet, else a folder of part-00000.parquet and so on. Required here or in "
        "--config.",
        rich_help_panel=OUTPUT,
    ),
]
Overwrite = Annotated[
    bool | None,
    typer.Option(
        "--overwrite/--no-overwrite",
        help="Start anew, whatever is there of this or another job. Default: no, an unfinished job goes on.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
OutputFormat = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="parquet, or openai: lines of the OpenAI Batch API, for an OUT that ends in .jsonl. "
        "Default: what the ending says.",
        rich_help_panel=OUTPUT,
    ),
]
OutputPrefix = Annotated[
    str | None,
    typer.Option(help="Put before the names of the columns that are added. Default: nothing.", rich_help_panel=OUTPUT),
]
Strict = Annotated[
    bool | None,
    typer.Option(
        "--strict/--no-strict",
        help="Exit with code 3 if any row failed. Default: no.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
MaxRowErrors = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Stop with code 6 when more than N rows have failed. Default: go on, however many fail.",
        rich_help_panel=OUTPUT,
    ),
]
FlushSeconds = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        help=f"A kill loses at most the completions of the last S seconds. Default: {FLUSH_SECONDS:g}.",
        rich_help_panel=OUTPUT,
    ),
]
FlushRows = Annotated[
    int | None,
    typer.Option(metavar="N", help=f"Nor more than N completions. Default: {FLUSH_ROWS}.", rich_help_panel=OUTPUT),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print the report as one JSON object on stdout, nothing else there. Default: no.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", help="No progress on stderr. Default: no.", rich_help_panel=OUTPUT, show_default=False
    ),
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Show the traceback of an unexpected error. Default: no.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
