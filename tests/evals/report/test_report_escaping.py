"""Whatever a run holds is shown as text: no element, attribute or character of it works in the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

from batchinfer.evals import EvalOptions
from batchinfer.evals.report import render_html
from batchinfer.evals.result import ComparisonResult, Notice

HOSTILE = (
    "<script>alert(1)</script></pre></td></table></svg><img src=x onerror=alert(1)>",
    "\"' onmouseover='alert(1)' x=\" {{ 7 * 7 }}{% raw %}",
    "&lt;b&gt;&amp;<!-- <![CDATA[ ]]></style><style>*{display:none}</style>",
    "$\\frac{1}{2}$ $x_",
)


class Elements(HTMLParser):
    """Counts elements with their attributes' names, and gathers the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: Counter[tuple[str, ...]] = Counter()
        self.texts: list[str] = []
        self.values: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("ins", "del"):  # how many of these there are is the texts' affair
            self.found[(tag, *sorted(name for name, _ in attrs))] += 1
        self.values += [value for _, value in attrs if value]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_hostile_texts_leave_the_page_as_it_is(
    make_result: Callable[..., ComparisonResult], with_everything: Callable[..., ComparisonResult]
) -> None:
    """The same result with harmless words has the same elements with the same attributes, one by one."""

    def page(mark: str) -> str:
        def wrap(text: str) -> str:
            return f"{mark} {text} {mark}"

        result = with_everything(
            make_result(40, wrap, metrics=["accuracy", "length"], options=EvalOptions(match="exact"), gates=[]), wrap
        )
        metrics = [replace(one, spec=replace(one.spec, title=wrap(one.spec.title))) for one in result.metrics]
        return render_html(
            replace(result, metrics=tuple(metrics), before=replace(result.before, path=wrap("path"), model=wrap("old")))
        )

    for hostile in HOSTILE:
        # As many words as the hostile text, so that texts are cut and compared alike.
        harmless = "".join(letter if letter.isalnum() or letter.isspace() else "x" for letter in hostile)
        found, expected = Elements(page(hostile)), Elements(page(harmless))
        assert found.found == expected.found, hostile
        assert hostile in "".join(found.texts)
        assert any(hostile in value for value in found.values)  # the words for a plot


def test_no_attribute_can_run_anything(full_result: ComparisonResult) -> None:
    found = Elements(render_html(full_result)).found
    names = {name for _, *names in found for name in names}
    assert not [name for name in names if name.startswith("on")]
    assert not {tag for tag, *_ in found} & {"script", "iframe", "object", "embed", "form", "base", "a:href", "img"}


def test_characters_that_cannot_be_seen_are_written_out(make_result: Callable[..., ComparisonResult]) -> None:
    result = make_result(30, lambda text: f"a\x00b\u202ec\x1b[31md\ufeff {text}")
    page = render_html(replace(result, warnings=(Notice("lone", "half a pair: \ud83d"),)))
    assert "a␀b\\u202ec␛[31md\\ufeff the answer" in page
    assert "half a pair: \\ud83d" in page
    page.encode("utf-8")  # a lone surrogate could not be
    assert not set(page) & set("\x00\u202e\x1b\ufeff")
