"""What differs between two runs beside the model is said first; what cannot be compared is refused."""

from __future__ import annotations

import pyarrow as pa
import pytest

from batchinfer.evals import compare
from batchinfer.evals.compatibility import Compatibility, check_compatibility
from batchinfer.evals.pairing import pair_rows
from batchinfer.evals.run_output import load_run_output


def check(before: pa.Table, after: pa.Table) -> Compatibility:
    return check_compatibility(pair_rows(load_run_output(before), load_run_output(after)))


def codes(notices) -> list[str]:
    return [notice.code for notice in notices]


TEXTS = [f"text {i}" for i in range(40)]


def test_runs_that_differ_in_the_model_alone_raise_no_notice(make_run) -> None:
    found = check(make_run(TEXTS, logprobs=True), make_run(TEXTS, logprobs=True, digests={"model": "other"}))
    assert found.refusals == ()
    assert found.warnings == ()
    assert found.pairs.have_logprobs


def test_unequal_sampling_parameters_are_named_with_their_values(make_run) -> None:
    after = make_run(TEXTS, digests={"model": "other"}, params={"temperature": 0.6, "top_p": 0.9, "seed": 5})
    (notice,) = check(make_run(TEXTS), after).warnings
    assert notice.code == "params_differ"
    assert "temperature 0.0 before, 0.6 after; top_p 1.0 before, 0.9 after" in notice.message
    assert "seed" not in notice.message


def test_parameters_of_rows_count_too(make_run) -> None:
    by_row = {"value": None, "origin": "row", "if_null": {"value": 0.0, "origin": "default"}}
    before = make_run(TEXTS, digests={"model": "other"})
    metadata = {"params": {}}
    after = make_run(TEXTS, **metadata)
    said = load_run_output(after).identity.metadata | {"params": {"temperature": by_row}}
    import json

    after = after.replace_schema_metadata({b"batchinfer": json.dumps(said).encode()})
    (notice,) = check(before, after).warnings
    assert "temperature 0.0 before, by row, else 0.0 after" in notice.message


def test_rows_own_parameters_are_compared(make_run) -> None:
    inputs = {"id": list(range(40)), "prompt": TEXTS, "sampling_params": [{"temperature": 0.5}] * 40}
    others = inputs | {"sampling_params": [{"temperature": 0.5}] * 39 + [{"temperature": 0.9}]}
    found = check(make_run(TEXTS, inputs), make_run(TEXTS, others, digests={"model": "other"}))
    assert codes(found.warnings) == ["row_params_differ"]


def test_templates_matter_only_where_they_are_used(make_run) -> None:
    other = {"digests": {"chat_template": "x", "model": "other"}}
    assert check(make_run(TEXTS), make_run(TEXTS, **other)).warnings == ()
    columns = {"input": {"columns": {"messages": "messages"}, "system": None}}
    found = check(make_run(TEXTS, **columns), make_run(TEXTS, **columns, **other))
    assert codes(found.warnings) == ["template_differs"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"engine": {"dtype": "bfloat16", "device": "cpu", "kernels": "torch"}}, "engine_differs"),
        ({"version": "0.2.0"}, "version_differs"),
        ({"input": {"columns": {"prompt": "prompt", "id": "id"}, "system": "Be brief."}}, "system_differs"),
        ({"digests": {}}, "same_model"),
    ],
)
def test_other_differences_between_runs(make_run, change: dict, code: str) -> None:
    after = make_run(TEXTS, **({"digests": {"model": "other"}} | change))
    assert codes(check(make_run(TEXTS), after).warnings) == [code]


def test_rows_that_cannot_be_paired_or_have_no_output_are_counted(make_run) -> None:
    before = make_run([*TEXTS[:-1], None])
    after = make_run([*TEXTS[:-2], None, None], digests={"model": "other"}).slice(3)
    found = {notice.code: notice.message for notice in check(before, after).warnings}
    assert found["unpaired"] == "3 rows of table and 0 of table have no pair and are left out"
    assert found["no_output"] == "1 rows before and 2 after have no output"


def test_few_clusters_are_warned_about(make_run) -> None:
    found = check(make_run(TEXTS[:5]), make_run(TEXTS[:5], digests={"model": "other"}))
    assert codes(found.warnings) == ["few_rows"]


def test_texts_without_ids_are_labelled_retokenized(make_run) -> None:
    """Text that is tokenized again need not be what was sampled."""
    plain = pa.table({"id": [f"row-{i}" for i in range(40)], "output": TEXTS})
    found = check(make_run(TEXTS), plain)
    assert codes(found.warnings) == ["unknown_run", "retokenized"]
    assert found.warnings[1].metrics == ("drift", "perplexity")


def test_counts_of_two_tokenizers_are_refused(make_run) -> None:
    after = make_run(TEXTS, digests={"tokenizer": "other", "model": "other"})
    result = compare(make_run(TEXTS), after, metrics=["length"])
    assert codes(result.refusals) == ["tokenizer_differs"]
    assert "output_tokens" not in [metric.name for metric in result.metrics]
    assert [skipped.name for skipped in result.skipped] == ["output_tokens"]
    assert {"truncated", "empty"} <= {metric.name for metric in result.metrics}


@pytest.mark.parametrize(
    "after",
    [
        {"logprobs": {"mode": "processed", "head_dtype": "float32"}},
        {"logprobs": {"mode": None, "head_dtype": "float32"}},
        {"logprobs": {"mode": "raw", "head_dtype": "bfloat16"}},
    ],
)
def test_logprobs_of_another_meaning_are_refused(make_run, after: dict) -> None:
    # The fixture's own keyword for the column takes the name of the metadata entry.
    table = make_run(TEXTS, logprobs=True, digests={"model": "other"})
    run = load_run_output(table)
    import json

    table = table.replace_schema_metadata({b"batchinfer": json.dumps({**run.identity.metadata, **after}).encode()})
    found = check(make_run(TEXTS, logprobs=True), table)
    assert codes(found.refusals) == ["logprobs_differ"]
    assert not found.pairs.have_logprobs
    assert found.pairs.have_token_ids


def test_processed_logprobs_of_other_parameters_are_refused(make_run) -> None:
    import json

    tables = []
    for temperature in (0.5, 0.9):
        table = make_run(TEXTS, logprobs=True, params={"temperature": temperature})
        said = load_run_output(table).identity.metadata | {"logprobs": {"mode": "processed", "head_dtype": "float32"}}
        tables.append(table.replace_schema_metadata({b"batchinfer": json.dumps(said).encode()}))
    assert codes(check(*tables).refusals) == ["logprobs_differ"]
    assert check(tables[0], tables[0]).refusals == ()
