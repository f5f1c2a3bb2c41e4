"""Word diffs and excerpts, and how numbers are written."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup

from batchinfer.evals.report.numbers import NumberFormat, figure, p_value, table_cells
from batchinfer.evals.report.text import Diff, diff_texts, excerpt, one_line, visible
from batchinfer.evals.result import Estimate, Table


def html(diff: Diff) -> tuple[str, str]:
    assert diff.before is not None
    assert diff.after is not None
    return diff.before.html, diff.after.html


def test_words_that_the_other_side_lacks_are_marked() -> None:
    before, after = html(diff_texts("the cat sat, there", "the dog sat there", 100))
    assert before == "the <del>cat</del> sat<del>,</del> there"
    assert after == "the <ins>dog</ins> sat there"


def test_cjk_characters_are_words() -> None:
    assert html(diff_texts("我喜欢茶和米", "我喜欢水和米", 100)) == (
        "我喜欢<del>茶</del>和米",
        "我喜欢<ins>水</ins>和米",
    )


def test_texts_with_nothing_in_common_have_no_marks() -> None:
    diff = diff_texts("one two three", "<b>", 100)
    assert diff.is_unlike
    assert html(diff) == ("one two three", "&lt;b&gt;")


def test_an_empty_or_missing_side() -> None:
    assert html(diff_texts("", "new", 100)) == ("", "<ins>new</ins>")
    diff = diff_texts(None, "new", 100)
    assert diff.before is None
    assert diff.after is not None
    assert diff.after.html == "new"


def test_long_texts_are_shown_from_where_they_part() -> None:
    same = "word " * 1_000
    diff = diff_texts(f"{same}left {same}", f"{same}right", 500)
    assert diff.before is not None
    assert diff.after is not None
    assert diff.before.num_left_out_before == diff.after.num_left_out_before == 5_000 - 200
    assert diff.before.num_left_out_after == 10_005 - 4_800 - 500
    assert diff.after.num_left_out_after == 0
    assert "<ins>right</ins>" in diff.after.html


texts = st.text(st.sampled_from("ab <&>\"'\n\t汉\x00\u202e\ud800é🙂"), max_size=60)


@given(texts, texts, st.integers(1, 80))
@settings(max_examples=200, deadline=None)
def test_excerpts_without_marks_are_the_texts(before: str, after: str, max_length: int) -> None:
    diff = diff_texts(before, after, max_length)
    for text, shown, element in ((before, diff.before, "del"), (after, diff.after, "ins")):
        assert shown is not None
        start = shown.num_left_out_before
        plain = Markup(re.sub(f"</?{element}>", "", shown.html)).unescape()
        assert plain == visible(text)[start : start + max_length]
        assert len(plain) + start + shown.num_left_out_after == len(visible(text))


def test_excerpt_of_the_end() -> None:
    shown = excerpt("0123456789", 4, from_end=True)
    assert (shown.html, shown.num_left_out_before, shown.num_left_out_after) == ("6789", 6, 0)


def test_visible_keeps_what_scripts_and_emoji_need() -> None:
    kept = "line\n\ttab é 汉 👩\u200d💻 नमस्ते"
    assert visible(kept) == kept
    assert visible("a\rb\x7f\x85\u200b\u2028") == "a␍b\\x7f\\x85\\u200b\\u2028"
    assert one_line(" a \n b ") == "a b"
    assert one_line("x" * 100, 10) == "x" * 6 + "…" + "x" * 3


@pytest.mark.parametrize(
    ("unit", "estimate", "expected"),
    [
        ("share", Estimate(-0.041, -0.0623, -0.0231), ("−4.1", "[−6.2, −2.3]", "points")),
        ("tokens", Estimate(120.4, 80.2, 161.7), ("+120", "[+80, +162]", "tokens")),
        ("nats/token", Estimate(0.00123, 0.0004, 0.0021), ("+0.00123", "[+0.00040, +0.00210]", "nats/token")),
        ("cosine", Estimate(-0.00001, -0.02, 0.02), ("0.000", "[−0.020, +0.020]", "cosine")),
        ("tokens", Estimate(3.14159), ("+3.142", "", "tokens")),
        ("share", Estimate(0.0, 0.0, 0.0), ("0.0", "[0.0, 0.0]", "points")),
    ],
)
def test_as_many_digits_as_the_interval_supports(unit: str, estimate: Estimate, expected: tuple[str, ...]) -> None:
    form = NumberFormat.of(unit, estimate)
    written = form.signed(estimate.mean), form.interval(estimate, is_signed=True), form.difference_unit
    assert written == expected


def test_figures_and_p_values() -> None:
    assert [figure(x) for x in (None, 1.0, 0.0, 1234.5, 0.12345, -math.inf, math.nan, 1e15, 1e-9)] == [
        "–", "1", "0", "1,234", "0.1235", "−∞", "–", "1e+15", "1e−09",
    ]  # fmt: skip
    assert [p_value(p) for p in (None, 0.5, 0.00123, 0.00001)] == ["–", "0.500", "0.0012", "<\u2009.0001"]


def test_cells_of_a_column_have_equally_many_decimals() -> None:
    rows = (("a", 3.21, 7, True), ("b", 11.2, None, False), ("c", math.inf, 1_000, None))
    table = Table("t", "T", ("name", "x", "n", "is"), rows)
    assert table_cells(table) == [
        ["a", "3.21", "7", "yes"],
        ["b", "11.20", "–", "no"],
        ["c", "∞", "1,000", "–"],
    ]
    assert table_cells(Table("t", "T", ("a",), ())) == []
