"""single-sooner, single-later: MoE-SpeQ's table 3 compares with two "single prefetch" methods, which it does
not define. Read here as one round of prefetches a step, with on-demand's LRU a layer: of the first drafted
token as soon as it is routed, or of all drafted tokens once drafting is over. For comparison only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localmoe.core.events import (
    DraftFinished,
    DraftRouted,
    Event,
    PrefetchRequest,
    RoomWanted,
    StepStarted,
    TokenRouted,
)
from localmoe.core.types import ExpertKey
from localmoe.prefetch.lru_shares import LruShares
from localmoe.prefetch.policy import CacheShape, KeepScores, PolicyBase


class SinglePrefetchPolicy(PolicyBase):
    """What the draft routed in this step, and an LRU a layer."""

    name = "single-later"
    sooner = False

    def __init__(self, shape: CacheShape) -> None:
        super().__init__(shape)
        self._cache = LruShares(shape.num_layers, shape.num_slots)
        self._wanted = np.zeros((shape.num_layers, shape.num_experts), dtype=np.bool_)

    def observe(self, event: Event) -> Sequence[PrefetchRequest]:
        """One round a step."""
        match event:
            case StepStarted():
                self._wanted[:] = False
            case DraftRouted():
                return self._routed(event.token, np.array(event.experts)[None], event.layer)
            case TokenRouted():
                return self._routed(event.token, event.experts, 0)
            case DraftFinished() if not self.sooner:
                return self._requests(self._wanted)
            case _:
                pass
        return ()

    def _routed(self, token: int, experts: NDArray[np.integer], layer: int) -> Sequence[PrefetchRequest]:
        """experts: (layers, K) from `layer` on; an index past the experts means "none"."""
        mask = np.zeros_like(self._wanted)
        for row, chosen in enumerate(experts):
            mask[layer + row, chosen[(chosen >= 0) & (chosen < mask.shape[1])]] = True
        self._wanted |= mask
        return self._requests(mask) if self.sooner and token == 0 else ()

    def _requests(self, mask: NDArray[np.bool_]) -> Sequence[PrefetchRequest]:
        missing = np.argwhere(mask & ~self._residency()).tolist()
        return [PrefetchRequest(ExpertKey(layer, expert), float(layer)) for layer, expert in missing]

    def choose_victim(self, room: RoomWanted) -> ExpertKey | None:
        """On-demand's choice."""
        return self._cache.victim(room)

    def keep_scores(self, last_use: NDArray[np.int64]) -> KeepScores:
        """On-demand's."""
        return self._cache.keep_scores(last_use)


class SingleSoonerPolicy(SinglePrefetchPolicy):
    """Of the first drafted token, as soon as it is routed."""

    name = "single-sooner"
    sooner = True
