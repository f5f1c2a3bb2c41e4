"""Shared by all tests: no network, no caches of the person who runs them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

# Before anything imports huggingface_hub, which reads them once. Processes started by tests inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="batchinfer-tests-")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return Path(__file__).resolve().parent.parent


def pytest_unconfigure() -> None:
    import shutil

    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)
