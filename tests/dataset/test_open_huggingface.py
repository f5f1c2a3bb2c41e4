"""Hugging Face datasets in: exact types, selections respected, features kept, clear errors offline."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pytest

from batchinfer.dataset.source import from_dataset, open_source
from batchinfer.dataset.windows import input_windows
from batchinfer.errors import InputError

datasets = pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def dataset():
    features = datasets.Features(
        {
            "id": datasets.Value("int64"),
            "prompt": datasets.Value("large_string"),
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "matrix": datasets.Array2D((2, 2), "int32"),
            "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "when": datasets.Value("timestamp[us, tz=UTC]"),
        }
    )
    rows = {
        "id": [2**53 + i for i in range(50)],
        "prompt": [None if i == 3 else f"p{i}" for i in range(50)],
        "label": [i % 2 for i in range(50)],
        "matrix": [[[i, 1], [2, 3]] for i in range(50)],
        "messages": [[{"role": "user", "content": str(i)}] * (i % 3) for i in range(50)],
        "when": [None] * 50,
    }
    return datasets.Dataset.from_dict(rows, features=features)


@pytest.fixture(scope="module")
def saved(dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    dataset.shuffle(seed=1).save_to_disk(folder / "one")
    datasets.DatasetDict(train=dataset, test=dataset.select([4, 2])).save_to_disk(folder / "splits")
    return folder


def prompts_of(source) -> list[str | None]:
    return [p for window in source.windows(7) for p in window.column("prompt").to_pylist()]


def test_a_dataset_keeps_types_features_and_order(dataset) -> None:
    source = from_dataset(dataset)
    assert source.num_rows == 50
    table = pa.concat_tables(source.windows(7))
    assert table.schema.equals(dataset.features.arrow_schema, check_metadata=True)
    assert table.to_pylist() == dataset.data.table.to_pylist()


def test_selections_and_shuffles_are_respected(dataset) -> None:
    shuffled = dataset.shuffle(seed=3).select(range(5, 25))
    source = from_dataset(shuffled, limit=12)
    assert source.num_rows == 12
    assert prompts_of(source) == list(shuffled["prompt"])[:12]
    assert prompts_of(source) == list(shuffled["prompt"])[:12]


def test_selections_too_large_for_one_array_come_in_pieces(dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of five rows in place of 2 GiB."""
    source = from_dataset(dataset.select(range(49, -1, -1)))
    getitem = datasets.Dataset.__getitem__

    def limited(self, key):
        if isinstance(key, slice) and key.stop - key.start > 5:
            raise pa.ArrowInvalid("offset overflow while concatenating arrays")
        return getitem(self, key)

    monkeypatch.setattr(datasets.Dataset, "__getitem__", limited)
    assert [i for w in source.windows(20) for i in w.column("id").to_pylist()] == [2**53 + i for i in range(49, -1, -1)]


def test_the_callers_format_does_not_matter(dataset) -> None:
    formatted = dataset.with_format("numpy", columns=["id"])
    assert prompts_of(from_dataset(formatted)) == list(dataset["prompt"])


def test_a_stream_with_features(dataset) -> None:
    source = from_dataset(dataset.to_iterable_dataset(num_shards=3), limit=20)
    assert source.num_rows is None
    tables = list(source.windows(8))
    assert [t.num_rows for t in tables] == [8, 8, 4]
    assert all(t.schema.equals(source.schema) for t in tables)
    assert prompts_of(source) == list(dataset["prompt"])[:20]


def test_a_stream_without_features() -> None:
    stream = datasets.IterableDataset.from_generator(lambda: iter([{"prompt": "a"}]))
    with pytest.raises(InputError, match="streams without known features"):
        from_dataset(stream)


def test_saved_to_disk(dataset, saved: Path) -> None:
    expected = list(dataset.shuffle(seed=1)["prompt"])
    for spec in (f"{saved}/one", f"hf:{saved}/one"):
        assert prompts_of(open_source(spec)) == expected
        assert prompts_of(open_source(spec, limit=3)) == expected[:3]


def test_splits_saved_to_disk(saved: Path) -> None:
    for spec in (f"{saved}/splits@test", f"hf:{saved}/splits@test"):
        assert prompts_of(open_source(spec)) == ["p4", "p2"]
    for spec in (f"{saved}/splits", f"hf:{saved}/splits", f"{saved}/splits@dev"):
        with pytest.raises(InputError, match=r"has the splits train, test: choose one, such as .*splits@train"):
            open_source(spec)
    with pytest.raises(InputError, match="one dataset without splits: leave out @train"):
        open_source(f"{saved}/one@train")


