"""What a comparison leaves behind: strict JSON, every figure of every row, a plain table."""

from __future__ import annotations

import json
import math
from dataclasses import fields

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import InputError
from batchinfer.evals import MetricScores, MetricSpec, Needs, RowValues, Scores, compare, write_comparison
from batchinfer.evals.output import check_folder
from batchinfer.evals.result import ComparisonResult, Curve, Series, Table
from batchinfer.evals.terminal import render


class Wild:
    """Figures that JSON has no words for."""

    name = "wild"
    title = "Wild"
    needs = Needs()
    metric_names = ("nll", "gap")

    def why_not(self, pairs, context) -> str | None:
        return None

    def score(self, pairs, context) -> Scores:
        n = len(pairs)
        before = RowValues.of([1.0] * (n - 2) + [-math.inf, math.nan])
        spec = MetricSpec("nll", "NLL", "nats", "continuous", higher_is_better=False)
        gap = MetricSpec("gap", "Gap", "", "continuous", higher_is_better=None)
        return Scores(
            (
                MetricScores(spec, before=before, after=RowValues.of([2.0] * n)),
                MetricScores(gap, between=RowValues.of(["nothing to measure"] * n)),
            ),
            tables=(Table("t", "T", ("a", "b"), (("x", math.nan), ("y", math.inf))),),
            curves=(Curve("c", "C", "x", "y", (Series("s", (0.0, 1.0), (math.nan, 1.0)),)),),
        )


def refuse(name: str) -> None:
    raise AssertionError(f"{name} in JSON")


@pytest.fixture
def result(make_run) -> ComparisonResult:
    run = make_run([f"text {i}" for i in range(12)])
    return compare(run, run, metrics=[Wild(), "length"], gates=["nll<=0"])


def test_report_json_is_strict_and_says_where_numbers_are_missing(result: ComparisonResult, tmp_path) -> None:
    paths = write_comparison(result, tmp_path / "new")
    assert {path.name for path in paths} >= {"report.json", "rows.parquet"}
    report = json.loads((tmp_path / "new" / "report.json").read_text(encoding="utf-8"), parse_constant=refuse)
    nll, gap = report["metrics"][:2]
    assert nll["before"] == {"mean": None, "low": None, "high": None}
    assert nll["reason"] == "1 rows have an infinite value, so there is no mean"
    assert nll["num_null_before"] == {"not a number": 1}
    assert gap["reason"].endswith("no row has a value on both sides")
    assert {"path": "tables[0].rows[0][1]", "value": "nan"} in report["non_finite"]
    assert {"path": "tables[0].rows[1][1]", "value": "inf"} in report["non_finite"]
    assert {"path": "curves[0].series[0].y[0]", "value": "nan"} in report["non_finite"]
    assert report["gates"][0] == {
        "text": "nll<=0", "metric": "nll", "passed": False, "bound": None,
        "reason": "1 rows have an infinite value, so there is no mean",
    }  # fmt: skip


def test_report_json_has_every_field_but_the_rows(result: ComparisonResult) -> None:
    expected = {field.name for field in fields(ComparisonResult)} - {"rows"} | {"schema_version", "non_finite"}
    assert set(result.to_dict()) == expected


def test_rows_parquet_keeps_infinite_figures_and_reasons(result: ComparisonResult, tmp_path) -> None:
    write_comparison(result, tmp_path)
    rows = pq.read_table(tmp_path / "rows.parquet")
    assert rows.num_rows == 12
    assert rows.column("nll.before").to_pylist()[-2:] == [-math.inf, None]
    assert rows.column("nll.difference").to_pylist()[-2:] == [math.inf, None]
    assert rows.column("nll.null_reason").to_pylist()[-2:] == [None, "before: not a number"]
    assert set(rows.column("gap.null_reason").to_pylist()) == {"nothing to measure"}
    assert rows.column("before_text").to_pylist()[3] == "text 3"
    assert rows.column("output_tokens.after").to_pylist()[3] == 6.0


def test_files_are_replaced_whole_and_leave_nothing_else(result: ComparisonResult, tmp_path) -> None:
    for _ in range(2):
        write_comparison(result, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".") or path.suffix == ".tmp"]


@pytest.mark.parametrize("id_", [7, "a", None])
def test_ids_of_any_kind_come_back(make_run, tmp_path, id_) -> None:
    run = make_run(["x", "yy"], {"id": pa.array([id_, id_]), "prompt": ["p", "q"], "reference": ["x", "x"]})
    other = make_run(["z", "yy"], {"id": pa.array([id_, id_]), "prompt": ["p", "q"], "reference": ["x", "x"]})
    result = compare(run, other, metrics=["accuracy"])
    write_comparison(result, tmp_path)
    assert pq.read_table(tmp_path / "rows.parquet").column("id").to_pylist() == [id_, id_]
    (worst,) = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["worst"]["accuracy"]
    assert worst["id"] == (id_ if id_ is not None else "None")
    assert (worst["prompt"], worst["before_text"], worst["after_text"]) == ("p", "x", "z")


def test_messages_are_shown_as_a_person_reads_them(make_run) -> None:
    columns = {"input": {"columns": {"messages": "messages"}, "system": None}}
    inputs = {"messages": [[{"role": "user", "content": "hi"}]], "reference": ["a"]}
    result = compare(make_run(["a"], inputs, **columns), make_run(["b"], inputs, **columns), metrics=["accuracy"])
    assert result.worst["accuracy"][0].prompt == "user: hi"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(InputError, match="is a file: name a folder"):
        check_folder(tmp_path / "file")
    with pytest.raises(InputError, match="cannot write there"):
        check_folder(tmp_path / "file" / "below")


def test_the_table_is_plain_off_a_terminal(make_run) -> None:
    inputs = {"id": list(range(200)), "reference": ["a"] * 200}
    result = compare(
        make_run(["a"] * 200, inputs),
        make_run(["a"] * 150 + ["b"] * 50, inputs),
        metrics=["accuracy", "diversity"],
        gates=["accuracy>=-0.01"],
    )
    text = render(result, is_terminal=False)
    assert "\x1b" not in text
    assert "\r" not in text
    assert max(map(len, text.splitlines())) <= 200
    line = next(line for line in text.splitlines() if "accuracy" in line and "worse" in line)
    assert line.split()[:4] == ["accuracy", "1.0000", "0.7500", "-0.2500"]
    assert "0/150/50" in line
    assert "<0.0001" in line
    rows = [line for line in text.splitlines() if line.startswith((" accuracy", " distinct", " repetition"))]
    assert len(rows) == len(result.metrics), "no line is broken"
    assert all(row.endswith(("change", "changed", "worse", "tested")) for row in rows)
    assert "gate      accuracy>=-0.01: FAILED (bound -0.31" in text
    assert "\x1b" in render(result, is_terminal=True)


def test_missing_values_have_a_reason_each() -> None:
    with pytest.raises(AssertionError, match="every null has a reason"):
        RowValues(np.array([1.0, np.nan]), {})
    assert RowValues.of([1, True, "why", math.nan]).null_reasons == {2: "why", 3: "not a number"}
