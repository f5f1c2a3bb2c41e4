"""Completions inside a pipeline: datasets, data frames and tables keep what they are."""

from __future__ import annotations

from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import ClassLabel, Features, Image, List, Sequence, Value
from fakes import FakeEngine, FakeModelSource
from tiny_models import tiny_engine

from batchinfer.errors import InputError
from batchinfer.pipeline import generate_dataset
from batchinfer.types import SamplingParams

FEATURES = Features(
    {
        "id": Value("string"),
        "prompt": Value("large_string"),
        "label": ClassLabel(names=["no", "yes"]),
        "small": Value("int8"),
        "when": Value("timestamp[us]"),
        "turns": List({"role": Value("string"), "content": Value("string")}),
        "picture": Image(decode=False),
    }
)


def rows(num_rows: int) -> dict[str, list[Any]]:
    return {
        "id": [f"r{i}" for i in range(num_rows)],
        "prompt": [f"prompt {i}" for i in range(num_rows)],
        "label": [i % 2 for i in range(num_rows)],
        "small": [None if i == 1 else i for i in range(num_rows)],
        "when": [pd.Timestamp(2024, 1, 1 + i) for i in range(num_rows)],
        "turns": [[{"role": "user", "content": str(i)}] * (i % 3) for i in range(num_rows)],
        "picture": [{"bytes": bytes([i]), "path": None} for i in range(num_rows)],
    }


@pytest.fixture
def dataset() -> datasets.Dataset:
    table = pa.Table.from_pydict(rows(6), schema=FEATURES.arrow_schema)  # from_dict would want Pillow for the picture
    return datasets.Dataset(table, datasets.DatasetInfo(features=FEATURES))


def test_all_features_are_kept_and_results_have_types(dataset: datasets.Dataset) -> None:
    result = generate_dataset(FakeEngine(), dataset)
    assert {name: result.features[name] for name in FEATURES} == dict(FEATURES)
    assert result.column_names[: len(FEATURES)] == list(FEATURES)
    assert result.features["output"] == Value("string")
    assert result.features["output_token_ids"] == List(Value("int32"))
    assert result.features["num_output_tokens"] == Value("int32")
    assert result.features["error"] == {"code": Value("string"), "message": Value("string")}
    assert result["output"][:] == [f"prompt {i}" for i in range(6)]
    for name in FEATURES:
        assert result[name][:] == dataset[name][:]


def test_in_a_pipeline_after_select_shuffle_filter_and_map(dataset: datasets.Dataset) -> None:
    before = dataset.shuffle(seed=3).select([4, 0, 2, 1]).filter(lambda row: row["id"] != "r0")
    before = before.map(lambda row: {"prompt": row["prompt"].upper()})
    result = generate_dataset(FakeEngine(), before).map(lambda row: {"length": len(row["output"])})
    assert result["id"][:] == before["id"][:]
    assert result["output"][:] == [text.upper() for text in before["prompt"][:]]
    assert result["length"][:] == [8] * len(before)
    assert result.features["label"] == FEATURES["label"]


def test_samples_follow_each_other(dataset: datasets.Dataset) -> None:
    result = generate_dataset(FakeEngine(), dataset.select([5, 3]), SamplingParams(n=2))
    assert list(zip(result["id"][:], result["sample_index"][:], strict=True)) == [
        ("r5", 0),
        ("r5", 1),
        ("r3", 0),
        ("r3", 1),
    ]
    assert result.features["label"] == FEATURES["label"]


def test_bad_rows_are_row_errors(dataset: datasets.Dataset) -> None:
    texts = ["fine", None, "", "x" * 600]
    result = generate_dataset(FakeEngine(), datasets.Dataset.from_dict({"text": texts}))
    assert result["output"][:] == ["fine", None, None, None]
    codes = [error["code"] if error else None for error in result["error"][:]]
    assert codes == [None, "prompt_null", "prompt_empty", "prompt_too_long"]


def test_format_and_split_are_kept() -> None:
    dataset = datasets.Dataset.from_dict({"prompt": ["a", "b"], "x": [1, 2]}, split="test")
    result = generate_dataset(FakeEngine(), dataset.with_format("numpy"))
    assert result.split == "test"
    assert result.format["type"] == "numpy"
    assert result[0]["x"].dtype.kind == "i"
    assert result[0]["output"] == "a"
    some = generate_dataset(FakeEngine(), dataset.with_format("numpy", columns=["x"]))
    assert "prompt" not in some[0]
    assert some[0]["output"] == "a"


def test_windows_do_not_show(dataset: datasets.Dataset) -> None:
    engine = FakeEngine()
    result = generate_dataset(engine, dataset, window_rows=4)
    assert engine.num_runs_closed == 2
    assert result["output"][:] == dataset["prompt"][:]


def test_no_rows_give_the_columns(dataset: datasets.Dataset) -> None:
    full, empty = generate_dataset(FakeEngine(), dataset), generate_dataset(FakeEngine(), dataset.select([]))
    assert len(empty) == 0
    assert empty.features == full.features
    frame = generate_dataset(FakeEngine(), pd.DataFrame({"prompt": pd.Series([], dtype="str")}))
    assert (len(frame), "output" in frame.columns) == (0, True)


