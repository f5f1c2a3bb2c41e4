"""The page in a browser: nothing to complain of, nothing asked for, both themes, and it fits a phone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chromium import Page, chromium_page, needs_chromium

from batchinfer.evals.report import write_html
from batchinfer.evals.result import ComparisonResult

pytestmark = needs_chromium

COLOURS = """(() => {
    const of = (selector, name) => getComputedStyle(document.querySelector(selector))[name];
    return [of("body", "backgroundColor"), of("body", "color"), of("svg.plot text", "fill")];
})()"""


@pytest.fixture
def page(tmp_path: Path):
    with chromium_page(tmp_path / "profile") as page:
        yield page


@pytest.fixture
def report(
    make_result: Callable[..., ComparisonResult], with_everything: Callable[..., ComparisonResult], tmp_path: Path
) -> Path:
    """With texts that would run, load and break the page if they could."""

    def wrap(text: str) -> str:
        return f"{text} <img src=https://example.com/x.png onerror=console.log(1)><script>console.log(2)</script>"

    path = tmp_path / "report.html"
    write_html(with_everything(make_result(30, wrap, has_noise=True), wrap), path)
    return path


def test_opens_quietly_in_both_themes_and_on_a_phone(page: Page, report: Path) -> None:
    themes = {}
    for scheme, width in (("light", 1200), ("dark", 1200), ("light", 360)):
        page.open(report, scheme=scheme, width=width)
        assert page.console == []
        assert page.requests == [report.resolve().as_uri()]
        assert page.evaluate("document.images.length + document.scripts.length") == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        themes[scheme] = page.evaluate(COLOURS)
    assert all(light != dark for light, dark in zip(themes["light"], themes["dark"], strict=True))
    assert page.evaluate("document.querySelector('.examples caption').offsetWidth") > 200  # still on the phone
    # The switch beats the system's scheme.
    page.open(report, scheme="light")
    page.evaluate("document.querySelector('label[for=theme-dark]').click()")
    assert page.evaluate(COLOURS) == themes["dark"]
    page.open(report, scheme="dark")
    page.evaluate("document.querySelector('label[for=theme-light]').click()")
    assert page.evaluate(COLOURS) == themes["light"]


def test_complaints_and_requests_would_be_seen(page: Page, tmp_path: Path) -> None:
    """The test above cannot pass for want of ears."""
    path = tmp_path / "bad.html"
    path.write_text("<script>console.log('said'); missing()</script><img src='http://127.0.0.1:9/x.png'>")
    page.open(path)
    assert any("said" in line for line in page.console)
    assert any("missing is not defined" in line for line in page.console)
    assert "http://127.0.0.1:9/x.png" in page.requests
