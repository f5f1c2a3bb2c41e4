"""Help that fits 80 columns."""

from __future__ import annotations

import copy
from typing import Any

from typer.core import TyperCommand


class Command(TyperCommand):
    """Names the opposite of a switch in its help text: in a column of their own they leave no room for texts."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        params = self.params
        self.params = [_folded(param) for param in params]
        try:
            super().format_help(ctx, formatter)
        finally:
            self.params = params


def _folded(param: Any) -> Any:
    if not param.secondary_opts:
        return param
    folded = copy.copy(param)
    folded.help = f"{param.help} The opposite: {', '.join(param.secondary_opts)}."
    folded.secondary_opts = []
    return folded
