from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.detokenizer import OutputText


class Pieces:
    """A tokenizer whose id i decodes to pieces[i]; None: a special token."""

    def __init__(self, *pieces: str | None) -> None:
        self.pieces = pieces
        self.num_ids = len(pieces)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[i] or "" for i in ids)


class Bytes:
    """Id = byte, decoded as byte-level tokenizers do."""

    num_ids = 256

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


def generated(
    pieces: Sequence[str | None], stop: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0
) -> tuple[str, str | None, int]:
    """Pushes the pieces until a stop string matches: the text, the stop string, the number of tokens."""
    output = OutputText(Pieces(*pieces), tuple(stop), include_stop)
    matched = None
    for token_id in range(len(pieces)):
        matched = output.push(token_id, check_stop=token_id + 1 >= min_tokens)
        if matched is not None:
            break
    return output.finish(), matched, len(output.token_ids)


FORCED = ["x", "E", "ND", "y"]


class TestForcedPieces:
    def test_stop_over_two_tokens(self) -> None:
        assert generated(FORCED, ["END"]) == ("x", "END", 3)

    def test_stop_that_ends_inside_a_token(self) -> None:
        assert generated(FORCED, ["EN"]) == ("x", "EN", 3)

    def test_stop_is_kept_when_asked_for(self) -> None:
        assert generated(FORCED, ["END"], include_stop=True) == ("xEND", "END", 3)
        assert generated(FORCED, ["EN"], include_stop=True) == ("xEN", "EN", 3)

    @pytest.mark.parametrize("stop", [["ND", "E"], ["E", "ND"], ["y", "E"]])
    def test_the_earliest_of_two_wins(self, stop: list[str]) -> None:
        assert generated(FORCED, stop) == ("x", "E", 2)

    @pytest.mark.parametrize("stop", [["D", "END", "ND"], ["END", "ND", "D"], ["ND", "D", "END"]])
    def test_of_those_that_end_together_the_longest_wins(self, stop: list[str]) -> None:
        assert generated(FORCED, stop) == ("x", "END", 3)

    def test_of_two_in_one_token_the_first_complete_wins(self) -> None:
        assert generated(["abcdef"], ["bcde", "cd", "f"]) == ("ab", "cd", 1)
        assert generated(list("abcdef"), ["bcde", "cd", "f"]) == ("ab", "cd", 4)

    def test_stop_that_begins_inside_a_token_and_a_beginning_that_comes_to_nothing(self) -> None:
        assert generated(["aE", "NE", "ND", "z"], ["END"]) == ("aEN", "END", 3)

    def test_no_stop(self) -> None:
        assert generated(FORCED, ["Nd", "xx"]) == ("xENDy", None, 4)

    def test_a_beginning_of_a_stop_string_at_the_end_is_flushed(self) -> None:
        assert generated(FORCED, ["yes", "END."]) == ("xENDy", None, 4)

    def test_special_tokens_inside_a_stop_string_do_not_part_it(self) -> None:
        assert generated(["x", "E", None, None, "ND", "y"], ["END"]) == ("x", "END", 5)

    def test_the_prompt_is_not_searched(self) -> None:
        # The output object never sees the prompt: "…E" before it and "ND" in it are no "END".
        assert generated(["ND", "y"], ["END"]) == ("NDy", None, 2)

    def test_nothing_can_follow_a_match(self) -> None:
        output = OutputText(Pieces(*FORCED), ("x",), False)
        assert output.push(0) == "x"
        with pytest.raises(AssertionError):
            output.push(1)

    def test_stop_is_the_whole_text(self) -> None:
        assert generated(["END"], ["END"]) == ("", "END", 1)


class TestMinTokens:
    def test_a_stop_string_complete_before_is_never_honoured(self) -> None:
        assert generated([*FORCED, "z"], ["END"], min_tokens=4) == ("xENDyz", None, 5)
        assert generated([*FORCED, "END"], ["END"], min_tokens=4) == ("xENDy", "END", 5)

    def test_one_that_ends_at_min_tokens_or_later_is(self) -> None:
        assert generated(FORCED, ["END"], min_tokens=3) == ("x", "END", 3)
        assert generated(["x", "E", "N", "D"], ["END"], min_tokens=3) == ("x", "END", 4)

    def test_overlap_with_one_that_is_not_honoured(self) -> None:
        assert generated(["a", "b", "a", "b", "a"], ["aba"], min_tokens=4) == ("ab", "aba", 5)

    def test_one_token_that_ends_the_unhonoured_and_holds_another(self) -> None:
        assert generated(["xEND", "yEND"], ["END"], min_tokens=2) == ("xENDy", "END", 2)

    def test_a_character_begun_before_and_completed_after(self) -> None:
        output = OutputText(Bytes(), ("é",), False)
        first, second = "é".encode()
        assert output.push(ord("a"), check_stop=False) is None
        assert output.push(first, check_stop=False) is None
        assert output.push(second) == "é"
        assert output.finish() == "a"


class TestUnfinishedCharacters:
    def test_a_stop_before_an_unfinished_character_in_the_same_token(self) -> None:
        class Merged(Bytes):
            def decode(self, ids: Sequence[int]) -> str:
                return b"".join(b"!\xc3" if i == 0 else bytes([i]) for i in ids).decode("utf-8", "replace")

        output = OutputText(Merged(), ("!",), False)
        assert output.push(ord("a")) is None
        assert output.push(0) == "!"  # not only once the character is complete
        assert output.finish() == "a"

    def test_a_stop_of_split_characters(self) -> None:
        output = OutputText(Bytes(), ("汉字",), False)
        ids = list("x汉字".encode())
        assert [output.push(i) for i in ids] == [None] * 6 + ["汉字"]
        assert output.finish() == "x"

    def test_held_bytes_are_in_the_final_text(self) -> None:
        output = OutputText(Bytes(), ("stop",), False)
        for byte in "é🙂".encode()[:-1]:
            assert output.push(byte) is None
        assert output.finish() == "é\ufffd"


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 6),
    include_stop=st.booleans(),
)
def test_equals_a_search_character_by_character(
    pieces: list[str], stop: list[str], min_tokens: int, include_stop: bool
) -> None:
    text = "".join(pieces)
    exempt = len("".join(pieces[: max(0, min_tokens - 1)]))
    expected = (text, None, len(pieces))
    for end in range(exempt + 1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            num_tokens = next(n for n in range(len(pieces) + 1) if len("".join(pieces[:n])) >= end)
            expected = (text[:end] if include_stop else text[: end - len(longest)], longest, num_tokens)
            break
    assert generated(pieces, stop, include_stop=include_stop, min_tokens=min_tokens) == expected
