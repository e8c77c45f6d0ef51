"""next-gate: Mixtral-Offloading with speculative loading (Eliseev and Mazur 2023, 3.2): the next layer's gate
is applied to the current hidden state, and the experts that it would choose are loaded after the current
layer's.

The cache is on-demand's. A few slots are kept out of it as a buffer: a guess displaces nothing before it is
used. Then the expert belongs to its layer's LRU, whose oldest one gives its slot back to the buffer. As many
guesses are loaded as a token uses experts (2 for Mixtral, as in the original), the most wanted first. Guesses
need the events of single layers; where whole passes run, the cache alone is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localmoe.core.events import (
    Event,
    LayerDemanded,
    NextGateGuessed,
    PrefetchRequest,
    RoomWanted,
)
from localmoe.core.types import ExpertKey
from localmoe.prefetch.lru_shares import LruShares, oldest_of
from localmoe.prefetch.policy import CacheShape, KeepScores, PolicyBase

_BUFFER_OF_SLOTS = 4  # the buffer is at most one slot in so many


class NextGatePolicy(PolicyBase):
    """On-demand's cache, and guesses that wait beside it."""

    name = "next-gate"
    wants_next_gate = True
    needs_layers = True

    def __init__(self, shape: CacheShape) -> None:
        super().__init__(shape)
        buffer = min(2 * shape.experts_per_token, shape.num_slots // _BUFFER_OF_SLOTS)
        self._cache = LruShares(shape.num_layers, shape.num_slots - buffer)
        self._whole_cache = LruShares(shape.num_layers, shape.num_slots)  # where nothing is guessed
        self._guessed: set[ExpertKey] = set()  # asked for, and not used since

    def observe(self, event: Event) -> Sequence[PrefetchRequest]:
        """Ask for what the next layer's gate would choose."""
        match event:
            case NextGateGuessed():
                here = self._residency()[event.layer]
                wanted = self.shape.known(event.experts)[: self.shape.experts_per_token]
                keys = [ExpertKey(event.layer, e) for e in wanted if not here[e]]
                self._guessed.update(keys)
                return [PrefetchRequest(key, float(event.layer)) for key in keys]
            case LayerDemanded():
                self._guessed.difference_update(ExpertKey(event.layer, e) for e in event.experts)
            case _:
                pass
        return ()

    def choose_victim(self, room: RoomWanted) -> ExpertKey | None:
        """For a guess a slot of the buffer, free or won back from a layer above its share; for a demand a
        wrong guess of a layer that is done, else as on-demand."""
        if not room.is_demand:
            return None if room.num_free else self._above_share(room)
        wrong = next((key for key in room.candidates if self._is_wrong(key, room.key.layer)), None)
        if wrong is not None:
            self._guessed.discard(wrong)
            return wrong
        return self._cache.victim(room)

    def _is_wrong(self, key: ExpertKey, layer: int) -> bool:
        """A guess for another layer than the one that computes now, or the next, was wrong."""
        return key in self._guessed and key.layer not in (layer, layer + 1)

    def _above_share(self, room: RoomWanted) -> ExpertKey | None:
        held = self._residency().sum(axis=1)
        for layer, share in enumerate(self._cache.shares):
            if held[layer] > share and (oldest := oldest_of(layer, room.candidates)) is not None:
                return oldest
        return None

    def keep_scores(self, last_use: NDArray[np.int64]) -> KeepScores:
        """On-demand's."""
        return self._whole_cache.keep_scores(last_use)
