"""on-demand: Mixtral-Offloading's cache (Eliseev and Mazur 2023): one LRU a layer with a fixed share of the
slots, copies only when the target asks. Does not prefetch.

The original also copies the evicted expert back to the host; the host keeps every expert here, so that is
left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localmoe.core.events import Event, PrefetchRequest, RoomWanted
from localmoe.core.types import ExpertKey
from localmoe.prefetch.policy import CacheShape, KeepScores


class OnDemandPolicy:
    """LRU within a layer. With fewer slots than layers the layers share one LRU."""

    name = "on-demand"

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape

    def observe(self, event: Event) -> Sequence[PrefetchRequest]:
        """Never asks for anything."""
        return ()

    def choose_victim(self, room: RoomWanted) -> ExpertKey | None:
        """A free slot while the layer is below its share; then the layer's least recently used expert."""
        if not self._layers_have_shares:
            return None if room.num_free else next(iter(room.candidates), None)
        if room.num_free and room.layer_slots < self._quota(room.key.layer):
            return None
        own = (key for key in room.candidates if key.layer == room.key.layer)
        return next(own, None)

    def keep_scores(self, last_use: NDArray[np.int64]) -> KeepScores:
        """The longer ago, the sooner it goes."""
        return KeepScores(last_use.astype(np.float32), per_layer=self._layers_have_shares)

    @property
    def _layers_have_shares(self) -> bool:
        return self._shape.num_slots >= self._shape.num_layers

    def _quota(self, layer: int) -> int:
        """Slots of a layer: an equal share, the first layers taking the remainder."""
        share, rest = divmod(self._shape.num_slots, self._shape.num_layers)
        return share + (layer < rest)
