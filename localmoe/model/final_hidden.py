"""What lies before a model's output head after a pass, for whoever goes on from there. Changes no pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn


class HiddenListener(Protocol):
    """Is told what the target's passes leave before the output head."""

    def hear(self, start: int, tokens: Sequence[int], hidden: Tensor) -> None:
        """Of a pass of `tokens` at positions from `start` on, hidden (T, H); memory that the next pass
        may write to."""


class FinalHidden:
    """Catches it in each pass."""

    def __init__(self, model: Any) -> None:
        self._rows: Tensor | None = None
        model.get_decoder().register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, out: Any) -> None:
        self._rows = out.last_hidden_state[0]

    def forget(self) -> None:
        """Nobody wants what was caught."""
        self._rows = None

    def take(self) -> Tensor:
        """(T, H) of the last pass, once."""
        rows, self._rows = self._rows, None
        assert rows is not None, "no pass has run"
        return rows
