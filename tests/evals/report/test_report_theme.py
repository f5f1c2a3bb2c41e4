"""The two colour schemes: the same names, and enough contrast for every word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import batchinfer.evals.report
from batchinfer.evals.report.figure import COLOURS

STYLE = (Path(batchinfer.evals.report.__file__).parent / "templates" / "style.css").read_text(encoding="utf-8")
WORDS = ("ink", "muted", "before", "after", "better", "worse", "changed", "link")


def palette(theme: str) -> dict[str, str]:
    macro = re.search(rf"macro {theme}\(\) %}}(.*?){{% endmacro", STYLE, re.DOTALL)
    assert macro is not None
    return dict(re.findall(r"--(\w+): (#\w{6});", macro[1]))


def luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_both_themes_define_every_colour() -> None:
    assert palette("light").keys() == palette("dark").keys()
    assert COLOURS.keys() <= palette("light").keys()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_can_be_read(theme: str) -> None:
    """WCAG 2.2 AA asks for 4.5 of text and 3 of lines."""
    colours = palette(theme)
    assert min(contrast(colours[name], colours["page"]) for name in WORDS) >= 4.5
    assert min(contrast(colours[name], colours["panel"]) for name in ("ink", "muted")) >= 4.5
    assert min(contrast(colours["ink"], colours[name]) for name in ("del", "ins", "soft")) >= 4.5
    assert min(contrast(colours[name], colours["page"]) for name in ("series3", "series4")) >= 3