def test_messages_are_found_and_named(dataset: datasets.Dataset) -> None:
    chats = dataset.remove_columns("prompt").filter(lambda row: row["turns"])
    result = generate_dataset(FakeEngine(), chats, messages_column="turns", system="Be brief.")
    assert result["output"][0] == "system: Be brief.\nuser: 1\nassistant: "


def test_params_come_from_the_row_then_the_call_then_the_model() -> None:
    engine = FakeEngine(FakeModelSource(generation_defaults={"temperature": 0.5}))
    dataset = datasets.Dataset.from_dict(
        {"prompt": ["a", "b"], "sampling_params": [{"temperature": 0.25}, {"temperature": None}]}
    )
    generate_dataset(engine, dataset)
    assert [prompt.params.temperature for prompt in engine.prompts] == [0.25, 0.5]
    generate_dataset(engine, dataset, SamplingParams(temperature=0.75))
    assert [prompt.params.temperature for prompt in engine.prompts] == [0.25, 0.75]


def test_logprobs_come_as_columns() -> None:
    dataset = datasets.Dataset.from_dict({"prompt": ["ab"]})
    result = generate_dataset(FakeEngine(), dataset, SamplingParams(logprobs=1))
    assert result["logprobs"][0] == [-0.5, -0.5]
    assert result.features["logprobs"] == Sequence(Value("float32"))
    assert [token[0]["token_id"] for token in result["top_logprobs"][0]] == [ord("a"), ord("b")]


def test_a_data_frame_keeps_index_and_dtypes() -> None:
    frame = pd.DataFrame(
        {
            "prompt": ["a", "b"],
            "kind": pd.Categorical(["x", "y"]),
            "count": pd.array([1, None], dtype="Int64"),
        },
        index=pd.Index(["p", "q"], name="key"),
    )
    before = frame.copy()
    result = generate_dataset(FakeEngine(), frame, SamplingParams(n=2))
    assert list(result.index) == ["p", "p", "q", "q"]
    assert result.index.name == "key"
    assert result["output"].tolist() == ["a", "a", "b", "b"]
    assert result["sample_index"].tolist() == [0, 1, 0, 1]
    assert result.dtypes[["prompt", "kind", "count"]].equals(frame.dtypes)
    pd.testing.assert_frame_equal(frame, before)


def test_a_table_keeps_its_schema() -> None:
    table = pa.table({"prompt": pa.array(["a", "b"], pa.large_string()), "x": pa.array([1, None], pa.uint8())})
    table = table.replace_schema_metadata({"who": "me"})
    result = generate_dataset(FakeEngine(), table)
    assert result.select(["prompt", "x"]) == table
    assert result.schema.metadata == {b"who": b"me"}
    assert result["output"].to_pylist() == ["a", "b"]


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        ([{"prompt": "a"}], TypeError, "IterableDataset, pandas.DataFrame or pyarrow.Table, got list"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_dict({"prompt": ["a"]})}), InputError, "splits train"),
        (datasets.IterableDataset.from_generator(lambda: iter([{"prompt": "a"}])), InputError, "cast"),
        (datasets.Dataset.from_dict({"x": ["a"]}).to_iterable_dataset(), InputError, "--prompt-column"),
        (datasets.Dataset.from_dict({"prompt": ["a"], "error": [1]}).to_iterable_dataset(), InputError, "'error'"),
        (datasets.Dataset.from_dict({"question": ["a"]}), InputError, "--prompt-column"),
        (datasets.Dataset.from_dict({"prompt": ["a"], "output": ["b"]}), InputError, "'output'"),
        (pd.DataFrame({"prompt": ["a"], "id": [[1, "x"]]}), InputError, "column 'id' .* does not fit Arrow's types"),
        (pd.DataFrame([["a", "b"]], columns=["prompt", "prompt"]), InputError, "more than one column named 'prompt'"),
    ],
)
def test_what_is_refused(bad: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        generate_dataset(FakeEngine(), bad)


def test_columns_that_are_not_read_may_hold_what_parquet_and_arrow_cannot() -> None:
    frame = pd.DataFrame({"prompt": ["a", "b"], "mixed": [[1, "x"], {"y"}], "complex": [1j, 2j]}, index=[7, 7])
    result = generate_dataset(FakeEngine(), frame)
    assert result["output"].tolist() == ["a", "b"]
    pd.testing.assert_frame_equal(result[list(frame.columns)], frame)
    table = pa.table({"prompt": ["a", "b"], "span": pa.array([(1, 2, 3), None], pa.month_day_nano_interval())})
    assert generate_dataset(FakeEngine(), table).select(["prompt", "span"]) == table


def test_a_column_that_cannot_be_read_takes_its_name_all_the_same() -> None:
    with pytest.raises(InputError, match="'output'"):
        generate_dataset(FakeEngine(), pd.DataFrame({"prompt": ["a"], "output": [1j]}))
    with pytest.raises(InputError, match="column 'q' of the data frame does not fit"):
        generate_dataset(FakeEngine(), pd.DataFrame({"prompt": ["a"], "q": [["a", 1]]}), prompt_column="q")


def test_a_prefix_resolves_a_clash() -> None:
    dataset = datasets.Dataset.from_dict({"prompt": ["a"], "output": ["mine"]})
    result = generate_dataset(FakeEngine(), dataset, output_prefix="bi_")
    assert (result["output"][0], result["bi_output"][0]) == ("mine", "a")


def test_the_real_engine_gives_what_generate_gives() -> None:
    engine = tiny_engine()
    texts = ["shared beginning, then one", "shared beginning, then two", "", "another"]
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=3)
    frame = pd.DataFrame({"prompt": texts, "id": ["a", "b", "c", "d"]})
    result = engine.generate_dataset(frame, params)
    expected = engine.generate(texts, params, ids=["a", "b", "c", "d"])
    assert [list(ids) if ids is not None else None for ids in result["output_token_ids"]] == [
        None if samples[0].error else samples[0].token_ids for samples in expected
    ]
    assert result["error"][2]["code"] == "prompt_empty"
    assert len(engine.generate_dataset(datasets.Dataset.from_pandas(frame), params, id_column="id")) == 4


