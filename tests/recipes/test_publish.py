"""Sections of a document, plots that do not change by themselves, and where figures come from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def publish(bench_recipe: Callable[[str], ModuleType]) -> ModuleType:
    return bench_recipe("publish")


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "performance.md"
    path.write_text("# Performance\n\n<!-- a:begin -->\nold\n<!-- a:end -->\n\nText between.\n")
    return path


def test_a_section_is_replaced_and_nothing_else(publish: ModuleType, document: Path) -> None:
    publish.write_section(document, "a", "new\n")
    assert document.read_text() == "# Performance\n\n<!-- a:begin -->\nnew\n<!-- a:end -->\n\nText between.\n"
    assert [path.name for path in document.parent.iterdir()] == ["performance.md"]


def test_a_new_section_comes_last_and_is_found_again(publish: ModuleType, document: Path) -> None:
    for text in ("one", "two"):
        publish.write_section(document, "b:c", text)
    assert document.read_text().endswith("Text between.\n\n<!-- b:c:begin -->\ntwo\n<!-- b:c:end -->\n")
    assert "old" in document.read_text()


@pytest.mark.parametrize(
    "broken",
    ["<!-- a:begin -->\n", "<!-- a:end -->\n<!-- a:begin -->\n", 2 * "<!-- a:begin -->\n<!-- a:end -->\n"],
)
def test_broken_sections_are_refused_before_anything_is_measured(
    publish: ModuleType, tmp_path: Path, broken: str
) -> None:
    path = tmp_path / "d.md"
    path.write_text(broken)
    with pytest.raises(SystemExit, match=r"d\.md: section a must have one <!-- a:begin -->"):
        publish.check_document(path)
    with pytest.raises(SystemExit, match="section a must have"):
        publish.write_section(path, "a", "text")
    assert path.read_text() == broken


def test_a_document_that_is_not_there(publish: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"none\.md: there is no such file"):
        publish.check_document(tmp_path / "none.md")


def test_the_same_plot_is_the_same_file(publish: ModuleType, document: Path) -> None:
    contents = []
    for _ in range(2):
        figure = publish.new_figure()
        figure.subplots().plot([1, 2], [3, 4], label="a line")
        path = publish.beside(document, "plot.svg")
        publish.save_plot(figure, path)
        contents.append(path.read_text())
    assert contents[0] == contents[1]
    assert "<svg" in contents[0]
    assert path == document.parent / "performance" / "plot.svg"
    assert publish.picture(document, path, "Lines") == "![Lines](performance/plot.svg)"


def test_spread_and_table(publish: ModuleType) -> None:
    assert publish.spread([2.0]) == "2.0"
    assert publish.spread([3.0, 1.04, 2.0]) == "2.0 (1.0 to 3.0)"
    assert publish.markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_a_process_that_fails_is_told_with_its_error(publish: ModuleType) -> None:
    code = "import sys; print('out'); sys.exit('what went wrong')"
    with pytest.raises(SystemExit, match=r"failed with 1:\nwhat went wrong"):
        publish.run_process([sys.executable, "-c", code])
    done = publish.run_process([sys.executable, "-c", "print('noise'); print('{\"a\": 1}')"])
    assert done.last_json() == {"a": 1}
    assert done.wall_s > 0


def test_provenance(publish: ModuleType) -> None:
    text = publish.provenance()
    assert " core" in text
    assert f"Commit {publish.commit()}." in text