def test_a_damaged_save_is_named(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(InputError, match="cannot load the dataset saved in"):
        open_source(str(tmp_path))


def test_a_folder_that_load_dataset_understands(dataset, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    dataset.to_parquet(tmp_path / "data" / "train-00000.parquet")
    capfd.readouterr()
    source = open_source(f"hf:{tmp_path}@train[:4]")
    assert prompts_of(source) == ["p0", "p1", "p2", None]
    assert source.schema.equals(dataset.features.arrow_schema, check_metadata=True)
    assert "\r" not in capfd.readouterr().err
    with pytest.raises(InputError, match=r"cannot load hf:.*@nope"):
        open_source(f"hf:{tmp_path}@nope")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hf:someone/nothing@train", "cannot load hf:someone/nothing@train: .*check the name, and that the hub"),
        ("hf:someone/nothing:config@train", "cannot load hf:someone/nothing:config@train: "),
        ("hf:someone/nothing", "say which split, for example hf:someone/nothing@train"),
        ("hf:/no/such/folder@train", "folder /no/such/folder does not exist"),
        ("hf:", r"write hf:NAME\[:CONFIG\]@SPLIT"),
        ("hf:@train", r"write hf:NAME\[:CONFIG\]@SPLIT"),
        ("hf-stream:", r"write hf-stream:NAME\[:CONFIG\]@SPLIT"),
        ("hf-stream:someone/nothing@train", "cannot load hf-stream:someone/nothing@train: .*check the name"),
    ],
)
def test_what_cannot_be_loaded(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_source(spec)


def test_a_folder_that_is_streamed(dataset, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    dataset.to_parquet(tmp_path / "data" / "train-00000.parquet")
    source = open_source(f"hf-stream:{tmp_path}@train", limit=30)
    assert (source.num_rows, source.rereads) == (None, False)
    assert source.schema.equals(dataset.features.arrow_schema)
    assert prompts_of(source) == list(dataset["prompt"])[:30]
    (window,) = input_windows(source, 10, columns=["prompt"], start=25)
    assert (window.first_row_index, window.table.column("prompt").to_pylist()) == (25, list(dataset["prompt"])[25:30])
    assert pa.concat_tables(window.full()).to_pylist() == dataset.data.table.slice(25, 5).to_pylist()
    with pytest.raises(InputError, match=r"hf-stream:.*: say which split, for example hf-stream:.*@train"):
        open_source(f"hf-stream:{tmp_path}")


def test_a_stream_of_json_lines_has_the_types_of_its_first_rows(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "n": 1}\n' * 3 + '{"prompt": "b", "n": null}\n')
    source = open_source(f"hf-stream:{tmp_path}@train")
    assert source.schema.types == [pa.string(), pa.int64()]
    assert prompts_of(source) == ["a", "a", "a", "b"]


@pytest.mark.parametrize("is_offline_mode", [True, False])
def test_no_hub_is_known_at_once(is_offline_mode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline_mode)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # a port that nobody listens to
    reason = "HF_HUB_OFFLINE is set" if is_offline_mode else r"the hub http://127.0.0.1:9 cannot be reached \(\w+\)"
    begin = time.perf_counter()
    with pytest.raises(InputError, match=f"{reason}, and the dataset is not in the cache; check the name"):
        open_source("hf:someone/nothing@train")
    assert time.perf_counter() - begin < 8
    assert is_offline_mode == constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


def test_what_is_in_the_cache_is_read_without_the_hub(dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is laid out as load_dataset would for a dataset of the hub."""
    import datasets.config
    from huggingface_hub import constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    folder = tmp_path / "cache" / "someone___thing" / "default" / "0.0.0" / ("0" * 40)
    folder.mkdir(parents=True)
    writer = datasets.arrow_writer.ArrowWriter(path=str(folder / "thing-train.arrow"), features=dataset.features)
    writer.write_table(dataset.data.table)
    num_rows, num_bytes = writer.finalize()
    info = datasets.DatasetInfo(
        features=dataset.features,
        builder_name="parquet",
        dataset_name="thing",
        config_name="default",
        version="0.0.0",
        splits=[{"name": "train", "num_bytes": num_bytes, "num_examples": num_rows, "dataset_name": "thing"}],
    )
    info.write_to_directory(folder)
    assert prompts_of(open_source("hf:someone/thing@train[:3]")) == ["p0", "p1", "p2"]


def test_a_dictionary_of_splits_is_refused(dataset) -> None:
    with pytest.raises(InputError, match="dictionary of the splits train, test: pass one of them"):
        from_dataset(datasets.DatasetDict(train=dataset, test=dataset))


def test_an_empty_dataset(dataset) -> None:
    with pytest.raises(InputError, match="has no rows"):
        from_dataset(dataset.select([]))
