"""Kernels run in Triton's interpreter on CPU tensors, or on a GPU with TRITON_INTERPRET=0; see tests/conftest.py."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels.triton.launch import is_interpreted

#: The interpreter's bf16 is wrong (it gives NaN).
DTYPES = (torch.float32, torch.float16) if is_interpreted() else (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="session")
def device() -> torch.device:
    if not is_interpreted():
        return torch.device("cuda")
    return torch.device("cpu")


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def tolerance(dtype: torch.dtype) -> float:
    """Relative to values of about 1: what rounding to the type once or twice leaves."""
    return {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
