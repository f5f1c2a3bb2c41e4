"""Right and wrong answers, by every way of matching, and over samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.errors import InputError
from batchinfer.evals import EvalOptions, compare
from batchinfer.evals.metrics.matching import choice_letter, last_number, make_match, valid_json
from batchinfer.evals.metrics.texts import normalize_answer, words
from batchinfer.evals.stats.samples import pass_at_k


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 1,234.50.", "1234.5"),
        ("x = -3", "-3"),
        ("10-5", "5"),
        ("#### 72", "72"),
        ("first 5, then 3.", "3"),
        ("$1,000,000", "1000000"),
        ("(\u22124)", "-4"),
        ("1e-3", "0.001"),
        ("costs .5", "0.5"),
        ("50%", "50"),
        ("none", None),
        ("", None),
        ("1e999", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        (" (C)", "C"),
        ("B) a cat", "B"),
        ("**D**", "D"),
        ("The answer is (B).", "B"),
        ("Answer: d", "D"),
        ("the correct option is C, not D", "C"),
        ("I would take (A)", "A"),
        ("First I thought (A), then (C)", "C"),
        ("C\nbecause it fits", "C"),
        ("A cat sat on the mat", None),
        ("I think so", None),
        ("Because of X", None),
    ],
)
def test_choice_letter(text: str, letter: str | None) -> None:
    assert choice_letter(text) == letter


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ('{"a": [1, 2.5, null]}', True),
        (" 3 ", True),
        ("{'a': 1}", False),
        ('{"a": NaN}', False),
        ('```json\n{"a": 1}\n```', False),
        ("", False),
        ("[" * 100_000, False),
    ],
)
def test_json_validity(text: str, is_valid: bool) -> None:
    assert (valid_json(text) is not None) == is_valid


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("The Cat!", "cat"),
        ("  an   apple,  a pear ", "apple pear"),
        ("\uff21\uff22\uff23", "abc"),
        ("3.5 km", "3.5 KM."),
    ],
)
def test_normalized_texts_agree(a: str, b: str) -> None:
    assert normalize_answer(a) == normalize_answer(b)


def test_normalizing_keeps_what_tells_answers_apart() -> None:
    assert normalize_answer("1.5") != normalize_answer("15")
    assert normalize_answer("!") == "!"
    assert normalize_answer("the") == "the"


def test_words_split_chinese_and_japanese_by_character() -> None:
    assert words("It's 汉字, ok") == ["it", "'", "s", "汉", "字", ",", "ok"]


@pytest.mark.parametrize(
    ("match", "pattern", "output", "reference", "is_correct"),
    [
        ("exact", None, " yes\n", "yes", True),
        ("exact", None, "Yes", "yes", False),
        ("normalized", None, "The Yes.", "yes", True),
        ("numeric", None, "so 7 + 5 = 12", "#### 12", True),
        ("numeric", None, "twelve", "12", False),
        ("choice", None, "The answer is (B)", "(B)", True),
        ("choice", None, "no idea", "B", False),
        ("json", None, "[1]", None, True),
        ("regex", r"#### (\d+)", "#### 1 then #### 2", "2", True),
        ("regex", r"#### (\d+)", "#### 2", "text #### 2", True),
        ("regex", r"#### (\d+)", "2", "2", False),
        ("regex", r"\d+", "a 5", "5", True),
        (None, r"\d+", "a 5", "5", True),
    ],
)
def test_ways_of_matching(match, pattern, output: str, reference: str | None, is_correct: bool) -> None:
    assert make_match(match, pattern).is_correct(output, reference) == is_correct


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"match": "fuzzy"}, "there are exact, normalized, numeric, choice, json, regex"),
        ({"match": "regex"}, "--match regex needs --pattern"),
        ({"match": "exact", "pattern": "x"}, "--match exact takes no --pattern"),
        ({"pattern": "("}, "is not a regular expression"),
        ({"ks": (0,)}, "--k must be at least 1, got 0"),
        ({"function": "nofile.py:f"}, "there is no file nofile.py"),
        ({"function": "f"}, "write FILE.py:function"),
    ],
)
def test_impossible_options_are_refused_before_any_work(make_run, options: dict, message: str) -> None:
    run = make_run(["a"], {"id": [1], "reference": ["a"]})
    with pytest.raises(InputError, match=message):
        compare(run, run, metrics=["accuracy"], options=EvalOptions(**options))


def accuracy(make_run, before: list, after: list, references: list | None, **options):
    inputs = {"id": list(range(len(before)))} | ({"reference": references} if references else {})
    return compare(
        make_run(before, inputs), make_run(after, inputs), metrics=["accuracy"], options=EvalOptions(**options)
    )


def test_rows_without_a_usable_reference_are_null_with_the_reason(make_run) -> None:
    result = accuracy(make_run, ["1", "2", "3"], ["1", "2", "3"], ["1", None, "none"], match="numeric")
    metric = result.metric("accuracy")
    assert metric.n == 1
    assert metric.num_null_before == {"no reference": 1, "the reference has no answer of kind 'numeric'": 1}


def test_an_empty_output_is_wrong_and_not_null(make_run) -> None:
    metric = accuracy(make_run, ["", "b"], ["a", ""], ["a", "b"]).metric("accuracy")
    assert (metric.n, metric.wins, metric.losses) == (2, 1, 1)


@pytest.fixture
def score_file(tmp_path: Path) -> Path:
    path = tmp_path / "score.py"
    path.write_text(
        "def length(output, reference, row):\n    return len(output) / row['size']\n"
        "def is_long(output, reference, row):\n    return len(output) > 3\n"
        "def picky(output, reference, row):\n"
        "    if output == 'bad':\n        raise KeyError('no')\n"
        "    return {'none': None, 'text': 'x', 'nan': float('nan')}.get(output, True)\n",
        encoding="utf-8",
    )
    return path


def of_function(make_run, path: Path, name: str, texts: list[str]):
    inputs = {"id": list(range(len(texts))), "size": [2] * len(texts)}
    run = make_run(texts, inputs)
    return compare(run, run, metrics=["accuracy"], options=EvalOptions(function=f"{path}:{name}")).metric("accuracy")


def test_a_function_may_give_numbers_and_reads_the_row(make_run, score_file: Path) -> None:
    metric = of_function(make_run, score_file, "length", ["ab", "abcd"])
    assert metric.spec.kind == "continuous"
    assert metric.before.mean == pytest.approx(1.5)


def test_a_function_may_judge(make_run, score_file: Path) -> None:
    metric = of_function(make_run, score_file, "is_long", ["ab", "abcd"])
    assert metric.spec.kind == "binary"
    assert metric.before.mean == pytest.approx(0.5)


def test_a_function_that_fails_on_a_row_is_that_rows_null(make_run, score_file: Path) -> None:
    metric = of_function(make_run, score_file, "picky", ["fine", "bad", "none", "text", "nan"])
    assert metric.n == 1
    assert metric.num_null_before == {
        "the function raised KeyError: 'no'": 1,
        "the function returned None": 1,
        "the function returned 'x', not a number": 1,
        "the function returned nan, not a number": 1,
    }


def test_reasons_of_a_function_that_always_fails_are_few_and_short(make_run, tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text("def f(output, reference, row):\n    raise ValueError(output * 1000)\n", encoding="utf-8")
    metric = of_function(make_run, path, "f", [f"text {i}" for i in range(50)])
    assert len(metric.num_null_before) == 21
    assert metric.num_null_before["other reasons"] == 30
    assert max(map(len, metric.num_null_before)) < 300


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [("x = 1", "f", "defines no function 'f'"), ("x =", "f", "fails: SyntaxError"), ("1/0", "f", "ZeroDivisionError")],
)
def test_files_without_the_function_are_refused(make_run, tmp_path, content: str, name: str, message: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        of_function(make_run, path, name, ["a"])


def test_pass_and_majority_over_samples(make_run) -> None:
    before = [["7", "7", "8", "9"], ["1", "2", "3", "4"]]
    after = [["7", "7", "7", "7"], ["5", "5", "4", "4"]]
    result = accuracy(make_run, before, after, ["7", "5"])
    values = {metric.name: (metric.before.mean, metric.after.mean) for metric in result.metrics}
    assert values["accuracy"] == (pytest.approx(2 / 8), pytest.approx(6 / 8))
    assert values["pass@2"] == (
        pytest.approx((pass_at_k(4, 2, 2) + 0) / 2),
        pytest.approx((1 + pass_at_k(4, 2, 2)) / 2),
    )
    assert values["pass@4"] == (pytest.approx(0.5), pytest.approx(1.0))
    assert values["maj@4"] == (pytest.approx(0.5), pytest.approx(0.75))  # 5, 5, 4, 4 is a tie
    assert "maj@2" not in values  # of two answers one is drawn: accuracy again
    assert result.metric("pass@2").n == 2
    assert result.rows.column("pass@2.before").to_pylist() == [
        pytest.approx(pass_at_k(4, 2, 2)), None, None, None, 0.0, None, None, None,
    ]  # fmt: skip


def test_ks_may_be_chosen_and_prompts_with_fewer_samples_are_null(make_run) -> None:
    samples = [["7", "7", "8"], ["1"]]
    result = accuracy(make_run, samples, samples, ["7", "5"], ks=(1, 3))
    assert [metric.name for metric in result.metrics] == ["accuracy", "pass@1", "pass@3", "maj@3"]
    assert result.metric("pass@1").n == 2
    assert result.metric("pass@3").n == 1
    assert result.metric("pass@3").num_null_after == {"fewer than 3 samples with a value": 1}


def test_json_needs_no_reference_and_has_no_majority(make_run) -> None:
    result = accuracy(make_run, [["{}", "x", "y"]], [["{}", "[]", "1"]], None, match="json")
    assert [metric.name for metric in result.metrics] == ["accuracy", "pass@2", "pass@3"]
    assert result.metric("accuracy").after.mean == 1.0
