"""report.html: a comparison on one page, for people."""

from __future__ import annotations

from batchinfer.evals.report.page import render_html, write_html

__all__ = ["render_html", "write_html"]
