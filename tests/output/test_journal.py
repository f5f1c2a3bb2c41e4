"""The journal of a window: exact values, and a torn end that is known for what it is."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.output import journal as journal_module
from batchinfer.output.durable import OutputError
from batchinfer.output.journal import JournalWriter, journal_schema, read_journal, to_batch
from batchinfer.output.journaled import JournaledResults
from batchinfer.output.schema import result_fields
from batchinfer.types import Completion, ErrorCode, FinishReason, RowError

FIELDS = result_fields([], logprobs=True, top_logprobs=True, prompt_logprobs=True, prefix="p_")
SCHEMA = journal_schema(FIELDS, {"job": "j", "window": 3})


def completion(row: int, sample: int = 0, **changes: Any) -> Completion:
    values = {
        "token_ids": [row, 2**31 - 1],
        "text": f"row {row} 🙂",
        "finish_reason": FinishReason.LENGTH,
        "num_prompt_tokens": 5,
        "num_cached_tokens": 3,
        "logprobs": [-0.1, float(np.float32(-1e-40))],
        "top_logprobs": [[(1, -0.5), (2, float("-inf"))], []],
        "prompt_logprobs": [None, -2.0],
    }
    return Completion(row_index=row, sample_index=sample, **(values | changes))


def write(path: Path, *batches: list[Completion]) -> None:
    writer = JournalWriter(path, SCHEMA)
    for batch in batches:
        writer.append(to_batch(batch, [2] * len(batch), SCHEMA))
    writer.close()


def pairs(path: Path) -> list[tuple[int, int]]:
    results = JournaledResults(read_journal(path).batches)
    return list(zip(results.rows.tolist(), results.samples.tolist(), strict=True))


def test_every_value_comes_back_bit_for_bit(tmp_path: Path) -> None:
    some = [
        completion(7),
        completion(8, stop_reason="EN\0D", finish_reason=FinishReason.STOP, text=""),
        completion(9, stop_reason=5, token_ids=[], logprobs=[], top_logprobs=None, prompt_logprobs=None),
        Completion(10, 1, error=RowError(ErrorCode.NEVER_FITS, 'too "long"\n'), num_prompt_tokens=9),
    ]
    write(tmp_path / "j", some)
    found = read_journal(tmp_path / "j")
    assert found.about == {"job": "j", "window": 3}
    assert found.num_torn_bytes == 0
    (batch,) = found.batches
    assert batch.equals(to_batch(some, [2] * 4, SCHEMA))
    assert batch.schema.names[2:] == [field.name.removeprefix("p_") for field in FIELDS]
    logprobs = batch.column("logprobs").values.to_numpy()
    assert logprobs.view(np.uint32).tolist() == np.array([-0.1, -1e-40] * 2, np.float32).view(np.uint32).tolist()


@pytest.fixture(scope="module")
def bytes_of_three(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("journal") / "j"
    write(path, [completion(0), completion(1)], [completion(2)], [completion(3, 1)])
    return path.read_bytes()


def test_a_journal_cut_anywhere_keeps_its_whole_frames(tmp_path: Path, bytes_of_three: bytes) -> None:
    ends = _ends(bytes_of_three)
    known = [[], [], [(0, 0), (1, 0)], [(0, 0), (1, 0), (2, 0)], [(0, 0), (1, 0), (2, 0), (3, 1)]]
    path = tmp_path / "j"
    for length in {
        0,
        1,
        15,
        *ends,
        *(end - 1 for end in ends),
        *(end + 1 for end in ends[:-1]),
        *range(20, ends[-1], 97),
    }:
        path.write_bytes(bytes_of_three[:length])
        num_whole = sum(end <= length for end in ends)
        assert pairs(path) == known[num_whole]
        found = read_journal(path)
        assert found.num_bytes == (ends[num_whole - 1] if num_whole else 0)
        assert found.num_bytes + found.num_torn_bytes == length


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_no_flipped_bit_is_taken_for_a_result(
    tmp_path_factory: Any, bytes_of_three: bytes, place: int, bit: int
) -> None:
    data = bytearray(bytes_of_three)
    place %= len(data)
    data[place] ^= 1 << bit
    path = tmp_path_factory.mktemp("flipped") / "j"
    path.write_bytes(data)
    found = read_journal(path)
    assert found.num_bytes <= place
    whole = [end for end in _ends(bytes_of_three) if end <= place]
    assert found.num_bytes == (whole[-1] if whole else 0)


def test_a_hole_of_zeros_is_a_torn_end(tmp_path: Path, bytes_of_three: bytes) -> None:
    """What a file system may leave behind a power cut: the length is there and the bytes are not."""
    ends = _ends(bytes_of_three)
    (tmp_path / "j").write_bytes(bytes_of_three[: ends[1]] + bytes(ends[-1] - ends[1]))
    assert pairs(tmp_path / "j") == [(0, 0), (1, 0)]


def test_a_broken_off_write_is_repeated_at_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JournalWriter(tmp_path / "j", SCHEMA)
    writer.append(to_batch([completion(0)], [2], SCHEMA))

    def fail(file: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "fsync", fail)
        with pytest.raises(OutputError, match="No space left on device") as caught:
            writer.append(to_batch([completion(1)], [2], SCHEMA))
    assert caught.value.is_no_room
    writer.append(to_batch([completion(1), completion(2)], [2, 2], SCHEMA))
    writer.close()
    assert pairs(tmp_path / "j") == [(0, 0), (1, 0), (2, 0)]
    assert read_journal(tmp_path / "j").num_torn_bytes == 0


def test_a_journal_goes_on_behind_its_good_part(tmp_path: Path, bytes_of_three: bytes) -> None:
    path = tmp_path / "j"
    path.write_bytes(bytes_of_three[:-5])
    good = read_journal(path).num_bytes
    writer = JournalWriter(path, SCHEMA, good)
    writer.append(to_batch([completion(3, 0)], [2], SCHEMA))
    writer.close()
    assert pairs(path) == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_results_are_by_row_and_sample_and_counted_once(tmp_path: Path) -> None:
    write(
        tmp_path / "j",
        [completion(2, 1), completion(0, 0, finish_reason=FinishReason.STOP)],
        [completion(2, 0), completion(2, 1)],
        [completion(0, 1, error=RowError(ErrorCode.NON_FINITE_LOGITS, "nan")), completion(1, 1)],
    )
    results = JournaledResults(read_journal(tmp_path / "j").batches)
    assert pairs(tmp_path / "j") == [(0, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert results.complete_rows.tolist() == [0, 2]
    texts, ids = results.take(1, 5, ["output", "output_token_ids"])
    assert texts.to_pylist() == [None, "row 1 🙂", "row 2 🙂", "row 2 🙂"]
    assert ids.type == pa.list_(pa.int32())
    assert ids.to_pylist()[1:] == [[1, 2**31 - 1], [2, 2**31 - 1], [2, 2**31 - 1]]
    counts = results.counts()
    assert (counts.num_rows, counts.num_completions, counts.num_output_tokens) == (2, 4, 6)
    assert (counts.num_rows_truncated, counts.failed_by_code) == (1, {"non_finite_logits": 1})
    assert len(results.num_bytes()) == 5
    assert min(results.num_bytes()) > 64


def _ends(data: bytes) -> list[int]:
    """Where the frames end."""
    ends, start = [], 0
    while start < len(data):
        start += 16 + struct.unpack_from("<Q", data, start + 8)[0]
        ends.append(start)
    return ends
