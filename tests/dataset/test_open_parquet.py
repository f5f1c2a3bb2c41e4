"""Parquet in: exact windows and types, and one clear error for everything that cannot be read."""

from __future__ import annotations

import datetime
import decimal
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.dataset import parquet as parquet_module
from batchinfer.dataset.source import from_dataset, open_source
from batchinfer.dataset.windows import input_windows
from batchinfer.errors import InputError


def write(path: Path, num_rows: int, start: int = 0, group: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = list(range(start, start + num_rows))
    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string())])
    table = pa.table({"id": numbers, "prompt": [f"p{i}" for i in numbers]}, schema=schema)
    pq.write_table(table, path, row_group_size=group)
    return path


def ids(source) -> list[int]:
    return [i for window in source.windows(7) for i in window.column("id").to_pylist()]


@pytest.mark.parametrize("num_rows", [1, 49, 50, 51, 60, 99, 100, 101, 250])
@pytest.mark.parametrize("window", [1, 17, 50, 100, 1000])
def test_windows_are_exact_and_lose_no_row(tmp_path: Path, num_rows: int, window: int) -> None:
    source = open_source(str(write(tmp_path / "a.parquet", num_rows, group=33)))
    tables = list(source.windows(window))
    assert source.num_rows == num_rows
    assert all(t.num_rows == window for t in tables[:-1])
    assert 0 < tables[-1].num_rows <= window
    assert [i for t in tables for i in t.column("id").to_pylist()] == list(range(num_rows))
    assert all(t.schema.equals(source.schema, check_metadata=True) for t in tables)


def test_every_pass_starts_at_the_first_row(tmp_path: Path) -> None:
    source = open_source(str(write(tmp_path / "a.parquet", 40)))
    next(source.windows(3))
    assert ids(source) == list(range(40))
    assert ids(source) == list(range(40))


@pytest.mark.parametrize("limit", [1, 10, 25, 26, 1000])
def test_limit_keeps_the_first_rows(tmp_path: Path, limit: int) -> None:
    for part, start in enumerate((0, 10, 20)):
        write(tmp_path / f"part-{part}.parquet", 10, start)
    source = open_source(str(tmp_path), limit=limit)
    assert source.num_rows == min(limit, 30)
    assert ids(source) == list(range(min(limit, 30)))


def test_limit_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="limit must be at least 1"):
        open_source(str(write(tmp_path / "a.parquet", 3)), limit=0)


def test_a_folder_is_read_recursively_in_order_without_hidden_and_temporary_files(tmp_path: Path) -> None:
    write(tmp_path / "b" / "part-1.parquet", 5, 5)
    write(tmp_path / "a.parquet", 5, 0)
    write(tmp_path / "b" / "part-2.parquet", 5, 10)
    write(tmp_path / ".hidden.parquet", 5, 900)
    write(tmp_path / "_temporary" / "0.parquet", 5, 900)
    write(tmp_path / ".cache" / "0.parquet", 5, 900)
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "readme.txt").write_text("x")
    assert ids(open_source(str(tmp_path))) == list(range(15))


def test_a_glob_is_read_in_order(tmp_path: Path) -> None:
    write(tmp_path / "x" / "2.parquet", 5, 5)
    write(tmp_path / "x" / "1.parquet", 5, 0)
    write(tmp_path / "y" / "1.parquet", 5, 10)
    write(tmp_path / "z.parquet", 5, 900)
    assert ids(open_source(f"{tmp_path}/*/?.parquet")) == list(range(15))
    assert ids(open_source(f"{tmp_path}/[x]")) == list(range(10))
    with pytest.raises(InputError, match=r"no file matches .*nothing"):
        open_source(f"{tmp_path}/nothing*.parquet")


def test_a_file_whose_name_looks_like_a_glob(tmp_path: Path) -> None:
    assert ids(open_source(str(write(tmp_path / "a[1].parquet", 5)))) == list(range(5))


