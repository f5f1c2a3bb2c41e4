"""A tiny Llama folder: see tiny_folder.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a model folder with the options of `write_tiny_llama`."""

    def make(**options: Any) -> Path:
        return write_tiny_llama(tmp_path_factory.mktemp("llama"), **options)

    return make
