"""Rows find their pair by id and sample, whatever their order; what has none is counted, not shifted."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from batchinfer.errors import InputError
from batchinfer.evals import compare
from batchinfer.evals.pairing import pair_rows
from batchinfer.evals.run_output import load_run_output


def paired(before: pa.Table, after: pa.Table, **options):
    names = {name: options.pop(name) for name in ("output_column", "id_column") if name in options}
    return pair_rows(load_run_output(before, **names), load_run_output(after, **names), **options)


def test_a_shuffled_side_with_missing_rows_pairs_by_id(make_run) -> None:
    before = make_run([f"before {i}" for i in range(60)])
    order = list(range(60))
    random.Random(0).shuffle(order)
    order.remove(7)
    after = make_run([f"after {i}" for i in range(60)]).take(order)
    pairs = paired(before, after)
    assert len(pairs) == 59
    assert (pairs.num_unpaired_before, pairs.num_unpaired_after) == (1, 0)
    assert list(pairs.ids) == [f"row-{i}" for i in range(60) if i != 7]  # in the order of before: 10 comes after 9
    assert [t.split()[1] for t in pairs.before.texts] == [t.split()[1] for t in pairs.after.texts]
    assert pairs.before.texts[8] == "before 9"
    assert pairs.inputs.column("prompt").to_pylist()[8] == "prompt 9"
    assert pairs.before.token_ids[8].tolist() == [ord(c) for c in "before 9"]
    assert pairs.after.token_ids[8].tolist() == [ord(c) for c in "after 9"]
    assert pairs.num_prompts_differ == 0


def test_samples_pair_by_their_index_and_share_prompt_and_cluster(make_run) -> None:
    before = make_run([["a0", "a1", "a2"], ["b0", "b1", "b2"]])
    after = make_run([["A0", "A1"], ["B0", "B1"]]).take([3, 0, 2, 1])
    pairs = paired(before, after)
    assert list(zip(pairs.before.texts, pairs.after.texts, strict=True)) == [
        ("a0", "A0"),
        ("a1", "A1"),
        ("b0", "B0"),
        ("b1", "B1"),
    ]
    assert pairs.sample_index.tolist() == [0, 1, 0, 1]
    assert pairs.prompt_index.tolist() == [0, 0, 1, 1]
    assert pairs.cluster_index.tolist() == [0, 0, 1, 1]
    assert (pairs.num_unpaired_before, pairs.num_unpaired_after) == (2, 0)
    assert [list(prompt) for prompt in pairs.prompt_ranges] == [[0, 1], [2, 3]]


def test_ids_that_occur_twice_are_told_apart_by_their_prompt(make_run) -> None:
    """[7, 7, 8] against [7, 8], the first 7 missing: pairing in order would shift."""
    before = make_run(["x", "y", "z"], {"id": [7, 7, 8], "prompt": ["first", "second", "third"]})
    after = make_run(["Y", "Z"], {"id": [7, 8], "prompt": ["second", "third"]})
    pairs = paired(before, after)
    assert list(zip(pairs.before.texts, pairs.after.texts, strict=True)) == [("y", "Y"), ("z", "Z")]
    assert pairs.num_unpaired_before == 1
    assert pairs.notes == (
        "1 ids occur more than once, such as 7: their rows were paired by id and prompt, equal ones in order",
    )


def test_rows_with_equal_id_and_prompt_pair_in_order(make_run) -> None:
    inputs = {"id": ["a", "a", "b"], "prompt": ["p", "p", "q"]}
    pairs = paired(make_run(["1", "2", "3"], inputs), make_run(["4", "5", "6"], inputs))
    assert list(zip(pairs.before.texts, pairs.after.texts, strict=True)) == [("1", "4"), ("2", "5"), ("3", "6")]
    assert pairs.num_prompts == 3
    assert pairs.num_clusters == 2  # equal prompts are one cluster


def test_rows_without_ids_pair_by_their_prompt(make_run) -> None:
    columns = {"input": {"columns": {"prompt": "question"}, "system": None}}
    before = make_run(["1", "2", "3"], {"question": ["a", "b", "c"]}, **columns)
    after = make_run(["30", "10"], {"question": ["c", "a"]}, **columns)
    pairs = paired(before, after)
    assert list(zip(pairs.before.texts, pairs.after.texts, strict=True)) == [("1", "10"), ("3", "30")]
    assert list(pairs.ids) == [0, 2]  # the row's number
    assert pairs.paired_by == "prompt"


def test_messages_are_prompts_too(make_run) -> None:
    columns = {"input": {"columns": {"messages": "messages"}, "system": None}}
    chats = [[{"role": "user", "content": text}] for text in "abc"]
    before = make_run(["1", "2", "3"], {"messages": chats}, **columns)
    after = make_run(["30", "10"], {"messages": [chats[2], chats[0]]}, **columns)
    assert list(paired(before, after).after.texts) == ["10", "30"]


def test_rows_with_a_null_id_pair_by_their_prompt(make_run) -> None:
    before = make_run(["1", "2"], {"id": ["a", None], "prompt": ["p", "q"]})
    after = make_run(["20", "10"], {"id": [None, "a"], "prompt": ["q", "p"]})
    pairs = paired(before, after)
    assert list(pairs.after.texts) == ["10", "20"]
    assert pairs.notes == ("1 rows before and 1 after have no id: paired by prompt",)


def test_nan_is_a_missing_id_and_equals_itself_elsewhere(make_run) -> None:
    nan = float("nan")
    inputs = {"id": [1.0, nan, nan], "prompt": ["a", "b", "c"], "x": [nan, nan, 2.0]}
    run = make_run(["x", "y", "z"], inputs)
    shuffled = run.take([2, 0, 1])
    pairs = paired(run, shuffled)
    assert pairs.before.texts == pairs.after.texts == ["x", "y", "z"]
    assert paired(run.drop_columns(["id", "prompt"]), run.drop_columns(["id", "prompt"])).num_unpaired_after == 0
    result = compare(run, shuffled, metrics=["length"], slice_by=["x"])
    assert {(one.value, one.n) for one in result.slices} == {("nan", 2), ("2.0", 1)}


def test_different_prompts_under_one_id_are_counted(make_run) -> None:
    before = make_run(["1", "2"], {"id": ["a", "b"], "prompt": ["p", "q"]})
    after = make_run(["1", "2"], {"id": ["a", "b"], "prompt": ["p", "other"]})
    assert paired(before, after).num_prompts_differ == 1


def test_string_views_are_read_like_strings(tmp_path, make_run) -> None:
    """Arrow cannot take rows of views, at any depth."""
    table = make_run(["a", "b", "c"])
    views = pa.schema([f.with_type(pa.string_view()) if f.type == pa.string() else f for f in table.schema])
    chats = pa.list_(pa.struct([("role", pa.string_view()), ("content", pa.string_view())]))
    table = table.cast(views).append_column("chat", pa.array([[{"role": "user", "content": "x"}]] * 3, chats))
    pairs = paired(table, table.slice(1))
    assert list(pairs.after.texts) == ["b", "c"]
    assert pairs.inputs.column("chat").to_pylist() == [[{"role": "user", "content": "x"}]] * 2


def test_no_pair_is_no_error(make_run) -> None:
    pairs = paired(make_run(["1"], {"id": ["a"], "prompt": ["p"]}), make_run(["1"], {"id": ["b"], "prompt": ["p"]}))
    assert len(pairs) == 0
    assert (pairs.num_prompts, pairs.num_clusters, pairs.max_samples) == (0, 0, 0)


def test_ids_of_different_types_are_refused(make_run) -> None:
    before = make_run(["1"], {"id": [7], "prompt": ["p"]})
    after = make_run(["1"], {"id": ["7"], "prompt": ["p"]})
    with pytest.raises(InputError, match=r"int64 in before.*string in after|int64 in table and string in table"):
        paired(before, after)


def test_plain_texts_pair_by_number_only_if_there_are_as_many(make_run) -> None:
    texts = pa.table({"output": ["a", "b"]})
    pairs = paired(texts, texts)
    assert pairs.notes == ("rows have no id and no input: paired by their number",)
    assert pairs.before.token_ids is None
    assert pairs.before.num_output_tokens.tolist() == [-1, -1]
    with pytest.raises(InputError, match="--id-column"):
        paired(texts, texts.slice(1))


def test_a_file_without_outputs_is_refused_naming_its_columns(make_run) -> None:
    with pytest.raises(InputError, match=r"--output-column\. Columns: text \(string\)"):
        load_run_output(pa.table({"text": ["a"]}))
    with pytest.raises(InputError, match=r"'output' must hold text, not int64"):
        load_run_output(pa.table({"output": [1]}))
    run = load_run_output(pa.table({"text": ["a"], "output": ["b"]}), output_column="text")
    assert run.results == {"output": "text"}


def test_columns_of_other_files_are_results_if_they_can_be() -> None:
    """Whatever else goes by the name of a result is an input column like any other."""
    odd = {
        "output": ["a", "b"],
        "sample_index": ["first", "second"],
        "output_token_ids": ["1 2", "3"],
        "finish_reason": [1, 2],
        "num_output_tokens": [float("nan"), -5.0],
        "logprobs": [1.5, 2.5],
    }
    run = load_run_output(pa.table(odd))
    assert run.results == {"output": "output"}
    assert run.input_columns == [name for name in odd if name != "output"]
    assert len(paired(pa.table(odd), pa.table(odd))) == 2
    fine = {"output": ["a"], "sample_index": [0], "output_token_ids": [[1]], "logprobs": [[-0.5]]}
    assert set(load_run_output(pa.table(fine)).results) == set(fine)


def test_results_that_no_run_writes_are_refused() -> None:
    samples = pa.table({"output": ["a", "b"], "sample_index": [0, None]})
    with pytest.raises(InputError, match="'sample_index' must tell the sample of every row"):
        load_run_output(samples, name="x.parquet")
    ids = pa.table({"id": [1], "output": ["a"], "output_token_ids": [[1, None]]})
    with pytest.raises(InputError, match="a null in a list"):
        paired(ids, ids)


def test_prefixed_results_are_found_by_their_fields(make_run) -> None:
    table = make_run(["x", "y"])
    fields = [
        field.with_name("new_" + field.name) if field.metadata and b"batchinfer" in field.metadata else field
        for field in table.schema
    ]
    table = pa.table(table.columns, schema=pa.schema(fields, metadata=table.schema.metadata))
    run = load_run_output(table)
    assert run.results["output"] == "new_output"
    assert run.input_columns == ["id", "prompt"]


def test_another_column_as_output_has_no_ids_of_its_own(make_run) -> None:
    table = make_run(["x", "y"]).append_column("edited", [["a", "b"]])
    assert load_run_output(table, output_column="edited").results == {"output": "edited"}


@pytest.mark.parametrize(("values", "texts"), [([1, None], ["1", None]), ([0.5, 2.0], ["0.5", "2.0"])])
def test_references_may_be_numbers(make_run, values: list, texts: list) -> None:
    run = make_run(["x", "y"], {"id": [1, 2], "answer": values})
    assert paired(run, run, reference_column="answer").references == texts


def test_a_row_with_two_references_has_none(make_run) -> None:
    before = make_run(["x", "y"], {"id": [1, 2], "reference": ["a", "b"]})
    after = make_run(["x", "y"], {"id": [1, 2], "reference": ["a", "c"]})
    pairs = paired(before, after)
    assert pairs.references == ["a", None]
    assert pairs.notes == ("1 rows have another reference before than after: they are left out of what needs one",)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"reference_column": "nope"}, "--reference-column nope: table has no such column. Columns: id, prompt"),
        ({"cluster_column": "nope"}, "--cluster-column nope: table has no such column. Columns: id, prompt"),
    ],
)
def test_columns_that_do_not_exist_are_named(make_run, option: dict, message: str) -> None:
    run = make_run(["x"])
    with pytest.raises(InputError, match=message):
        paired(run, run, **option)


def test_cluster_column_joins_prompts_and_null_falls_back_to_the_prompt(make_run) -> None:
    inputs = {"id": [1, 2, 3, 4], "prompt": ["p", "q", "r", "r"], "document": ["d", "d", None, None]}
    run = make_run(["1", "2", "3", "4"], inputs)
    assert paired(run, run, cluster_column="document").cluster_index.tolist() == [0, 0, 1, 1]


def test_jsonl_and_folders_are_read_as_well(tmp_path, make_run) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"id": "a", "output": "x"}\n{"id": "b", "output": null}\n', encoding="utf-8")
    run = load_run_output(path)
    assert run.table.num_rows == 2
    assert run.id_column == "id"
    pairs = pair_rows(run, run)
    assert list(pairs.before.texts) == ["x", None]
    with pytest.raises(InputError, match=r"missing\.parquet"):
        load_run_output(tmp_path / "missing.parquet")
