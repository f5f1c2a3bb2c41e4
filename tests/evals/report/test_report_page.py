"""What is on the page, what is not, and that it is one file of a bounded size."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from batchinfer.evals import MetricScores, MetricSpec, Needs, RowValues, Scores, compare, write_comparison
from batchinfer.evals.report import render_html
from batchinfer.evals.report.identities import identities
from batchinfer.evals.report.slice_tables import slice_columns
from batchinfer.evals.result import ComparisonResult, Curve, Series, Table, Verdict

SECTIONS = (
    "verdict", "metrics", "differences", "distributions", "perplexity", "drift", "slices", "rows", "tables",
    "runs", "methods",
)  # fmt: skip


def sections(page: str) -> list[str]:
    return re.findall(r'<section id="(\w+)"', page)


def text_of(page: str) -> str:
    """Without tags and style, white space made one."""
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", body).split())


def test_a_full_result_has_every_section_and_links_to_each(full_result: ComparisonResult) -> None:
    page = render_html(full_result)
    assert sections(page) == list(SECTIONS)
    for name in SECTIONS[1:]:
        assert f'<li><a href="#{name}">' in page


def test_links_lead_somewhere_and_no_id_occurs_twice(full_result: ComparisonResult) -> None:
    page = render_html(full_result)
    ids = re.findall(r'\sid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    targets = set(re.findall(r'href="#([^"]*)"|url\(#([^)"]*)\)', page))
    assert {link or url for link, url in targets} <= set(ids)


def test_the_verdict_begins_with_refusals_warnings_and_gates(full_result: ComparisonResult) -> None:
    text = text_of(render_html(full_result))
    order = [
        "1 metric worse, ",
        "✕ Refused counts are of two tokenizers (output_tokens)",
        "! Warning Sampling parameters differ: temperature",
        "✕ Gate failed accuracy&gt;=-0.01 at −0.2",
        "▼ Worse Accuracy 85 % before, 68 % after: −17 [−26, −6] points",
        "No change found",
        "Metrics Means with 95 % intervals",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_the_table_has_every_figure_of_a_metric(full_result: ComparisonResult) -> None:
    accuracy = full_result.metric("accuracy")
    row = re.search(r'<tr id="metric-accuracy">.*?</tr>', render_html(full_result), re.DOTALL)
    assert row is not None
    text = text_of(row[0])
    assert accuracy.before is not None
    assert accuracy.before.low is not None
    assert accuracy.min_detectable_effect is not None
    assert f"85 [{100 * accuracy.before.low:.0f}," in text
    assert "−17 [−26, −6]" in text
    assert f"McNemar, exact {accuracy.tests[0].p_value:.4f}" in text
    assert f"{accuracy.wins} / {accuracy.equal} / {accuracy.losses} 60 rows" in text
    assert text.endswith(f"{100 * accuracy.min_detectable_effect:.0f} 0")  # the noise floor comes last


def test_sections_are_left_out_where_there_is_nothing_to_show(make_result: Callable[..., ComparisonResult]) -> None:
    result = make_result(metrics=["accuracy"], slice_by=[], gates=[])
    page = render_html(replace(result, warnings=(), rows=None, worst={}, best={}))
    assert sections(page) == ["verdict", "metrics", "differences", "runs", "methods"]
    for left_out in ("notices", "gates", "Noise", "Derived", "Rows without a value"):
        assert f'class="{left_out}"' not in page
        assert f">{left_out}<" not in page


def test_no_pairs_are_a_page_too(make_run: Callable[..., pa.Table]) -> None:
    first, second = make_run(["a"], {"id": ["x"], "prompt": ["p"]}), make_run(["a"], {"id": ["y"], "prompt": ["q"]})
    page = render_html(compare(first, second))
    assert "<h1>Nothing to compare: no row of one run has a counterpart in the other</h1>" in page
    assert sections(page) == ["verdict", "skipped", "runs"]


def test_a_run_against_itself(make_run: Callable[..., pa.Table]) -> None:
    run = make_run(["same"] * 40)
    page = render_html(compare(run, run, metrics=["length"]))
    assert "No change found in 4 metrics" in page
    assert "no row differs" in page
    assert sections(page) == ["verdict", "metrics", "differences", "tables", "runs", "methods"]


def test_values_without_a_number_are_shown_as_such(make_run: Callable[..., pa.Table]) -> None:
    class Odd:
        name, title, needs, metric_names = "odd", "Odd", Needs(), ("nll", "flat", "all_null")

        def why_not(self, pairs, context) -> None:
            return None

        def score(self, pairs, context) -> Scores:
            num = len(pairs)
            values = np.linspace(1, 2, num)
            infinite = RowValues.of([*values[:-1], math.inf])
            nothing = RowValues.of(["nothing to measure"] * num)

            def spec(name: str) -> MetricSpec:
                return MetricSpec(name, name, "", "continuous", False)

            return Scores(
                metrics=(
                    MetricScores(spec("nll"), before=RowValues.of(values), after=infinite),
                    MetricScores(spec("flat"), between=RowValues.of(np.ones(num))),
                    MetricScores(spec("all_null"), before=nothing, after=nothing),
                ),
                tables=(Table("odd", "Odd numbers", ("what", "n"), (("nan", math.nan), ("inf", -math.inf))),),
                curves=(
                    Curve("bad", "Bad", "x", "y", (Series("s", (0.0, 1.0, 2.0), (math.inf, math.nan, 1.0)),)),
                    Curve("none", "No line", "x", "y", (Series("s", (0.0,), (None,)),)),
                ),
            )

    page = text_of(render_html(compare(make_run(["a"] * 30), make_run(["b"] * 30), metrics=[Odd()])))
    assert "1 rows have an infinite value, so there is no mean" in page
    assert "nan – inf −∞" in page
    assert "2 → ∞ (+∞)" in page  # the row's own figures
    assert "nothing to measure" in page
    assert "No line" not in page


def test_weighted_means_and_exp_of_them_are_said_to_be_such(make_run: Callable[..., pa.Table]) -> None:
    class Perplexity:
        name, title, needs, metric_names = "perplexity", "Perplexity", Needs(), ("ppl",)

        def why_not(self, pairs, context) -> None:
            return None

        def score(self, pairs, context) -> Scores:
            nll, tokens = np.linspace(1, 3, len(pairs)), np.linspace(10, 1, len(pairs))
            spec = MetricSpec("ppl", "Some texts", "nats/token", "continuous", False, summary="exp_mean")
            sides = {"before": RowValues.of(nll), "after": RowValues.of(nll - 0.5)}
            return Scores((MetricScores(spec, **sides, before_weights=tokens, after_weights=tokens),))

    result = compare(make_run(["a"] * 40), make_run(["b"] * 40), metrics=[Perplexity()])
    page = text_of(render_html(result))
    before, after = (math.exp(np.average(np.linspace(1, 3, 40), weights=np.linspace(10, 1, 40)) - x) for x in (0, 0.5))
    assert f"{before:.2f} before, {after:.2f} after: −{before - after:.2f}" in page
    assert "perplexity, p = 0.0001" in page
    assert "40 rows; weighted means; the table has exp of them" in page


def test_the_page_is_a_function_of_the_result(full_result: ComparisonResult) -> None:
    assert render_html(full_result) == render_html(full_result)


def test_one_file_that_asks_for_nothing(full_result: ComparisonResult) -> None:
    page = render_html(full_result)
    assert not re.findall(r"(?i)https?:|//[a-z]|@import|<script|<link(?! rel=\"icon\" href=\"data:,\">)|\ssrc=", page)
    assert set(re.findall(r"url\(([^)]*)\)", page)) == {
        match for match in re.findall(r"url\(([^)]*)\)", page) if match.startswith("#")
    }
    assert "default-src 'none'" in page


def test_colours_of_plots_follow_the_theme(full_result: ComparisonResult) -> None:
    page = render_html(full_result)
    plots = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    assert len(plots) >= 5
    defined = set(re.findall(r"(--\w+):", page))
    for plot in plots:
        assert set(re.findall(r"var\((--\w+)\)", plot)) <= defined
        assert not re.findall(r"#[0-9a-f]{6}\b|rgb\(", plot)
        assert 'role="img" aria-label="' in plot
        assert "<text" in plot  # words, not outlines
        assert "DejaVu" not in plot


def test_thousands_of_rows_stay_small(make_result: Callable[..., ComparisonResult]) -> None:
    few, many = render_html(make_result(100)), render_html(make_result(6_000))
    assert len(many) < 400_000
    assert len(many) < 1.3 * len(few)


def test_huge_texts_are_cut_with_a_note(make_run: Callable[..., pa.Table]) -> None:
    story = "word " * 20_000
    before = [f"{story}{i} left {story}" for i in range(20)]
    after = [f"{story}{i} right" for i in range(20)]
    inputs = {"id": list(range(20)), "prompt": [f"{story} question {i}?" for i in range(20)], "reference": before}
    page = render_html(compare(make_run(before, inputs), make_run(after, inputs), metrics=["accuracy"]))
    assert len(page) < 100_000
    text = text_of(page)
    assert "… 99,802 characters before" in text  # equal on both sides
    assert "more characters, whole in rows.parquet" in text
    assert "<ins>right</ins>" in page
    assert "question 3?" in page  # of a prompt the end is shown


def test_write_comparison_writes_the_page(full_result: ComparisonResult, tmp_path: Path) -> None:
    written = write_comparison(full_result, str(tmp_path))
    assert written[0] == tmp_path / "report.html"
    assert written[0].read_text(encoding="utf-8") == render_html(full_result)


@pytest.mark.parametrize("num_values", [1, 60])
def test_many_and_few_slices(make_result: Callable[..., ComparisonResult], num_values: int) -> None:
    result = make_result(slice_by=["id" if num_values == 60 else "family"])
    if num_values == 1:
        result = replace(result, slices=tuple(one for one in result.slices if one.value == "billing"))
    page = render_html(result)
    lines = re.search(r'aria-label="Metrics by.*?</table>', page, re.DOTALL)
    assert lines is not None
    assert len(re.findall(r'<th scope="row">', lines[0])) == min(num_values, 50)
    assert ("The plots show 20 of 50 values" in page) == (num_values == 60)


def test_slices_are_drawn_of_metrics_in_which_a_row_differs(make_result: Callable[..., ComparisonResult]) -> None:
    """No output is cut or empty on either side: four empty plots would say nothing."""
    result = make_result(metrics=["length", "accuracy"])
    (column,) = slice_columns(replace(result, metrics=tuple(
        replace(metric, verdict=Verdict.NO_CHANGE) for metric in result.metrics
    )))  # fmt: skip
    assert {panel.title for panel in column.panels} == {"Output tokens", "Accuracy"}
    assert "Truncated outputs" in [title for title, _ in column.heads]


def test_what_a_run_says_twice_is_shown_once(make_run: Callable[..., pa.Table]) -> None:
    run = make_run(["a", "b"], identity={"params": {"seed": 7}}, job="0123abcd", input_stamp={"bytes": 77})
    names = [line.name for line in identities(compare(run, run, metrics=["length"])).same]
    assert "digest of model" in names
    assert not [name for name in names if name.startswith(("identity", "job", "input_stamp"))]
