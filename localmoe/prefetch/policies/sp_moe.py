"""sp-moe: SP-MoE (Chen et al. 2025): while the draft runs, its layer l <= Lc says which experts the target
will need there, and those that are not here are copied, a layer's together; evicted is the least recently
used.

The paper applies the TARGET's gate to the draft's attention output. Here draft and target share gates, norms
and attention, so what the draft's router chooses is that very value.

Cutoff layer Lc (3.1.2): the largest L with N <= slots and max{(L - 1) t_comp + k t_io, N t_io} <= L_all
t_comp, where t_comp is the draft's time for a layer, t_io that of one copy (the link's, or the host's to ask
for it if that is longer), k the experts that a token uses, N = k L. It is solved whenever measured rates
drift. Unmeasured, all layers count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localmoe.core.events import (
    DraftRouted,
    Event,
    PrefetchRequest,
    Rates,
    RatesMeasured,
    RoomWanted,
    StepStarted,
    TokenRouted,
)
from localmoe.core.types import ExpertKey
from localmoe.prefetch.policy import CacheShape, KeepScores, PolicyBase


class SpMoePolicy(PolicyBase):
    """A cutoff, and a queue of batches in the order in which the draft came to them."""

    name = "sp-moe"

    def __init__(self, shape: CacheShape, fixed_cutoff: int | None = None) -> None:
        """fixed_cutoff: Lc whatever is measured, to see what it is worth (figure 14)."""
        super().__init__(shape)
        self._solves = fixed_cutoff is None
        # layers that are prefetched for: the first so many
        self.cutoff = cutoff_layers(shape, shape.rates) if fixed_cutoff is None else fixed_cutoff
        self._batches = 0  # of this step

    def observe(self, event: Event) -> Sequence[PrefetchRequest]:
        """A batch a drafted layer, up to the cutoff."""
        match event:
            case StepStarted():
                self._batches = 0
            case RatesMeasured() if self._solves:
                self.cutoff = cutoff_layers(self.shape, event.rates)
            case DraftRouted() if event.layer < self.cutoff:
                return self._batch(event.layer, event.experts)
            case TokenRouted():
                rows = event.experts[: self.cutoff].tolist()
                return [request for layer, row in enumerate(rows) for request in self._batch(layer, row)]
            case _:
                pass
        return ()

    def _batch(self, layer: int, experts: Sequence[int]) -> Sequence[PrefetchRequest]:
        here = self._residency()[layer]
        self._batches += 1
        return [
            PrefetchRequest(ExpertKey(layer, e), deadline=float(self._batches))
            for e in experts
            if 0 <= e < self.shape.num_experts and not here[e]
        ]

    def choose_victim(self, room: RoomWanted) -> ExpertKey | None:
        """A free slot, else the least recently used."""
        return None if room.num_free else next(iter(room.candidates), None)

    def keep_scores(self, last_use: NDArray[np.int64]) -> KeepScores:
        """The longer ago, the sooner it goes, whatever the layer."""
        return KeepScores(last_use.astype(np.float32), per_layer=False)


def cutoff_layers(shape: CacheShape, rates: Rates) -> int:
    """How many layers, from the first on, are prefetched for: Lc."""
    layers, k = shape.num_layers, shape.experts_per_token
    fitting = [L for L in range(layers + 1) if k * L <= shape.num_slots]
    if rates.copy_s is None or rates.draft_token_s is None:
        return fitting[-1]
    t_io, t_comp = max(rates.copy_s, rates.issue_s or 0.0), rates.draft_token_s / layers
    in_time = [L for L in fitting if max((L - 1) * t_comp + k * t_io, k * L * t_io) <= layers * t_comp]
    return in_time[-1] if in_time else 0
