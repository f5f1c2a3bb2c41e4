"""batchinfer status: how far a job is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchinfer.cli import options as o
from batchinfer.cli.report import print_data, print_json
from batchinfer.job_status import job_status


def status(
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="What the job writes or has written.", show_default=False)
    ],
    json: o.Json = False,
    debug: o.Debug = False,
) -> int:
    """Show how far a job is that is running, was stopped or is finished. Changes nothing.

    Example:

        batchinfer status completions.parquet
    """
    found = job_status(output)
    if json:
        print_json(found.to_dict())
    else:
        print_data(found.to_text())
    return 0
