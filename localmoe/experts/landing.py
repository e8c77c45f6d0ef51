"""Free slots that layers may fill with what they miss in a pass: dealt before it, and taken from the front,
as on the device (kernels.residency). Copies nothing.

Within a pass a layer makes room among its own experts alone, so what it is dealt is what it keeps: it goes to
the layers that hold fewest. Slots beyond a token's experts are worth less to a layer than the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LANDING_SLOTS = 16  # free slots that one layer may fill with its misses in one pass
_NONE = -1


def dealt(held: NDArray[np.int64], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(layers, places) of `count` free slots or as many as there are places for, one after the other: each to
    the layer that has fewest then, of equals one that was dealt fewer. held: (L,), slots that layers have."""
    levels = held[None, :] + np.arange(LANDING_SLOTS)[:, None]
    places, layers = np.divmod(np.argsort(levels, axis=None, kind="stable")[:count], len(held))
    return layers, places


class LandingSlots:
    """Of L layers, at most LANDING_SLOTS each."""

    def __init__(self, num_layers: int) -> None:
        self._slots: NDArray[np.int64] = np.full((num_layers, LANDING_SLOTS), _NONE, dtype=np.int64)

    def deal(self, free: Sequence[int], held: NDArray[np.int64]) -> None:
        """Offer these slots, and no others, to the layers that hold fewest. held: (L,)."""
        self._slots[:] = _NONE
        if free:
            layers, places = dealt(held, len(free))
            self._slots[layers, places] = free[: len(layers)]

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
