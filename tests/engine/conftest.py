"""Shared by the tests of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from batchinfer.engine.engine import Engine


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "ahead"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Engines launch each step when the one before it is taken, then before that, as on a GPU."""
    original = Engine._set_up

    def set_up(self: Engine, *args: Any) -> None:
        original(self, *args)
        self.looks_ahead = request.param

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_set_up", set_up)
        yield request.param
