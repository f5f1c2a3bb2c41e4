"""matplotlib figures as SVG inside the page: in the page's font, and in colours that follow its theme."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from batchinfer.evals.report.text import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Colours of the page's style sheet. matplotlib draws each in a colour that occurs nowhere else, which becomes
#: var(--NAME) in the SVG: so a plot is dark when the page is.
COLOURS = {
    name: f"#0000{number:02x}"
    for number, name in enumerate(
        ("ink", "muted", "line", "soft", "page", "before", "after", "better", "worse", "changed", "series3", "series4"),
        start=1,
    )
}
#: Width of a plot in CSS pixels at its natural size: a phone's column.
WIDTH = 360
FONT_SIZE = 11
_FONT = "DejaVu Sans"  # comes with matplotlib: measures of text do not depend on the machine

_TAG = re.compile(r"<[^>]*>")
_LONG_NUMBER = re.compile(r"(\d\.\d\d)\d+")
_ID = re.compile(r'\sid="([^"]*)"')
_REFERENCE = re.compile(r'(?:url\(|href=")#([^)"]*)[)"]')
_SETTINGS: Any = {  # Any: matplotlib types the names of all its settings, other ones in each release
    "svg.fonttype": "none",
    "svg.hashsalt": "batchinfer",  # the same ids each time
    "font.family": [_FONT],
    "font.size": FONT_SIZE,
    "text.parse_math": False,  # a label of the user's may hold dollar signs
    "text.color": COLOURS["ink"],
    "axes.edgecolor": COLOURS["line"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.labelsize": FONT_SIZE,
    "axes.linewidth": 1,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.unicode_minus": True,
    "axes.formatter.use_mathtext": False,
    "axes.formatter.limits": (-4, 6),
    "xtick.color": COLOURS["line"],
    "ytick.color": COLOURS["line"],
    "xtick.labelcolor": COLOURS["muted"],
    "ytick.labelcolor": COLOURS["muted"],
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.solid_capstyle": "butt",
}


@contextmanager
def drawing(height: float) -> Iterator[Figure]:
    """A figure of WIDTH x `height` CSS pixels, with the page's look; make its axes and draw inside the block.

    Units of length are pixels: a figure inch has 72 of them, as in SVG.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the browser has other fonts
        yield Figure(figsize=(WIDTH / 72, height / 72), dpi=72, facecolor="none")


def to_svg(figure: Figure, label: str, prefix: str) -> Markup:
    """An <svg> for inside a page. Call it within drawing().

    Args:
        label: what a screen reader says in its place.
        prefix: of the ids in it, so that no two plots of a page have the same.
    """
    buffer = StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    text = buffer.getvalue()
    svg = text[text.index("<svg") :]
    svg = svg[svg.index(">") + 1 : svg.rindex("</svg>")]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = _TAG.sub(lambda match: _tidy_tag(match[0]), svg)
    used = set(_REFERENCE.findall(svg))
    svg = _ID.sub(lambda match: f' id="{prefix}-{match[1]}"' if match[1] in used else "", svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{prefix}-", svg)
    svg = re.sub(r">\s+<", "><", svg)
    width, height = (round(size * 72) for size in figure.get_size_inches())
    label = escape(visible(" ".join(label.split())))
    opening = f'<svg role="img" aria-label="{label}" viewBox="0 0 {width} {height}" class="plot">'
    return Markup(f"{opening}{svg.strip()}</svg>")


def _tidy_tag(tag: str) -> str:
    for name, colour in COLOURS.items():
        tag = tag.replace(colour, f"var(--{name})")
    tag = tag.replace(f"font-family: '{_FONT}'", "font-family: var(--sans)")
    return _LONG_NUMBER.sub(r"\1", tag)