def test_parquet_without_the_usual_ending(tmp_path: Path) -> None:
    assert ids(open_source(str(write(tmp_path / "data", 5)))) == list(range(5))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nope\.parquet does not exist"):
        open_source(str(tmp_path / "nope.parquet"))


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    with pytest.raises(InputError, match=r"a\.parquet is empty \(0 bytes\)"):
        open_source(str(tmp_path / "a.parquet"))


def test_not_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("id,prompt\n1,hello\n")
    with pytest.raises(InputError, match=r"a\.parquet is not a Parquet file"):
        open_source(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("keep", [4, 5, 50, -1, -4, -9])
def test_cut_file(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "a.parquet", 50)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"a\.parquet is cut short or damaged"):
        open_source(str(path))


def test_one_bad_file_in_a_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 5)
    (tmp_path / "b.parquet").touch()
    with pytest.raises(InputError, match=r"b\.parquet is empty"):
        open_source(str(tmp_path))


def test_damaged_pages_are_an_error_of_that_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 1000, group=1000)
    data = bytearray(path.read_bytes())
    data[20:400] = b"\xff" * 380
    path.write_bytes(data)
    source = open_source(str(path))
    with pytest.raises(InputError, match=r"cannot read .*a\.parquet from row 0 on \(row group 0\): "):
        list(source.windows())


def test_a_damaged_page_in_the_middle_names_its_rows_and_leaves_those_before(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 1000, group=100)
    column = pq.read_metadata(path).row_group(7).column(1)
    data = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + 60] = b"\xff" * 60
    path.write_bytes(data)
    source = open_source(str(path))
    windows = source.windows(250)
    assert [next(windows).num_rows for _ in range(2)] == [250, 250]
    with pytest.raises(InputError, match=r"cannot read .*a\.parquet from row 700 on \(row group 7\): "):
        next(windows)
    assert [t.num_rows for t in source.windows(100, start=800)] == [100, 100]
    assert sum(t.num_rows for t in source.windows(250, columns=["id"])) == 1000


def test_a_flipped_bit_is_found_where_the_file_has_checksums(tmp_path: Path) -> None:
    """Without a checksum an uncompressed page with other bytes in it is simply other data."""
    table = pa.table({"prompt": [f"prompt {i}" for i in range(100)]})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[data.index(b"prompt 50")] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"cannot read .*a\.parquet from row 0 on .*(CRC|checksum)"):
        list(open_source(str(path)).windows())


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_no_permission(tmp_path: Path, name: str) -> None:
    """In a process without root's rights, where the tests have them."""
    path = tmp_path / name
    write(path, 5) if name.endswith("parquet") else path.write_text('{"prompt": "a"}')
    path.chmod(0)
    with as_nobody(tmp_path), pytest.raises(InputError, match=rf"cannot read .*{name}: Permission denied"):
        open_source(str(path))


def test_a_folder_below_that_may_not_be_looked_into_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 5)
    write(tmp_path / "b" / "b.parquet", 5)
    (tmp_path / "b").chmod(0)
    try:
        with as_nobody(tmp_path), pytest.raises(InputError, match=r"cannot read .*/b: Permission denied"):
            open_source(str(tmp_path))
    finally:
        (tmp_path / "b").chmod(0o700)


@contextmanager
def as_nobody(folder: Path) -> Iterator[None]:
    if os.geteuid() != 0:
        yield
        return
    for parent in (folder, *folder.parents):  # which pytest closes to others
        if parent.stat().st_uid == 0 and parent != Path(parent.anchor):
            parent.chmod(parent.stat().st_mode | 0o055)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_folder_without_parquet(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no \*\.parquet file$"):
        open_source(str(tmp_path))
    (tmp_path / "rows.jsonl").write_text("{}")
    with pytest.raises(InputError, match=r"it holds rows\.jsonl: name that file"):
        open_source(str(tmp_path))


def test_no_rows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.parquet has no rows"):
        open_source(str(write(tmp_path / "a.parquet", 0)))
    write(tmp_path / "b.parquet", 3)
    assert ids(open_source(str(tmp_path))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"id": [1]}, r"b\.parquet lacks column 'prompt', which .*a\.parquet has \(string\)"),
        ({"id": ["1"], "prompt": ["x"]}, r"column 'id' has type string in .*b\.parquet and int64 in .*a\.parquet"),
        ({"id": [1], "prompt": ["x"], "more": [1.5]}, r"b\.parquet has column 'more' \(double\), which .*a\.parquet"),
        ({"id": [1], "prompt": pa.nulls(1)}, r"column 'prompt' has type null in .*b\.parquet and string in"),
    ],
)
def test_files_of_different_schemas(tmp_path: Path, other: dict, message: str) -> None:
    write(tmp_path / "a.parquet", 3)
    pq.write_table(pa.table(other), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=message):
        open_source(str(tmp_path))


