"""The folder of a comparison: report.json, rows.parquet and report.html."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from batchinfer.errors import InputError
from batchinfer.evals.result import ComparisonResult

REPORT_JSON = "report.json"
REPORT_HTML = "report.html"
ROWS_PARQUET = "rows.parquet"


def check_folder(folder: Path) -> None:
    """Make the folder, so that a place that cannot be written to is known before any work. Raises InputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()
    except FileExistsError as error:
        raise InputError(f"--output {folder} is a file: name a folder") from error
    except OSError as error:
        raise InputError(f"--output {folder}: cannot write there: {error.strerror}") from error


def write_comparison(result: ComparisonResult, folder: str | Path) -> list[Path]:
    """Write the files, each of them whole or not at all; returns their paths. Files of those names are replaced."""
    import pyarrow.parquet as pq

    from batchinfer.evals.report import write_html

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result.to_dict(), allow_nan=False, ensure_ascii=False, indent=1)
    written = [
        _write_whole(folder / REPORT_JSON, lambda path: _write_text(path, text)),
        _write_whole(folder / ROWS_PARQUET, lambda path: pq.write_table(result.rows, path, compression="zstd")),
    ]
    return [_write_whole(folder / REPORT_HTML, lambda path: write_html(result, path)), *written]


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="backslashreplace")  # lone surrogates are not UTF-8


def _write_whole(path: Path, write: Callable[[Path], None]) -> Path:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
