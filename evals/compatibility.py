"""What must be said before two runs are compared: what differs between them beside the model.

A difference that changes what the numbers mean is a warning. Where a figure would mean nothing at
all, such as a count of tokens of two tokenizers, it is refused: left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from batchinfer.evals.result import Notice, RunIdentity
from batchinfer.evals.rows import PairedRows

#: Below it intervals are rough, whatever the method.
FEW_CLUSTERS = 30

#: Metrics and evaluators that compare single tokens, or counts of them.
TOKEN_METRICS = ("drift", "output_tokens")

# These choose what is written down, or which of the equally likely outputs is drawn; not what is likely.
_PARAMS_WITHOUT_EFFECT = ("seed", "logprobs", "logprobs_mode", "prompt_logprobs")


@dataclass(frozen=True, slots=True)
class Compatibility:
    """Attributes:
    pairs: as they may be compared: without logprobs where those of the two sides mean different things.
    """

    pairs: PairedRows
    refusals: tuple[Notice, ...]
    warnings: tuple[Notice, ...]

    def refused(self, name: str) -> str | None:
        """Why the evaluator or metric of this name is left out."""
        return next((notice.message for notice in self.refusals if name in notice.metrics), None)


def check_compatibility(pairs: PairedRows) -> Compatibility:
    """Compare what the two files say of their runs, and what the rows themselves show."""
    before, after = pairs.before.run, pairs.after.run
    refusals = [notice for check in _REFUSALS for notice in check(before, after)]
    if _logprobs_differ(before, after) and pairs.have_logprobs:
        refusals.append(_logprobs_refusal(before, after))
        pairs = replace(pairs, before=replace(pairs.before, logprobs=None), after=replace(pairs.after, logprobs=None))
    warnings = [notice for check in _RUN_WARNINGS for notice in check(before, after)]
    warnings += [notice for check_rows in _ROW_WARNINGS for notice in check_rows(pairs)]
    warnings += [Notice("pairing", note[:1].upper() + note[1:]) for note in pairs.notes]
    return Compatibility(pairs, tuple(refusals), tuple(warnings))


def _unknown_run(before: RunIdentity, after: RunIdentity) -> Iterator[Notice]:
    unknown = [run.path for run in (before, after) if not run.metadata]
    if unknown:
        yield Notice(
            "unknown_run",
            f"{' and '.join(unknown)} do not say which run made them: whether model inputs, sampling parameters and "
            "templates were the same is not known",
        )


def _params(before: RunIdentity, after: RunIdentity) -> Iterator[Notice]:
    if not before.params or not after.params:
        return
    names = [name for name in {**before.params, **after.params} if name not in _PARAMS_WITHOUT_EFFECT]
    found = [(name, _value(before.params.get(name)), _value(after.params.get(name))) for name in names]
    different = [f"{name} {mine} before, {theirs} after" for name, mine, theirs in found if mine != theirs]
    if different:
        yield Notice(
            "params_differ",
            f"Sampling parameters differ: {'; '.join(different)}. What differs in the outputs may come from them",
        )


def _value(param: Mapping[str, Any] | None) -> str:
    if param is None:
        return "not set"
    if param.get("origin") == "row":
        return f"by row, else {_value(param.get('if_null'))}"
    return repr(param.get("value"))


def _template(before: RunIdentity, after: RunIdentity) -> Iterator[Notice]:
    columns = [run.metadata.get("input", {}).get("columns", {}) for run in (before, after)]
    uses_template = any("messages" in names or "body" in names for names in columns)
    if uses_template and _digest(before, "chat_template") != _digest(after, "chat_template"):
        yield Notice(
            "template_differs",
            "The chat templates differ: the models were given different text for the same messages",
        )
    systems = [run.metadata.get("input", {}).get("system") for run in (before, after)]
    if before.metadata and after.metadata and systems[0] != systems[1]:
        yield Notice("system_differs", f"The system messages differ: {systems[0]!r} before, {systems[1]!r} after")


def _tokenizer(before: RunIdentity, after: RunIdentity) -> Iterator[Notice]:
    digests = _digest(before, "tokenizer"), _digest(after, "tokenizer")
    if None not in digests and digests[0] != digests[1]:
        yield Notice(
            "tokenizer_differs",
            "The tokenizers differ: token ids and counts of tokens of the two runs cannot be compared",
            TOKEN_METRICS,
        )


def _engine(before: RunIdentity, after: RunIdentity) -> Iterator[Notice]:
    engines = [run.metadata.get("engine", {}) for run in (before, after)]
    if not all(engines):
        return
    engines = [{"kv_dtype": engine.get("dtype"), **engine} for engine in engines]  # older runs had no other
    different = [
        f"{name} {engines[0].get(name)} before, {engines[1].get(name)} after"
        for name in ("dtype", "kv_dtype", "device", "kernels", "max_model_len")
        if engines[0].get(name) != engines[1].get(name)
    ]
    if different:
        yield Notice(
            "engine_differs",
            f"The engines ran differently: {'; '.join(different)}. This alone can change some tokens and logprobs",
        )


def _version(before: RunIdentity, after: RunIdentity) -> Iterator[Notice]:
    if before.version and after.version and before.version != after.version:
        yield Notice("version_differs", f"Written by batchinfer {before.version} before and {after.version} after")


def _same_model(before: RunIdentity, after: RunIdentity) -> Iterator[Notice]:
    if _digest(before, "model") is not None and dict(before.digests) == dict(after.digests):
        yield Notice("same_model", "Both runs used the same model: what differs comes from parameters or from chance")


def _logprobs_differ(before: RunIdentity, after: RunIdentity) -> bool:
    meanings = [_logprobs_meaning(run) for run in (before, after)]
    return None in meanings or meanings[0] != meanings[1]


def _logprobs_meaning(run: RunIdentity) -> tuple[str, ...] | None:
    """None where it is not known, or where rows of one file have different ones."""
    said = run.metadata.get("logprobs", {})
    mode = said.get("mode")
    if mode is None:
        return None
    if mode == "raw":
        return (mode, str(said.get("head_dtype")))
    drawn_from = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")
    return (mode, str(said.get("head_dtype")), *(_value(run.params.get(name)) for name in drawn_from))


def _logprobs_refusal(before: RunIdentity, after: RunIdentity) -> Notice:
    meanings = [_logprobs_meaning(run) for run in (before, after)]
    said = ["unknown" if meaning is None else " ".join(meaning[:2]) for meaning in meanings]
    return Notice(
        "logprobs_differ",
        f"The stored logprobs do not mean the same ({said[0]} before, {said[1]} after"
        f"{', of different sampling parameters' if said[0] == said[1] != 'unknown' else ''}): they are not compared",
    )


def _digest(run: RunIdentity, name: str) -> str | None:
    return run.digests.get(name)


def _no_token_ids(pairs: PairedRows) -> Iterator[Notice]:
    without = [side.run.path for side in (pairs.before, pairs.after) if side.token_ids is None]
    if without:
        yield Notice(
            "retokenized",
            f"{' and '.join(without)} hold texts without token ids: what looks at tokens has to tokenize the text "
            "again, which need not give the tokens that were sampled",
            ("drift", "perplexity"),
        )


def _unpaired(pairs: PairedRows) -> Iterator[Notice]:
    if pairs.num_unpaired_before or pairs.num_unpaired_after:
        yield Notice(
            "unpaired",
            f"{pairs.num_unpaired_before} rows of {pairs.before.run.path} and {pairs.num_unpaired_after} of "
            f"{pairs.after.run.path} have no pair and are left out",
        )


def _inputs(pairs: PairedRows) -> Iterator[Notice]:
    if pairs.num_prompts_differ:
        yield Notice(
            "input_differs",
            f"{pairs.num_prompts_differ} of {len(pairs)} pairs have different prompts under the same id",
        )
    if pairs.num_row_params_differ:
        yield Notice(
            "row_params_differ",
            f"{pairs.num_row_params_differ} of {len(pairs)} pairs have different sampling parameters of their own",
        )


def _failed(pairs: PairedRows) -> Iterator[Notice]:
    counts = [sum(text is None for text in side.texts) for side in (pairs.before, pairs.after)]
    if any(counts):
        yield Notice("no_output", f"{counts[0]} rows before and {counts[1]} after have no output")


def _few_rows(pairs: PairedRows) -> Iterator[Notice]:
    if 0 < pairs.num_clusters < FEW_CLUSTERS:
        kind = f"values of {pairs.cluster_column!r}" if pairs.cluster_column else "prompts"
        yield Notice("few_rows", f"Only {pairs.num_clusters} {kind} are compared: intervals are rough")


_REFUSALS: tuple[Callable[[RunIdentity, RunIdentity], Iterator[Notice]], ...] = (_tokenizer,)
_RUN_WARNINGS: tuple[Callable[[RunIdentity, RunIdentity], Iterator[Notice]], ...] = (
    _unknown_run,
    _params,
    _template,
    _engine,
    _version,
    _same_model,
)
_ROW_WARNINGS: tuple[Callable[[PairedRows], Iterator[Notice]], ...] = (
    _unpaired,
    _inputs,
    _no_token_ids,
    _failed,
    _few_rows,
)
