"""JSON Lines in: one schema for the whole file, exact numbers, errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from batchinfer.dataset import json_lines, jsonl
from batchinfer.dataset.source import open_source
from batchinfer.dataset.windows import input_windows
from batchinfer.errors import InputError


def write(tmp_path: Path, *lines: object, name: str = "a.jsonl") -> str:
    path = tmp_path / name
    path.write_bytes(b"".join((li if isinstance(li, bytes) else json.dumps(li).encode()) + b"\n" for li in lines))
    return str(path)


def read(spec: str, **options) -> pa.Table:
    source = open_source(spec, **options)
    table = pa.concat_tables(source.windows(2))
    assert table.schema.equals(source.schema)
    assert table.num_rows == source.num_rows
    return table


def test_types_hold_for_the_whole_file(tmp_path: Path) -> None:
    lines = [{"id": i, "prompt": f"p{i}"} for i in range(3000)]
    lines[-1] |= {"score": 0.5, "late": [1]}
    table = read(write(tmp_path, *lines))
    assert table.schema == pa.schema(
        [("id", pa.int64()), ("prompt", pa.string()), ("score", pa.float64()), ("late", pa.list_(pa.int64()))]
    )
    assert table.column("id").to_pylist() == list(range(3000))
    assert table.column("score").to_pylist() == [None] * 2999 + [0.5]
    assert table.column("late").to_pylist()[-2:] == [None, [1]]


def test_values_are_exact(tmp_path: Path) -> None:
    lines = [
        {"big": 2**53 + 1, "huge": 2**64 - 1, "real": 1, "date": "2020-01-01", "text": "ü\u2028🙂\u0000", "flag": True},
        {"big": -(2**63), "huge": 0, "real": 0.1, "date": None, "text": "None", "flag": None},
    ]
    table = read(write(tmp_path, *lines))
    assert table.to_pylist() == lines
    assert table.schema.types[:4] == [pa.int64(), pa.uint64(), pa.float64(), pa.string()]


def test_nested_values(tmp_path: Path) -> None:
    lines = [
        {"messages": [{"role": "user", "content": "hi"}], "extra": {}},
        {"messages": [], "extra": {}},
        {"messages": None, "extra": None},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
    ]
    table = read(write(tmp_path, *lines))
    assert table.column("messages").to_pylist() == [
        [{"role": "user", "content": "hi", "tool_calls": None}],
        [],
        None,
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
    ]
    assert [value is None for value in table.column("extra").to_pylist()] == [False, False, True, True]


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    path = write(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}', b"", b"  \r", b'{"prompt": "b"}\r')
    assert read(path).column("prompt").to_pylist() == ["a", "b"]


def test_a_last_line_without_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.ndjson"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}')
    assert read(str(path)).num_rows == 2


def test_a_key_that_is_always_null(tmp_path: Path) -> None:
    assert read(write(tmp_path, {"prompt": "a", "x": None})).schema.field("x").type == pa.null()


BAD_LINES = [
    (b'{"prompt": "\xff"}', "not UTF-8 at byte 12 of the line"),
    (b'{"prompt": "b"', "not JSON: "),
    (b"hello", "not JSON: "),
    (b"[" * 100_000, "not JSON: "),
    (b'{"n": ' + b"1" * 5000 + b"}", "not JSON: "),
    (b'["b"]', "found an array; JSON Lines have one object per line"),
    (b'"b"', 'found "b"; JSON Lines'),
    (b"null", "found null; JSON Lines"),
    (b'{"prompt": "' + b"x" * 150_000 + b'"}', "150015 bytes; a line has at most 120000"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
@pytest.mark.parametrize("rereads", [True, False])
def test_a_bad_line_is_a_row_error(
    tmp_path: Path, line: bytes, message: str, rereads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "_MAX_LINE_BYTES", 120_000)
    monkeypatch.setattr(json_lines, "_MARK_ROWS", 2)
    monkeypatch.setattr(jsonl, "_REREAD_LINE_BYTES", 0 if rereads else 10**9)
    first = {"prompt": "a", "n": 2**53 + 1}
    source = open_source(write(tmp_path, first, line, {"prompt": "c"}))
    assert (source.num_rows, list(source.row_errors)) == (3, [1])
    assert source.row_errors[1].startswith(f"{tmp_path}/a.jsonl, line 2: {message}")
    expected = [first, {"prompt": None, "n": None}, {"prompt": "c", "n": None}]
    assert pa.concat_tables(source.windows(2)).to_pylist() == expected
    assert pa.concat_tables(source.read_rows(1)).to_pylist() == expected[1:]
    (window,) = input_windows(source, columns=["prompt"])
    assert window.table.to_pylist() == [{"prompt": row["prompt"]} for row in expected]
    assert pa.concat_tables(window.full()).to_pylist() == expected


def test_text_that_is_not_unicode_costs_only_its_own_value(tmp_path: Path) -> None:
    lines = (b'{"id": 1, "prompt": "\\ud83d\\ude42"}', b'{"id": 2, "prompt": "\\ud83d"}', b'{"id": 3, "\\uD83D": 1}')
    source = open_source(write(tmp_path, *lines, {"id": 4}))
    assert pa.concat_tables(source.windows()).to_pylist() == [
        {"id": 1, "prompt": "🙂"},
        {"id": 2, "prompt": None},
        {"id": 3, "prompt": None},
        {"id": 4, "prompt": None},
    ]
    assert source.row_errors == {
        1: f"{tmp_path}/a.jsonl, line 2: 'prompt' holds half of a surrogate pair: not valid text",
        2: f"{tmp_path}/a.jsonl, line 3: '\\ud83d' holds half of a surrogate pair: not valid text",
    }


def test_a_file_of_mostly_bad_lines_is_no_json_lines(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"is not JSON Lines, one object per line: 2 of 3 lines have none; .*, line 1: "
    ):
        open_source(write(tmp_path, b"[", b'{"prompt": "a"}', b"]"))
    with pytest.raises(InputError, match=r"a\.jsonl is not JSON Lines, one object per line: .*, line 1: not JSON"):
        open_source(write(tmp_path, *[b"id,prompt"] * 1200, {"prompt": "late"}))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": 2}', r"a\.jsonl, line 2: 'prompt' is a number here and a string in line 1"),
        (b'{"n": 1.5}', r"line 2: 'n' mixes fractions with whole numbers beyond 2\^53"),
        (b'{"n": 18446744073709551616}', r"line 2: 'n' needs more than 64 bits \(18446744073709551616\)"),
        (b'{"n": -9223372036854775809}', r"line 2: 'n' needs more than 64 bits"),
        (b'{"m": [{"content": ["x"]}]}', r"line 2: 'm\[\]\.content' is a list here and a string in line 1"),
    ],
)
def test_values_without_a_common_type_are_refused(tmp_path: Path, line: bytes, message: str) -> None:
    first = {"prompt": "a", "n": 2**53 + 1, "m": [{"content": "x"}]}
    path = write(tmp_path, first, line, {"prompt": "c"})
    with pytest.raises(InputError, match=message):
        open_source(path)
    assert read(path, limit=1).to_pylist() == [first]


def test_a_long_line_is_read(tmp_path: Path) -> None:
    text = "word " * 2_000_000
    assert read(write(tmp_path, {"prompt": text}, {"prompt": "b"})).column("prompt").to_pylist() == [text, "b"]


@pytest.mark.parametrize("start", [0, 1, 4, 5, 6, 11, 12])
@pytest.mark.parametrize("limit", [None, 12])
def test_reading_begins_at_any_row(
    tmp_path: Path, start: int, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "_MARK_ROWS", 4)
    write(tmp_path, *[x for i in range(6) for x in ({"i": i, "t": "é" * i}, b"  ")], name="1.jsonl")
    write(tmp_path, *({"i": i, "t": None} for i in range(6, 9)), name="2.jsonl")
    write(tmp_path, *({"i": i} for i in range(9, 14)), name="3.jsonl")
    source = open_source(f"{tmp_path}/*.jsonl", limit=limit)
    numbers = list(range(limit or 14))[start:]
    tables = list(source.windows(3, columns=["i"], start=start))
    assert [i for table in tables for i in table.column("i").to_pylist()] == numbers
    assert all(table.column_names == ["i"] for table in tables)
    rows = [row for table in source.read_rows(start, 2) for row in table.to_pylist()]
    assert rows == [{"i": i, "t": "é" * i if i < 6 else None} for i in numbers[:2]]


def test_an_object_with_a_key_for_every_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'counts' have more than 1000 different keys"):
        open_source(write(tmp_path, *({"counts": {f"k{i}": 1}} for i in range(1001))))


def test_no_rows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.jsonl has no rows"):
        open_source(write(tmp_path))
    with pytest.raises(InputError, match="no columns: every line is an empty object"):
        open_source(write(tmp_path, {}, {}))
    with pytest.raises(InputError, match=r"b\.jsonl does not exist"):
        open_source(str(tmp_path / "b.jsonl"))


def test_a_glob_of_files(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": "b"}, name="2.jsonl")
    write(tmp_path, {"prompt": "a", "id": 1}, name="1.jsonl")
    assert read(f"{tmp_path}/*.jsonl").to_pylist() == [{"prompt": "a", "id": 1}, {"prompt": "b", "id": None}]
    (tmp_path / "3.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"mixes formats: .*1\.jsonl is JSON Lines and .*3\.parquet is not"):
        open_source(f"{tmp_path}/*")


def test_json_lines_without_the_usual_ending(tmp_path: Path) -> None:
    assert read(write(tmp_path, {"prompt": "a"}, name="data.txt")).num_rows == 1


def test_a_file_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, {"n": 1}, {"n": 2}))
    write(tmp_path, {"n": 1}, {"n": "other"})
    with pytest.raises(InputError, match=r"a\.jsonl changed since it was opened"):
        list(source.windows())
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(InputError, match=r"cannot read .*a\.jsonl: No such file"):
        list(source.windows())
