"""What the recipes of this folder share: processes that are measured, and the document that figures go to.

A recipe owns sections of the document, each between two comments:

    <!-- throughput:shared:begin -->
    <!-- throughput:shared:end -->

What is between them is replaced; a section that is not there yet is added at the end. Figures and plots lie in a
folder beside the document, named after it: docs/performance/throughput.svg for docs/performance.md.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCHINFER = str(Path(sys.executable).with_name("batchinfer"))


@dataclass(frozen=True)
class Done:
    """A process that ended well."""

    stdout: str
    wall_s: float  # of the whole process

    def last_json(self) -> Any:
        return json.loads(self.stdout.strip().splitlines()[-1])


def run_process(command: list[str]) -> Done:
    """Raises SystemExit with the end of its standard error if it fails."""
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wall_s = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\nfailed with {done.returncode}:\n{done.stderr[-2000:]}")
    return Done(done.stdout, wall_s)


def bench(prompts: Path, model: str, *options: str) -> Any:
    """The report of `batchinfer bench`."""
    return run_process([BATCHINFER, "bench", str(prompts), "--model", model, "--json", "--quiet", *options]).last_json()


def spread(values: Sequence[float], digits: int = 1) -> str:
    """The median, and the least and the greatest if there are several: "12.3 (12.1 to 12.9)"."""
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def describe_machine() -> str:
    """ "AMD EPYC, 2 cores, avx512f avx512_bf16"."""
    from batchinfer.doctor import examine_processor

    processor = examine_processor()
    cores = processor.num_physical_cores
    return f"{processor.name}, {cores} core{'s' * (cores != 1)}, {' '.join(processor.features) or 'no known features'}"


def commit() -> str:
    """Of this checkout, with "-dirty" if files differ from it; "unknown" outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def provenance() -> str:
    """Where figures come from, as a sentence."""
    return f"Machine: {describe_machine()}. Commit {commit()}."


def check_document(path: Path) -> None:
    """Before anything is measured. Raises SystemExit if sections cannot be written there."""
    if not path.is_file():
        raise SystemExit(f"--write {path}: there is no such file")
    if not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK):
        raise SystemExit(f"--write {path}: it cannot be written")
    text = path.read_text(encoding="utf-8")
    for name in set(re.findall(r"<!-- (\S+):(?:begin|end) -->", text)):
        _find_section(text, name, path)


def write_section(path: Path, name: str, content: str) -> None:
    """Replace the section, or add it at the end. Raises SystemExit if its comments are not a pair."""
    text = path.read_text(encoding="utf-8")
    begin, end = (f"<!-- {name}:{side} -->" for side in ("begin", "end"))
    section = f"{begin}\n{content.strip()}\n{end}"
    place = _find_section(text, name, path)
    if place is None:
        text = f"{text.rstrip()}\n\n{section}\n"
    else:
        text = text[: place.start] + section + text[place.stop :]
    _replace(path, text)


def _find_section(text: str, name: str, path: Path) -> slice | None:
    begin, end = (f"<!-- {name}:{side} -->" for side in ("begin", "end"))
    counts = text.count(begin), text.count(end)
    if counts == (0, 0):
        return None
    if counts != (1, 1) or text.index(begin) > text.index(end):
        raise SystemExit(f"{path}: section {name} must have one {begin} and one {end} behind it")
    return slice(text.index(begin), text.index(end) + len(end))


def beside(document: Path, name: str) -> Path:
    """The file `name` in the document's own folder."""
    folder = document.with_suffix("")
    folder.mkdir(exist_ok=True)
    return folder / name


def save_json(path: Path, value: Any) -> None:
    _replace(path, json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def new_figure(width: float = 8.0, height: float = 4.5) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_plot(figure: Figure, path: Path) -> None:
    """As SVG. The same figure gives the same file: no date, fixed ids."""
    import matplotlib

    temporary = path.with_name(f".{path.name}.tmp")
    with matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "path"}):
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    temporary.replace(path)


def picture(document: Path, plot: Path, text: str) -> str:
    """Markdown of a plot beside the document."""
    return f"![{text}]({plot.relative_to(document.parent).as_posix()})"


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
