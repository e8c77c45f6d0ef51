"""The few numbers that a step reads on the device, so that one captured graph serves every step. Decides
nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class DeviceWindow:
    """Where the pass stands, how many of its rows count, and the tokens of the window.

    Attributes:
        start: int64 (1,), position of the window's first token.
        live: int64 (1,), tokens of the window; rows after them are padding.
        cursor: int64 (1,), window token that the draft is at.
        tokens: int64 (rows,), the last accepted token, then the drafted ones.
        at: int64 (1,), position of the first row of the pass that runs.
        visible: cache positions that the pass may look at, a number on the host.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._staging = torch.zeros(3 + rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._host = self._staging.numpy()
        self._words = torch.zeros(3 + rows, dtype=torch.int64, device=device)
        self.start, self.live, self.cursor = self._words[0:1], self._words[1:2], self._words[2:3]
        self.tokens = self._words[3:]
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.visible = 0
        self.rows = rows

    def set(self, start: int, live: int, tokens: Sequence[int]) -> None:
        """Upload, in stream order. The upload before must have ended."""
        self._host[:3] = start, live, 0
        self._host[3 : 3 + len(tokens)] = tokens
        self._words.copy_(self._staging, non_blocking=True)