# Streams


def test_a_stream_is_completed_while_it_is_read(dataset: datasets.Dataset) -> None:
    """Nothing runs before, a window at a time then, and every pass anew."""
    engine = FakeEngine()
    result = generate_dataset(engine, dataset.to_iterable_dataset(num_shards=2), window_rows=4)
    assert isinstance(result, datasets.IterableDataset)
    assert engine.num_runs_closed == 0
    assert result.features == generate_dataset(FakeEngine(), dataset).features
    rows = iter(result)
    assert next(rows)["output"] == "prompt 0"
    assert engine.num_runs_closed == 1
    rest = list(rows)
    assert engine.num_runs_closed == 2
    assert [row["output"] for row in rest] == [f"prompt {i}" for i in range(1, 6)]
    assert len(list(result)) == 6
    assert engine.num_runs_closed == 4


def test_a_stream_keeps_every_value(dataset: datasets.Dataset) -> None:
    for stream in (dataset.to_iterable_dataset(), dataset.shuffle(seed=1).to_iterable_dataset()):
        result = list(generate_dataset(FakeEngine(), stream, window_rows=4))
        assert [{name: row[name] for name in FEATURES} for row in result] == list(stream)


def test_a_stream_gives_samples_row_errors_and_logprobs() -> None:
    texts = ["fine", None, "", "x" * 600]
    stream = datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset()
    result = list(generate_dataset(FakeEngine(), stream, SamplingParams(n=2, logprobs=1), window_rows=3))
    assert [(row["text"], row["sample_index"], row["error"] and row["error"]["code"]) for row in result] == [
        ("fine", 0, None),
        ("fine", 1, None),
        (None, 0, "prompt_null"),
        ("", 0, "prompt_empty"),
        ("x" * 600, 0, "prompt_too_long"),
    ]
    assert result[0]["logprobs"] == [-0.5] * 4


def test_a_stream_goes_on_through_the_pipeline_and_keeps_its_format(dataset: datasets.Dataset) -> None:
    stream = dataset.select_columns(["prompt", "small"]).to_iterable_dataset().with_format("arrow")
    result = generate_dataset(FakeEngine(), stream, output_prefix="bi_").filter(lambda table: [True] * len(table))
    tables = list(result.iter(batch_size=4))
    assert [type(table) for table in tables] == [pa.Table, pa.Table]
    assert pa.concat_tables(tables).column("bi_output").to_pylist() == dataset["prompt"][:]
    plain = generate_dataset(FakeEngine(), dataset.to_iterable_dataset()).map(lambda row: {"n": len(row["output"])})
    assert [row["n"] for row in plain.take(2)] == [8, 8]


def test_files_of_a_loaded_dataset(tmp_path: Any) -> None:
    """load_dataset of local files, whole and streaming: what a hub dataset is but for its place."""
    path = str(tmp_path / "a.parquet")
    pa.parquet.write_table(pa.table({"prompt": ["a", None, "c"], "big": [2**60, None, -1]}), path)
    loaded = datasets.load_dataset("parquet", data_files=path, split="train", cache_dir=str(tmp_path / "cache"))
    whole = generate_dataset(FakeEngine(), loaded)
    assert (whole["output"][:], whole["big"][:]) == (["a", None, "c"], [2**60, None, -1])
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"prompt": "a", "big": 1152921504606846976}\n{"prompt": null, "big": null}\n')
    stream = datasets.load_dataset("json", data_files=str(lines), split="train", streaming=True)
    stream = stream.cast(Features({"prompt": Value("string"), "big": Value("int64")}))
    streamed = list(generate_dataset(FakeEngine(), stream))
    assert [(row["output"], row["big"]) for row in streamed] == [("a", 2**60), (None, None)]
