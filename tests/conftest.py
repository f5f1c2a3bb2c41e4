"""Shared by all tests: no network, no caches of the person who runs them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

# Before anything imports huggingface_hub, which reads them once. Processes started by tests inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="batchinfer-tests-")
# Waiting OpenMP threads sleep rather than spin (read when torch is loaded): on a machine that others use too,
# spinning made a run of twelve prompts take 141 s instead of 26 (2 cores, torch 2.13).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Triton's kernels run in its interpreter, on the CPU (read when Triton is imported). Where there is a GPU,
# TRITON_INTERPRET=0 runs the tests of the kernels on it.
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return Path(__file__).resolve().parent.parent


def pytest_unconfigure() -> None:
    import shutil

    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)
