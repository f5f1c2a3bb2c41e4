"""batchinfer doctor: what this machine offers, and whether results can be relied on."""

from __future__ import annotations

from batchinfer.cli import options as o
from batchinfer.cli.report import print_data, print_json
from batchinfer.doctor import examine


def doctor(json: o.Json = False, debug: o.Debug = False) -> int:
    """Print what this machine offers and what is used of it; test and measure it. Takes some seconds.

    The exit code is 1 if the self-test finds that a row's results depend on its company.

    Example:

        batchinfer doctor
    """
    report = examine()
    if json:
        print_json(report.to_dict())
    else:
        print_data(report.to_text())
    return 0 if report.is_sound else 1
