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
from localmoe.prefetch.lru_shares import LruShares
from localmoe.prefetch.policy import CacheShape, KeepScores, PolicyBase


class OnDemandPolicy(PolicyBase):
    """LRU within a layer. With fewer slots than layers the layers share one LRU."""

    name = "on-demand"

    def __init__(self, shape: CacheShape) -> None:
        super().__init__(shape)
        self._cache = LruShares(shape.num_layers, shape.num_slots)

    @property
    def asks_after_drafts(self) -> bool:
        """Never asks for anything."""
        return False

    def observe(self, event: Event) -> Sequence[PrefetchRequest]:
        """Never asks for anything."""
        return ()

    def choose_victim(self, room: RoomWanted) -> ExpertKey | None:
        """A free slot while the layer is below its share; then the layer's least recently used expert."""
        return self._cache.victim(room)

    def keep_scores(self, last_use: NDArray[np.int64]) -> KeepScores:
        """The longer ago, the sooner it goes."""
        return self._cache.keep_scores(last_use)
