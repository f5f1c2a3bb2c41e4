"""Printing on stdout, which belongs to data."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def print_json(value: Any) -> None:
    """One JSON object. NaN and infinity, which JSON lacks, are an error of ours."""
    print_data(json.dumps(value, allow_nan=False, ensure_ascii=False, indent=2))


def print_data(text: str) -> None:
    """Print `text`. A reader that went away (`| head`) is no failure: the exit code stays the job's."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that the user gave. typer passes None, or an empty list, for the others."""
    return {name: value for name, value in options.items() if value is not None and value != []}
