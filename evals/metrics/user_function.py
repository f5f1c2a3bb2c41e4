"""The user's own judgement of an output: `--score-function FILE.py:function`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.errors import InputError

#: (output, reference or None, the row's input columns) -> right or wrong, a number, or None for "cannot be judged".
ScoreFunction = Callable[[str, str | None, Mapping[str, Any]], Any]

_MAX_CHARS = 200


def load_function(spec: str) -> ScoreFunction:
    """Run the file and take the function. Raises InputError naming what is missing or fails."""
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise InputError(f"--score-function {spec}: write FILE.py:function")
    if not Path(path).is_file():
        raise InputError(f"--score-function {spec}: there is no file {path}")
    module_spec = importlib.util.spec_from_file_location("batchinfer_score_function", path)
    if module_spec is None or module_spec.loader is None:
        raise InputError(f"--score-function {spec}: {path} is not a Python file: its name has to end in .py")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's code raises
        raise InputError(f"--score-function {spec}: {path} fails: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"--score-function {spec}: {path} defines no function {name!r}")
    return function


def call(function: ScoreFunction, output: str, reference: str | None, row: Mapping[str, Any]) -> float | str:
    """The function's figure, or the reason for a null: one row's failure is that row's."""
    try:
        value = function(output, reference, row)
    except Exception as error:  # whatever the user's code raises
        return f"the function raised {type(error).__name__}: {str(error)[:_MAX_CHARS]}"
    if value is None:
        return "the function returned None"
    if isinstance(value, (bool, int, float, np.bool_, np.number)) and np.isfinite(value):
        return float(value)
    return f"the function returned {repr(value)[:_MAX_CHARS]}, not a number"
