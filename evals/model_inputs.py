"""What a model is to read: the prompts of a run as the run had them, and the outputs behind them, as token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from batchinfer.evals.models import EnginePair
from batchinfer.evals.protocol import EvalContext
from batchinfer.evals.rows import PairedRows, Side
from batchinfer.scoring.divergence import TokenDivergence, compare_tokens
from batchinfer.scoring.item import ScoreItem
from batchinfer.types import ErrorCode, Prompt, RowError, SamplingParams, TokenIds

if TYPE_CHECKING:
    from batchinfer.dataset.columns import InputColumns
    from batchinfer.engine.engine import Engine

_NO_IDS: TokenIds = np.empty(0, dtype=np.int32)


class Forced(NamedTuple):
    """Both models on the same outputs, teacher-forced; one entry for each pair of rows."""

    on_before: list[TokenDivergence]  # on the outputs before
    on_after: list[TokenDivergence]


def forced_outputs(pairs: PairedRows, context: EvalContext) -> Forced:
    """Both models on the outputs of both sides. Made once for all evaluators of a comparison."""
    engines = context.models.engines(context)

    def make() -> Forced:
        context.progress("reading the outputs with both models")
        return Forced(*(_compare(pairs, side, engines, context) for side in (pairs.before, pairs.after)))

    return context.models.once(("forced", id(pairs), *map(id, engines)), make)


def _compare(pairs: PairedRows, side: Side, engines: EnginePair, context: EvalContext) -> list[TokenDivergence]:
    # The prompt is that of the run: each side's outputs follow the text that its own model was given.
    own = engines.before if side is pairs.before else engines.after
    items = output_items(pairs, side, own)
    return compare_tokens(*engines, items, on_step=lambda stats: context.check_interrupt())


def output_items(pairs: PairedRows, side: Side, engine: Engine) -> list[ScoreItem]:
    """The side's outputs after their prompts. Ids as they were sampled, up to the first end of sequence.

    Texts without ids are tokenized by the engine's tokenizer.
    """
    prompts = _prompts(pairs, side, engine)
    outputs = _output_ids(side, engine)
    items = []
    for row, (prompt, ids) in enumerate(zip(prompts, outputs, strict=True)):
        if ids is None:
            reason = side.errors[row]
            message = f"no output: {reason}" if reason else "no output"
            items.append(ScoreItem.failed(ErrorCode.NO_OUTPUT, message))
        elif isinstance(prompt, RowError):
            items.append(ScoreItem(error=prompt))
        else:
            items.append(continued(engine, prompt, ids))
    return items


def continued(engine: Engine, prompt: TokenIds, ids: TokenIds) -> ScoreItem:
    """`ids` behind `prompt`, of which `ids` are scored."""
    from batchinfer.scoring.encode import TextEncoder

    return TextEncoder(engine.tokenizer, engine.model.spec.vocab_size).continued(prompt, ids)


def _output_ids(side: Side, engine: Engine) -> list[TokenIds | None]:
    if side.token_ids is not None:
        ends = np.array(sorted(engine.eos_token_ids), dtype=np.int32)
        return [None if ids is None else upto_end(ids, ends) for ids in side.token_ids]
    places = [row for row, text in enumerate(side.texts) if text is not None]
    encoded = engine.tokenizer.encode_batch([str(side.texts[row]) for row in places], add_special_tokens=False)
    found: list[TokenIds | None] = [None] * len(side.texts)
    for row, ids in zip(places, encoded, strict=True):
        found[row] = ids
    return found


def upto_end(ids: TokenIds, ends: TokenIds) -> TokenIds:
    """Up to the first end-of-sequence id, itself included: what --ignore-eos wrote behind it is no answer."""
    ended = np.flatnonzero(np.isin(ids, ends))
    return ids[: ended[0] + 1] if len(ended) else ids


def _prompts(pairs: PairedRows, side: Side, engine: Engine) -> list[TokenIds | RowError]:
    """Ids of each row's prompt under the engine's tokenizer and chat template; none where prompts are not known."""
    columns = prompt_columns(pairs, side)
    if columns is None:
        return [_NO_IDS] * len(pairs)
    prompts = build(pairs, side, engine, columns)
    return [prompt.token_ids if prompt.error is None else prompt.error for prompt in prompts]


def build(pairs: PairedRows, side: Side, engine: Engine, columns: InputColumns) -> list[Prompt]:
    from batchinfer.dataset.prompts import build_prompts

    return build_prompts(
        pairs.inputs,
        0,
        columns,
        engine.tokenizer,
        SamplingParams(),
        system=side.run.metadata.get("input", {}).get("system"),
        vocab_size=engine.model.spec.vocab_size,
    )


def prompt_columns(pairs: PairedRows, side: Side) -> InputColumns | None:
    """What the run read its prompts from, else the column that the prompts are known by; None: neither is there."""
    from batchinfer.dataset.columns import InputColumns, is_messages, is_token_ids
    from batchinfer.dataset.row_params import is_text

    said = side.run.metadata.get("input", {}).get("columns", {})
    names = {kind: said[kind] for kind in ("prompt", "messages", "token_ids", "body") if kind in said}
    if names and all(name in pairs.inputs.column_names for name in names.values()):
        return InputColumns(**names)
    if pairs.prompt_column is None or pairs.prompt_column not in pairs.inputs.column_names:
        return None
    type_ = pairs.inputs.schema.field(pairs.prompt_column).type
    for kind, fits in (("prompt", is_text), ("messages", is_messages), ("token_ids", is_token_ids)):
        if fits(type_):
            return InputColumns(**{kind: pairs.prompt_column})
    return None


def identity_warnings(pairs: PairedRows, context: EvalContext) -> tuple[str, ...]:
    """Where the outputs were not made by the models that are to read them."""

    def make() -> tuple[str, ...]:
        found = []
        for name, side, source in zip(
            ("before", "after"), (pairs.before, pairs.after), context.models.sources(context), strict=True
        ):
            made_by = side.run.digests.get("model")
            if made_by is not None and made_by != source.digest():
                found.append(f"the outputs {name} were made by another model ({side.run.model}) than {source.name}")
        return tuple(found)

    return context.models.once(("identity", id(pairs)), make)
