"""batchinfer eval: what changed between two runs, or two models, with error bars."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from batchinfer.cli import eval_options as e
from batchinfer.cli import options as o
from batchinfer.cli.report import given, print_data, print_json
from batchinfer.errors import InputError
from batchinfer.eval_job import EvalOutcome, EvalSettings, check_eval, run_eval
from batchinfer.interrupt import InterruptSignals
from batchinfer.progress import progress_for
from batchinfer.settings import SETTINGS, JobSettings, job_settings, load_config


def eval_(
    inputs: e.Inputs,
    before: e.Before = None,
    after: e.After = None,
    metrics: e.Metrics = None,
    reference_column: e.ReferenceColumn = None,
    output_column: e.OutputColumn = None,
    match: e.Match = None,
    pattern: e.Pattern = None,
    score_function: e.ScoreFunction = None,
    k: e.K = None,
    embedder: e.Embedder = None,
    texts: e.Texts = None,
    cluster_column: e.ClusterColumn = None,
    slice_by: e.SliceBy = None,
    noise_floor: e.NoiseFloor = False,
    noise_run: e.NoiseRun = None,
    gate: e.Gate = None,
    eval_seed: e.EvalSeed = 0,
    prompt_column: o.PromptColumn = None,
    messages_column: o.MessagesColumn = None,
    id_column: o.IdColumn = None,
    system: o.System = None,
    limit: o.Limit = None,
    config: o.Config = None,
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
    output: e.OutputFolder = None,
    json: e.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> int:
    """Compare two runs: better or worse, at what, by how much, is it noise, and which rows show it.

    BEFORE and AFTER are files that run wrote, or any with a column of texts.

    With PROMPTS two models are run first; a run that lies in the output folder already is used again.
    With two files and two models nothing is run: the models only read the outputs (perplexity, drift).

    Exit code 4: no row of one file has a counterpart in the other; 5: a --gate failed.

    Examples:

        batchinfer eval before.parquet after.parquet --output report

        batchinfer eval prompts.parquet --before smollm2-135m --after mine --output report
    """
    settings = _settings(locals())
    with InterruptSignals() as signals:
        outcome = run_eval(settings, lambda: progress_for(sys.stderr, quiet=quiet), check_interrupt=signals.check)
    _print(outcome, as_json=json, quiet=quiet)
    return outcome.exit_code


def _settings(options: Mapping[str, Any]) -> EvalSettings:
    from batchinfer.evals.protocol import EvalOptions

    files, jobs = _sources(options)
    settings = EvalSettings(
        options=EvalOptions(
            match=options["match"],
            pattern=options["pattern"],
            function=options["score_function"],
            ks=tuple(options["k"] or ()),
            embedder=options["embedder"],
            texts=options["texts"],
            seed=options["eval_seed"],
        ),
        files=files,
        before=jobs[0] if jobs else None,
        after=jobs[1] if jobs else None,
        metrics=None if options["metrics"] is None else [name.strip() for name in options["metrics"].split(",")],
        reference_column=options["reference_column"],
        cluster_column=options["cluster_column"],
        id_column=options["id_column"],
        output_column=options["output_column"],
        slice_by=tuple(options["slice_by"] or ()),
        gates=tuple(options["gate"] or ()),
        noise_floor=options["noise_floor"],
        noise_run=options["noise_run"],
        output=options["output"],
    )
    check_eval(settings)
    return settings


def _sources(options: Mapping[str, Any]) -> tuple[tuple[str, str] | None, tuple[JobSettings, JobSettings] | None]:
    """Two files, two jobs, or both: files and the models that are to read them."""
    inputs, models = options["inputs"], (options["before"], options["after"])
    of_runs = given({name: options[name] for name in _RUN_OPTIONS})
    has_models = None not in models
    if len(inputs) == 2 and (has_models or models == (None, None)):
        _check_file_options(of_runs, options, has_models=has_models)
    elif len(inputs) != 1 or not has_models:
        raise InputError(
            "give two files of outputs, BEFORE and AFTER, with or without --before MODEL and --after MODEL, or one "
            f"file of PROMPTS with both of them; got {len(inputs)} files, --before {models[0]} and --after {models[1]}"
        )
    jobs = (_job(options, of_runs, models[0]), _job(options, of_runs, models[1])) if has_models else None
    return ((inputs[0], inputs[1]) if len(inputs) == 2 else None), jobs


def _check_file_options(of_runs: Mapping[str, Any], options: Mapping[str, Any], *, has_models: bool) -> None:
    """Files were generated already: only how models read them can still be chosen, if there are models."""
    names = [name for name in of_runs if not (has_models and SETTINGS[name].section == "engine")]
    if names or options["config"]:
        flag = SETTINGS[names[0]].flag if names else "--config"
        raise InputError(f"{flag} is about running models, and two files of outputs are compared: leave it out")


def _job(options: Mapping[str, Any], flags: Mapping[str, Any], model: str) -> JobSettings:
    """Logprobs of the sampled tokens are kept: they cost next to nothing, and drift is seen in them."""
    path = options["config"]
    config = load_config(path) if path else {}
    for name in ("model", "output", "output_prefix", "prompts"):
        if name in config:
            raise InputError(f"{path} {SETTINGS[name].config_name} has no place in an evaluation: leave it out")
    more = {"prompts": options["inputs"][0], "model": model, "id_column": options["id_column"]}
    flags = {"logprobs": 0, **flags, **given(more)}
    return job_settings(flags, config, path, needs_output=False)


#: Options of eval that are settings of its runs. The column of ids is also used on files.
_RUN_OPTIONS = (
    "prompt_column",
    "messages_column",
    "system",
    "limit",
    *(
        setting.name
        for setting in SETTINGS.values()
        if setting.section in ("sampling", "engine")
        and setting.name not in ("logprobs", "logprobs_mode", "prompt_logprobs")
    ),
)


def _print(outcome: EvalOutcome, *, as_json: bool, quiet: bool) -> None:
    from batchinfer.evals.terminal import render

    if as_json:
        if not quiet:
            print(render(outcome.result, is_terminal=False), file=sys.stderr)
        print_json(outcome.result.to_dict())
        return
    lines = [render(outcome.result, is_terminal=sys.stdout.isatty())]
    lines += [f"written   {path}" for path in outcome.written]
    print_data("\n".join(lines))
