"""A measurement as text: a drawn table for terminals, a plain one for elsewhere."""

from __future__ import annotations

import io

from batchinfer.bench.report import BenchReport


def to_text(report: BenchReport) -> str:
    facts = "\n".join(f"{label:<10} {text}" for label, text in report.facts())
    return f"{report.headline()}\n\n{_aligned(*report.table())}\n\n{facts}\n"


def _aligned(headers: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """The first column to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    lines = []
    for cells in (headers, *rows):
        first, *rest = cells
        figures = (f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
        lines.append("  ".join([f"{first:<{widths[0]}}", *figures]).rstrip())
    return "\n".join(lines)


def to_drawn_text(report: BenchReport) -> str:
    """As wide as the terminal, with its codes for bold."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    headers, rows = report.table()
    table = Table(*headers)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        if row is rows[-1]:
            table.add_section()
        table.add_row(*map(Text, row))
    facts = Table.grid(padding=(0, 2))
    for label, text in report.facts():
        facts.add_row(Text(label, style="bold"), Text(text))
    out = io.StringIO()
    console = Console(file=out, force_terminal=True)
    console.print(Text(report.headline(), style="bold"), table, facts, sep="\n")
    return out.getvalue()
