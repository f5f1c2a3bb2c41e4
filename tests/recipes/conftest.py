"""Recipes as modules, a tiny model for them, and their processes run in this one."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from tiny_folder import write_tiny_llama
from typer.testing import CliRunner


@pytest.fixture
def bench_recipe(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a script of recipes/bench, as `python recipes/bench/NAME.py` would find what it imports."""
    monkeypatch.syspath_prepend(str(repo_root / "recipes" / "bench"))
    return importlib.import_module


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a token for each byte and a context of 256."""
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def in_process(bench_recipe: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """`batchinfer` is called in this process, the machine measured in a moment; returns the commands as they come."""
    from batchinfer import machine_speed
    from batchinfer.cli.main import app

    publish = bench_recipe("publish")
    run_process, commands = publish.run_process, []

    def run(command: list[str]) -> object:
        commands.append(command)
        if command[0] != publish.BATCHINFER:
            return run_process(command)
        began = time.perf_counter()
        result = CliRunner().invoke(app, command[1:])
        assert result.exit_code == 0, result.stderr
        return publish.Done(result.stdout, time.perf_counter() - began)

    monkeypatch.setattr(publish, "run_process", run)
    monkeypatch.setattr(machine_speed, "TIME_S", 0.001)
    monkeypatch.setattr(machine_speed, "BYTES_READ", 1 << 20)
    return commands
