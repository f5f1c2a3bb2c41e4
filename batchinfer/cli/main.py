"""The `batchinfer` command. Errors become one line on stderr and an exit code.

0 done · 1 nothing succeeded or the job failed · 2 wrong usage or bad input · 3 a row failed under
--strict · 4 eval: no pairs · 5 eval: a gate failed · 6 more row errors than --max-row-errors allows ·
130 SIGINT · 143 SIGTERM
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from batchinfer.cli.bench import bench
from batchinfer.cli.doctor import doctor
from batchinfer.cli.eval import eval_
from batchinfer.cli.help import Command
from batchinfer.cli.plan import plan
from batchinfer.cli.run import run
from batchinfer.cli.score import score
from batchinfer.cli.status import status
from batchinfer.errors import InputError, KernelsWarning
from batchinfer.interrupt import Interrupted
from batchinfer.job_run import RowErrorsError
from batchinfer.version import __version__

EXIT_ROW_ERRORS = 6


class _Group(TyperGroup):
    """Reports every error in one way, whether the app is called as a script or by a test."""

    def main(  # type: ignore[override]  # the parameters in between differ between versions of typer
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        argv = list(sys.argv[1:] if args is None else args) or ["--help"]
        if not sys.stderr.isatty():  # their bars redraw with carriage returns, which bloats logs
            os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        # Read when torch is loaded. Threads that spin while they wait for the next kernel take the cores
        # away from those that compute: on a busy machine a step then takes several times as long.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # About 20 us of spinning before a thread sleeps: to be woken costs more than the gap between two kernels.
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
        call_main = super().main
        with warnings.catch_warnings():
            warnings.showwarning = _warning_printer(warnings.showwarning)
            code = _exit_code(
                lambda: call_main(argv, prog_name or "batchinfer", complete_var, standalone_mode=False, **extra),
                debug="--debug" in argv,
            )
        if standalone_mode:
            sys.exit(code)
        return code


def _exit_code(call: Callable[[], Any], *, debug: bool) -> int:
    try:
        return int(call() or 0)
    except (Interrupted, KeyboardInterrupt) as error:
        return _fail(getattr(error, "exit_code", 130), _text(error) or "interrupted")
    except Exception as error:
        if type(error).__name__ == "Abort":  # what older versions of typer make of SIGINT
            return _fail(130, "interrupted")
        if debug:
            traceback.print_exc()
        if isinstance(error, InputError):
            return _fail(2, _text(error))
        if isinstance(error, RowErrorsError):
            return _fail(EXIT_ROW_ERRORS, _text(error))
        # click's own errors, which typer ships under another module name in its newer versions
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            usage = getattr(getattr(error, "ctx", None), "command_path", "batchinfer")
            return _fail(int(error.exit_code), f"{error.format_message()}\nSee {usage} --help")
        hint = "" if debug else "\nRun again with --debug to see the traceback"
        return _fail(1, f"{type(error).__name__}: {_text(error)}{hint}")


def _warning_printer(show_others: Callable[..., None]) -> Callable[..., None]:
    """Our own warnings are one plain line, without the place in the source."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, KernelsWarning):
            print(f"batchinfer: {message}", file=sys.stderr)
        else:
            show_others(message, category, *place, **more)

    return show


def _text(error: BaseException) -> str:
    """The message and its notes: what a job says of its output when it ends early."""
    return "; ".join(filter(None, [str(error), *getattr(error, "__notes__", ())]))


def _fail(code: int, message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


app = typer.Typer(
    cls=_Group,
    help="Offline LLM batch inference: whole datasets of prompts in, completions out.",
    epilog="Example: batchinfer run prompts.parquet --model smollm2-135m --output completions.parquet",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(rich_help_panel="Commands", cls=Command)(run)
app.command(rich_help_panel="Commands", cls=Command)(status)
app.command("eval", rich_help_panel="Commands", cls=Command)(eval_)
app.command(rich_help_panel="Commands", cls=Command)(score)
app.command(rich_help_panel="Commands", cls=Command)(plan)
app.command(rich_help_panel="Commands", cls=Command)(bench)
app.command(rich_help_panel="Commands", cls=Command)(doctor)


def _print_version(value: bool) -> None:
    if value:
        print(f"batchinfer {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", is_eager=True, callback=_print_version, help="Print the version."),
) -> None:
    pass


if __name__ == "__main__":
    app()
