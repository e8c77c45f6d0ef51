"""Free slots that layers may fill with what they miss in a pass: dealt before it, and taken from the front,
as on the device (kernels.residency). Copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localmoe.experts.residency_block import LANDING_SLOTS

_NONE = -1


class LandingSlots:
    """Of L layers, at most LANDING_SLOTS each."""

    def __init__(self, num_layers: int) -> None:
        self._slots: NDArray[np.int64] = np.full((num_layers, LANDING_SLOTS), _NONE, dtype=np.int64)

    def deal(self, free: Sequence[int]) -> None:
        """Offer these slots to the layers in turn, and no others."""
        dealt = np.full(self._slots.size, _NONE, dtype=np.int64)
        count = min(len(free), dealt.size)
        dealt[:count] = free[:count]
        self._slots[:] = dealt.reshape(LANDING_SLOTS, -1).T

    def addresses(self, slot_address: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 (L, LANDING_SLOTS), each layer's, then zeros. slot_address: of all slots."""
        return np.where(self._slots != _NONE, slot_address[self._slots], 0)

    def slot(self, layer: int, place: int) -> int:
        """The slot that a layer was offered at a place."""
        return int(self._slots[layer, place])

    def take(self, counts: NDArray[np.int64]) -> None:
        """Each layer filled its first `counts` (L,) slots: the others move up."""
        for layer in np.flatnonzero(counts).tolist():
            left = self._slots[layer, counts[layer] :].copy()
            self._slots[layer] = _NONE
            self._slots[layer, : len(left)] = left
