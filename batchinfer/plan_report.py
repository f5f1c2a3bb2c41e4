"""What a job would have to do, without the model's weights: `batchinfer plan`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from batchinfer.config import EngineConfig
from batchinfer.job_input import ModelResolver, open_input, prompts_of, resolve_job
from batchinfer.models.spec import KV_SCALE_BYTES, DecoderSpec, kv_bytes_per_token
from batchinfer.params import ResolvedParams
from batchinfer.settings import JobSettings
from batchinfer.types import ErrorCode, Prompt

if TYPE_CHECKING:
    from batchinfer.models.source import ModelSource
    from batchinfer.planner.cost import JobPlan, SharedPrefix

NUM_SHARED_PREFIXES = 10
_SHOWN_CHARS = 40
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class PrefixText:
    """A shared prefix with enough of its text to know it again."""

    prefix: SharedPrefix  # example_row is the row's place in the input
    begin: str  # the first 40 characters; the whole text if it is short
    end: str  # the last 40; empty if `begin` is the whole text


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Plans of all windows together. Rows that cannot run are counted by code and are no part of `plan`."""

    prompts: str
    model: str
    dtype: str
    max_num_seqs: int
    num_rows: int
    num_windows: int
    refused_by_code: dict[str, int]
    plan: JobPlan
    shared_prefixes: tuple[PrefixText, ...]  # those that save most
    params: ResolvedParams

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON values."""
        plan = self.plan.to_dict()
        plan["shared_prefixes"] = [
            {**asdict(shown.prefix), "begin": shown.begin, "end": shown.end} for shown in self.shared_prefixes
        ]
        return {
            "prompts": self.prompts,
            "model": self.model,
            "dtype": self.dtype,
            "max_num_seqs": self.max_num_seqs,
            "num_windows": self.num_windows,
            "num_rows_refused": sum(self.refused_by_code.values()),
            "refused_by_code": self.refused_by_code,
            **plan,
            "num_rows": self.num_rows,
            "params": self.params.to_dict(),
        }

    def to_text(self) -> str:
        plan, kv, work, alone = self.plan, self.plan.kv, self.plan.with_sharing, self.plan.without_sharing
        refused = f"{sum(self.refused_by_code.values()):,}"
        if self.refused_by_code:
            refused += " (" + ", ".join(f"{code}: {count:,}" for code, count in self.refused_by_code.items()) + ")"
        num_runnable = self.num_rows - sum(self.refused_by_code.values())
        each_row = ", once for each row" if plan.num_samples > num_runnable else ""
        lines = [
            ("rows", f"{self.num_rows:,} · duplicates: {plan.num_duplicate_rows:,} · cannot run: {refused}"),
            (
                "prompt tokens",
                f"total: {plan.num_prompt_tokens:,}{each_row} · unique: {plan.num_unique_prompt_tokens:,}"
                f" · possible saving: {plan.num_shareable_prompt_tokens:,} ({100 * plan.shareable_share:.1f} %)",
            ),
            ("prefix tree", f"{plan.num_tree_nodes:,} nodes · depth: {plan.tree_depth:,}"),
            ("output tokens", f"at most {plan.max_output_tokens:,} in {plan.num_samples:,} samples"),
            (
                "model",
                f"{_si(plan.num_parameters, ' parameters')} · {_bytes(plan.weight_bytes)} of weights in {self.dtype}",
            ),
            (
                "KV memory",
                f"at peak: {_bytes(kv.peak_bytes)} for {min(self.max_num_seqs, plan.num_samples):,} sequences"
                f" · without sharing: {_bytes(kv.peak_without_sharing_bytes)} · everything: {_bytes(kv.all_bytes)}",
            ),
            ("arithmetic", f"{_si(work.flops, 'FLOP')} · without sharing: {_si(alone.flops, 'FLOP')}"),
            ("bytes moved", f"{_bytes(work.bytes)} · without sharing: {_bytes(alone.bytes)}"),
        ]
        text = "\n".join(f"{name:<14} {value}" for name, value in lines)
        return "\n".join([text, *self._prefix_lines()])

    def _prefix_lines(self) -> list[str]:
        if not self.shared_prefixes:
            return ["shared prefixes none"]
        lines = ["shared prefixes, those that save most", f"{'saved':>12} {'rows':>9} {'tokens':>8}  text"]
        for shown in self.shared_prefixes:
            prefix = shown.prefix
            text = _quoted(shown.begin) + (f" … {_quoted(shown.end)}" if shown.end else "")
            lines.append(f"{prefix.num_tokens_saved:>12,} {prefix.num_rows:>9,} {prefix.num_tokens:>8,}  {text}")
        return lines


def plan_run(
    settings: JobSettings, *, resolve: ModelResolver | None = None, window_rows: int | None = None
) -> PlanReport:
    """Read and tokenize all rows and plan each window as a run would. Raises InputError as a run does."""
    from batchinfer.planner.cost import plan_job
    from batchinfer.planner.prefix_tree import build_prefix_tree

    rows = open_input(settings, window_rows)
    model, params = resolve_job(settings, rows, resolve)
    dtype = dtype_of(settings.engine, model)
    max_model_len = settings.engine.max_model_len or model.spec.max_position
    plans: list[JobPlan] = []
    shown: list[PrefixText] = []
    refused: Counter[str] = Counter()
    num_rows = 0
    windows = prompts_of(rows, model.tokenizer, params.params, settings.system, model.spec.vocab_size)
    for _, table, prompts in windows:
        num_rows += table.num_rows
        runnable = _runnable(prompts, max_model_len, refused)
        plan = plan_job(
            build_prefix_tree([prompt.token_ids for prompt in runnable]),
            model.spec,
            dtype_bytes=DTYPE_BYTES[dtype],
            kv_bytes=kv_bytes_of(settings.engine, model.spec, DTYPE_BYTES[dtype]),
            max_tokens=[min(p.params.max_tokens, max_model_len - len(p.token_ids)) for p in runnable],
            n=[prompt.params.n for prompt in runnable],
            max_num_seqs=settings.engine.max_num_seqs,
            max_batch_tokens=settings.engine.max_batch_tokens,
            num_shared_prefixes=NUM_SHARED_PREFIXES,
        )
        plans.append(plan)
        shown += [_with_text(prefix, runnable, model) for prefix in plan.shared_prefixes]
    return PlanReport(
        prompts=settings.prompts,
        model=settings.model,
        dtype=dtype,
        max_num_seqs=settings.engine.max_num_seqs,
        num_rows=num_rows,
        num_windows=len(plans),
        refused_by_code=dict(sorted(refused.items())),
        plan=combine(plans),
        shared_prefixes=tuple(sorted(shown, key=lambda s: -s.prefix.num_tokens_saved)[:NUM_SHARED_PREFIXES]),
        params=params,
    )


# Fields of a JobPlan that do not add up over windows, which run one after the other.
_GREATEST = {
    "tree_depth",
    "peak_tokens",
    "peak_bytes",
    "peak_without_sharing_tokens",
    "peak_without_sharing_bytes",
    "all_tokens",
    "all_bytes",
}
_OF_THE_MODEL = {"num_parameters", "weight_bytes", "bytes_per_token"}


def combine(plans: Sequence[JobPlan]) -> JobPlan:
    """One plan for windows that run one after the other; its `shared_prefixes` are left empty."""
    total = _combine([replace(plan, shared_prefixes=()) for plan in plans])
    share = total.num_shareable_prompt_tokens / total.num_prompt_tokens if total.num_prompt_tokens else 0.0
    return replace(total, shareable_share=share)


def _combine(parts: Sequence[Any]) -> Any:
    values: dict[str, Any] = {}
    for field in fields(parts[0]):
        each = [getattr(part, field.name) for part in parts]
        if is_dataclass(each[0]):
            values[field.name] = _combine(each)
        elif field.name in _OF_THE_MODEL or isinstance(each[0], tuple):
            values[field.name] = each[0]
        else:
            values[field.name] = max(each) if field.name in _GREATEST else sum(each)
    return replace(parts[0], **values)


def _runnable(prompts: list[Prompt], max_model_len: int, refused: Counter[str]) -> list[Prompt]:
    """Counts the others in `refused`, as the engine would refuse them."""
    runnable = []
    for prompt in prompts:
        if prompt.error is not None:
            refused[prompt.error.code.value] += 1
        elif len(prompt.token_ids) >= max_model_len:
            refused[ErrorCode.PROMPT_TOO_LONG.value] += 1
        else:
            runnable.append(prompt)
    return runnable


def _with_text(prefix: SharedPrefix, prompts: list[Prompt], model: ModelSource) -> PrefixText:
    prompt = prompts[prefix.example_row]
    # A token is a byte at least, so that twice as many tokens as characters hold them (but for exotic scripts).
    num_tokens = 2 * _SHOWN_CHARS
    ids = prompt.token_ids[: prefix.num_tokens].tolist()
    decode = model.tokenizer.decode
    begin, end = decode(ids[:num_tokens], False), decode(ids[-num_tokens:], False)
    if len(ids) <= num_tokens and len(begin) <= 2 * _SHOWN_CHARS:
        end = ""
    else:
        begin, end = begin[:_SHOWN_CHARS], end[-_SHOWN_CHARS:]
    return PrefixText(replace(prefix, example_row=prompt.row_index), begin, end)


def dtype_of(config: EngineConfig, model: ModelSource) -> str:
    """What --dtype comes to for the model on its device."""
    if config.dtype != "auto":
        return config.dtype
    from batchinfer.engine.machine import choose_device, choose_dtype

    return str(choose_dtype("auto", model.spec.dtype, choose_device(config.device))).removeprefix("torch.")


def kv_bytes_of(config: EngineConfig, spec: DecoderSpec, dtype_bytes: int) -> int:
    """KV of a token in all layers, where numbers of --dtype take `dtype_bytes`."""
    is_fp8 = config.kv_dtype == "fp8"
    return kv_bytes_per_token(spec, 1 if is_fp8 else dtype_bytes, KV_SCALE_BYTES if is_fp8 else 0)


def _quoted(text: str) -> str:
    """On one line."""
    return '"' + text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"'


def _si(number: float, unit: str) -> str:
    """Three digits, a prefix and the unit: "5.49 TFLOP"."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 999.5:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number:.3g} E{unit}"


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} PiB"
