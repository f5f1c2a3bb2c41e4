"""Tokens of the step that runs: drawn on the device, and not read by the host."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from batchinfer.engine.sequence import Sequence


class PendingTokens:
    """What the next step takes from the device where it needs a sequence's last token."""

    def __init__(self, token_ids: Tensor, seqs: list[Sequence]) -> None:
        self.token_ids = token_ids  # [len(seqs)] int64, device
        self._places = {seq: place for place, seq in enumerate(seqs)}

    def places(self, seqs: Iterable[Sequence]) -> npt.NDArray[np.int64]:
        """Where each sequence's last token is in `token_ids`; -1: the host knows it."""
        return np.array([self._places.get(seq, -1) for seq in seqs], dtype=np.int64)
