"""One LRU a layer with a share of the slots each: Mixtral-Offloading's cache (Eliseev and Mazur 2023), which
several policies build on. Does not prefetch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localmoe.core.events import RoomWanted
from localmoe.core.types import ExpertKey
from localmoe.prefetch.policy import KeepScores


class LruShares:
    """LRU within a layer. With fewer slots than layers the layers share one LRU.

    Attributes:
        shares: slots of each layer.
    """

    def __init__(self, num_layers: int, num_slots: int) -> None:
        share, rest = divmod(num_slots, num_layers)
        self.shares = [share + (layer < rest) for layer in range(num_layers)]

    @property
    def layers_have_shares(self) -> bool:
        """Whether there is a slot for every layer."""
        return sum(self.shares) >= len(self.shares)

    def victim(self, room: RoomWanted) -> ExpertKey | None:
        """A free slot (None) while the layer is below its share; then the layer's least recently used
        expert."""
        if not self.layers_have_shares:
            return None if room.num_free else next(iter(room.candidates), None)
        if room.num_free and room.layer_slots < self.shares[room.key.layer]:
            return None
        return oldest_of(room.key.layer, room.candidates)

    def keep_scores(self, last_use: NDArray[np.int64]) -> KeepScores:
        """The longer ago, the sooner it goes."""
        return KeepScores(last_use.astype(np.float32), per_layer=self.layers_have_shares)


def oldest_of(layer: int, candidates: Sequence[ExpertKey]) -> ExpertKey | None:
    """The least recently used of a layer's experts."""
    return next((key for key in candidates if key.layer == layer), None)