def test_files_that_differ_in_a_nested_type_or_in_what_may_be_null(tmp_path: Path) -> None:
    pq.write_table(pa.table({"m": [[{"role": "a"}]]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"m": [[{"role": 1}]]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"column 'm' has type list<.*role: int64.*b\.parquet and list<.*role: string"):
        open_source(str(tmp_path))
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    pq.write_table(pa.table({"id": [1]}, schema=schema), tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": [1]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"column 'id' may be null in .*b\.parquet and may not in .*a\.parquet"):
        open_source(str(tmp_path))


def test_a_thousand_small_files(tmp_path: Path) -> None:
    table = pa.table({"id": pa.array(range(10)), "prompt": ["a"] * 10})
    pq.write_table(table, tmp_path / "0000.parquet")
    data = (tmp_path / "0000.parquet").read_bytes()
    for number in range(1, 1000):
        (tmp_path / f"{number:04}.parquet").write_bytes(data)
    begin = time.perf_counter()
    source = open_source(str(tmp_path))
    num_open = len(os.listdir("/proc/self/fd"))
    windows = source.windows(4096, columns=["id"])
    first = next(windows)
    assert len(os.listdir("/proc/self/fd")) <= num_open + 3
    assert pa.concat_tables([first, *windows]).column("id").to_pylist() == list(range(10)) * 1000
    assert len(os.listdir("/proc/self/fd")) <= num_open + 1
    assert time.perf_counter() - begin < 20  # about 2 s; the bound is for crowded machines
    assert next(source.windows(5, start=9_995)).num_rows == 5


def test_files_may_order_their_columns_differently(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 3)
    pq.write_table(pa.table({"prompt": ["x"], "id": [3]}), tmp_path / "b.parquet")
    source = open_source(str(tmp_path))
    assert ids(source) == [0, 1, 2, 3]
    assert all(window.schema.names == ["id", "prompt"] for window in source.windows(2))


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match="more than one column named 'x'"):
        open_source(str(tmp_path / "a.parquet"))
    with pytest.raises(InputError, match="more than one column named 'x'"):
        from_dataset(table)


def test_a_file_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 30)
    source = open_source(str(path))
    write(path, 20)
    with pytest.raises(InputError, match=r"a\.parquet changed since it was opened"):
        list(source.windows(7))
    path.unlink()
    with pytest.raises(InputError, match=r"cannot read .*a\.parquet: No such file"):
        list(source.windows(7))


def all_types() -> pa.Table:
    """Columns of everything Parquet holds that a careless reader would change. Three rows, nulls in all."""
    struct = pa.struct([("role", pa.string()), ("content", pa.string())])
    columns = {
        "large_string": pa.array(["a", None, "ü"], pa.large_string()),
        "string_view": pa.array(["a", None, "a string longer than twelve"], pa.string_view()),
        "binary": pa.array([b"\x00\xff", None, b""], pa.binary()),
        "dictionary": pa.array(["a", None, "a"]).dictionary_encode(),
        "decimal": pa.array([decimal.Decimal("1.10"), None, decimal.Decimal("-2.00")], pa.decimal128(38, 2)),
        "timestamp": pa.array([1, None, 2**60], pa.timestamp("ns", "Europe/Berlin")),
        "duration": pa.array([1, None, 2], pa.duration("us")),
        "date": pa.array([datetime.date(2020, 2, 29), None, None], pa.date32()),
        "int64": pa.array([2**53 + 1, None, -(2**63)], pa.int64()),
        "uint64": pa.array([2**64 - 1, None, 2**53 + 1], pa.uint64()),
        "int8": pa.array([1, None, -1], pa.int8()),
        "float": pa.array([0.1, None, float("-inf")], pa.float32()),
        "bool": pa.array([True, None, False]),
        "null": pa.nulls(3),
        "messages": pa.array([[{"role": "user", "content": None}], None, []], pa.list_(struct)),
        "large_list": pa.array([[1], None, []], pa.large_list(pa.int64())),
        "list_of_lists": pa.array([[[1, None], [], None], None, []], pa.list_(pa.list_(pa.int64()))),
        "fixed_size_list": pa.array([[1, 2], None, [3, None]], pa.list_(pa.int64(), 2)),
        "struct": pa.array([{"a": None, "b": [1]}, None, {"a": "x", "b": []}]),
        "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int32())),
        "uuid": pa.array([b"0" * 16, None, b"1" * 16], pa.uuid()),
    }
    return pa.table(columns)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_every_type_comes_through(tmp_path: Path, window: int) -> None:
    table = pa.concat_tables([all_types()] * 3)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    source = open_source(str(tmp_path / "a.parquet"))
    assert source.schema.equals(table.schema)
    assert pa.concat_tables(source.windows(window)).to_pylist() == table.to_pylist()


class Celsius(pa.ExtensionType):
    def __init__(self) -> None:
        super().__init__(pa.float32(), "batchinfer.tests.celsius")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Celsius:
        return cls()


def test_a_type_that_is_registered_between_opening_and_reading(tmp_path: Path) -> None:
    """As importing datasets does for its own types."""
    array = pa.ExtensionArray.from_storage(Celsius(), pa.array([1.5, None], pa.float32()))
    pq.write_table(pa.table({"x": array}), tmp_path / "a.parquet")
    source = open_source(str(tmp_path / "a.parquet"))
    pa.register_extension_type(Celsius())
    try:
        (window,) = source.windows()
    finally:
        pa.unregister_extension_type("batchinfer.tests.celsius")
    assert window.schema.equals(source.schema, check_metadata=True)
    assert window.column("x").to_pylist() == [1.5, None]
    assert window.schema.field("x").metadata[b"ARROW:extension:name"] == b"batchinfer.tests.celsius"


def test_schema_metadata_is_kept(tmp_path: Path) -> None:
    table = pa.table({"id": [1]}).replace_schema_metadata({"huggingface": "{}", "own": "x"})
    pq.write_table(table, tmp_path / "a.parquet")
    source = open_source(str(tmp_path / "a.parquet"))
    assert source.schema.metadata == {b"huggingface": b"{}", b"own": b"x"}
    assert next(source.windows()).schema.metadata == source.schema.metadata


def test_one_large_nested_row_group(tmp_path: Path) -> None:
    messages = [
        [{"role": "user", "content": f"{i} " * 1200}, {"role": "assistant", "content": "y" * 1000}] for i in range(4000)
    ]
    table = pa.table({"messages": messages})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4000)
    group = pq.ParquetFile(tmp_path / "a.parquet").metadata
    assert group.num_row_groups == 1
    assert group.row_group(0).total_byte_size > 16 * 2**20
    tables = list(open_source(str(tmp_path / "a.parquet")).windows(1500))
    assert pa.concat_tables(tables).equals(table)


