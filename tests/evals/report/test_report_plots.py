"""Bins of histograms, and SVG that is safe to have in one page several times."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from batchinfer.evals.report.grid import grid
from batchinfer.evals.report.plots import ForestRow, distribution, forest, histogram_bins
from batchinfer.evals.result import Table, Verdict


def test_whole_numbers_have_a_bin_each() -> None:
    assert histogram_bins(np.array([1.0, 3.0, 3.0])).tolist() == [0.5, 1.5, 2.5, 3.5]


def test_bins_of_many_whole_numbers_hold_equally_many() -> None:
    widths = np.diff(histogram_bins(np.arange(100.0)))
    assert set(widths.tolist()) == {5.0}
    with_tail = histogram_bins(np.concatenate([np.arange(100.0), [9_000.0]]))
    assert set((with_tail % 1).tolist()) == {0.5}


def test_a_far_tail_does_not_squeeze_the_rest() -> None:
    values = np.concatenate([np.linspace(0, 1, 1_000), [1e6]])
    bins = histogram_bins(values)
    assert bins[-1] < 2
    svg = distribution(values, values, "nats", "d", neutral=0.0)
    assert "Histogram of 1,001 rows" in svg


def test_one_value_has_one_bin() -> None:
    assert histogram_bins(np.full(5, 0.25)).tolist() == [-0.25, 0.75]


@pytest.mark.parametrize("label", ["$x_1$ & <b>", "汉字 🙂", "a\nb\x00"])
def test_labels_are_text_whatever_they_hold(label: str, recwarn: pytest.WarningsRecorder) -> None:
    rows = [
        ForestRow(label, "0.1", 0.1, 0.0, 0.2, Verdict.BETTER, missed=0.1, noise=0.01),
        ForestRow("b", "0", 0, None, None),
    ]
    svg = forest(rows, "points", "f0")
    assert "<b>" not in svg
    assert "\x00" not in svg
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    expected = " ".join(label.split()).replace("\x00", "␀").replace("&", "&amp;").replace("<", "&lt;")
    assert expected.replace(">", "&gt;") in [text.strip() for text in texts]
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_references_inside_a_plot_have_its_prefix() -> None:
    rows = [ForestRow("a", "0.1", 0.1, 0.0, 0.2)]
    first, second = forest(rows, "points", "f0"), forest(rows, "points", "f1")
    ids = [set(re.findall(r' id="([^"]*)"', svg)) for svg in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for svg, known in zip((first, second), ids, strict=True):
        assert set(re.findall(r'(?:url\(|href=")#([^)"]*)', svg)) == known
    assert "xmlns" not in first
    assert "<metadata" not in first


def test_a_grid_is_shaded_by_ratio_and_says_its_numbers() -> None:
    rows = (("before", 2.0, 4.0), ("after", 8.0, None), ("other", 0.0, math.inf))
    svg = grid(Table("t", "Perplexity", ("of", "by one", "by two"), rows), "g")
    label = re.search(r'aria-label="([^"]*)"', svg)
    assert label is not None
    assert label[1].startswith("Perplexity: before, by one: 2.000; before, by two: 4.000; after, by one: 8.000")
    alphas = [float(alpha) for alpha in re.findall(r"fill: var\(--after\); opacity: ([\d.]+)", svg)]
    assert alphas == pytest.approx([0.06, 0.23, 0.4, 0.06, 0.06, 0.06])


def test_names_that_begin_alike_stay_apart() -> None:
    rows = [ForestRow(f"{'the same long beginning ' * 4}{end}", "+1 [0, 2]", 1, 0, 2) for end in ("left", "right")]
    texts = re.findall(r"<text[^>]*>([^<]*…[^<]*)</text>", forest(rows, "points", "f0"))
    assert len(set(texts)) == 2


def test_a_number_that_the_edge_would_cut_is_left_out() -> None:
    """The axis ends at 0.0604: under a tick at 0.06 half of the number would lie outside."""
    svg = forest([ForestRow("a", "", 0.029, 0.005, 0.057)], "cosine", "f")
    assert ">0.045<" in svg
    assert ">0.060<" not in svg