@pytest.mark.slow
@pytest.mark.parametrize("is_nested", [False, True])
def test_one_row_group_whose_strings_pass_two_gib(tmp_path: Path, is_nested: bool) -> None:
    """32-bit offsets end there: the windows come in chunks, and nothing joins them. Few bytes are on disk."""
    text = "x" * (3 * 2**20)
    num_rows = 700  # fewer than are decoded at once
    cell = [{"content": text}] if is_nested else text
    table = pa.table({"prompt": pa.chunked_array([pa.array([cell] * 20)] * (num_rows // 20)), "i": range(num_rows)})
    pq.write_table(table, tmp_path / "a.parquet")
    assert pq.read_metadata(tmp_path / "a.parquet").num_row_groups == 1
    source = open_source(str(tmp_path / "a.parquet"))
    (window,) = source.windows()
    assert (window.num_rows, window.nbytes > 2**31) == (num_rows, True)
    assert window.column("i").to_pylist() == list(range(num_rows))
    for row in (0, 15, 16, num_rows - 1):
        assert window.column("prompt")[row].as_py() == cell
    del window
    (again,) = input_windows(source, columns=["i"])
    pieces = [(piece.num_rows, piece.column("prompt")[-1].as_py() == cell) for piece in again.full()]
    assert sum(rows for rows, _ in pieces) == num_rows
    assert all(is_same for _, is_same in pieces)


def test_nested_batches_that_are_too_large_to_decode_are_read_in_smaller_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet", 3000, group=3000)
    iter_batches = pq.ParquetFile.iter_batches
    sizes = []

    def fails_above_16_rows(self, batch_size, **kwargs):
        sizes.append(batch_size)
        for number, batch in enumerate(iter_batches(self, batch_size, **kwargs)):
            if batch_size > 16 and number == 1:
                raise pa.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")
            yield batch

    monkeypatch.setattr(parquet_module.pq.ParquetFile, "iter_batches", fails_above_16_rows)
    assert ids(open_source(str(path))) == list(range(3000))
    assert sizes == [16, 1024, 256, 64, 16]


@pytest.mark.parametrize(
    ("cell_bytes", "sizes"),
    [
        ([10] * 3000, [16, 1024]),
        ([50_000] * 300, [16]),
        ([10] * 1100 + [50_000] * 2900, [16, 1024, 16]),
        ([10**7] * 3, [16, 1]),
    ],
)
def test_rows_are_decoded_a_few_megabytes_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell_bytes: list[int], sizes: list[int]
) -> None:
    """Whatever the footer says: equal values are stored once."""
    table = pa.table({"id": range(len(cell_bytes)), "x": [b"x" * n for n in cell_bytes]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4000)
    monkeypatch.setattr(parquet_module, "_BATCH_BYTES", 2**20)
    iter_batches = pq.ParquetFile.iter_batches
    seen: list[int] = []

    def noted(self, batch_size, **kwargs):
        seen.append(batch_size)
        return iter_batches(self, batch_size, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", noted)
    tables = list(open_source(str(tmp_path / "a.parquet")).read_rows(0))
    assert pa.concat_tables(tables).equals(table)
    assert seen == (sizes if sizes != [16, 1] else [16])  # of which the first holds all rows


def test_a_table_and_a_data_frame_in_memory() -> None:
    import pandas as pd

    table = all_types()
    source = from_dataset(table, limit=2)
    assert source.num_rows == 2
    assert next(source.windows()).equals(table.slice(0, 2))
    frame = pd.DataFrame({"prompt": pd.Series(["a", None, float("nan")], dtype=object), "id": [1, 2, 3]})
    window = next(from_dataset(frame).windows())
    assert window.column("prompt").to_pylist() == ["a", None, None]
    with pytest.raises(InputError, match="prompt"):
        from_dataset(pd.DataFrame({"prompt": pd.Series(["a", 1], dtype=object)}))
    with pytest.raises(InputError, match="no rows"):
        from_dataset(pd.DataFrame({"prompt": []}))
    with pytest.raises(TypeError, match="got list"):
        from_dataset(["a"])  # type: ignore[arg-type]


def test_bad_input_is_known_without_heavy_imports(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 3)
    (tmp_path / "b.jsonl").write_text('{"prompt": "a"}')
    code = (
        "import sys\n"
        "from batchinfer.dataset.source import open_source\n"
        "from batchinfer.dataset.prompts import build_prompts\n"
        "from batchinfer.output.writer import ParquetOutput\n"
        "for spec in sys.argv[1:]: list(open_source(spec).windows())\n"
        "print({'torch', 'datasets', 'transformers'} & set(sys.modules))"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")]
    assert subprocess.run(arguments, capture_output=True, text=True, check=True).stdout == "set()\n"
