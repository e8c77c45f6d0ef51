"""adapmoe: AdapMoE (Zhong et al. 2024): the next layer's gate guesses, of its guesses the first that is not
here is prefetched, and each layer has as many slots as a dynamic programme gives it.

The programme minimises the expected copies on demand, sum over layers of f_l(s_l) with sum s_l = S. With s of
E experts here, any set alike likely, the number M missing of a token's K is hypergeometric, and a prefetch
that is right (probability a_l, measured) saves one copy: f_l(s) = (1 - a_l) E[M] + a_l E[max(M - 1, 0)]. For
K = 2 and E = 8 that is the paper's formula for tokens with two experts.

Left out: adaptive gating (a token's second expert is dropped where it weighs little), because it changes what
the model says. Guesses need the events of single layers; where whole passes run, the cache alone is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import comb

import numpy as np
from numpy.typing import NDArray

from localmoe.core.events import (
    Event,
    LayerDemanded,
    NextGateGuessed,
    PrefetchRequest,
    RoomWanted,
    StepFinished,
)
from localmoe.core.types import ExpertKey
from localmoe.prefetch.lru_shares import LruShares
from localmoe.prefetch.policy import CacheShape, KeepScores, PolicyBase

_RESOLVE_STEPS = 64  # so many steps apart the shares are computed anew
_ACCURACY_WEIGHT = 0.05  # of the newest guess
_FIRST_ACCURACY = 0.8


class AdapMoePolicy(PolicyBase):
    """LRU a layer with shares of their own, one guess ahead."""

    name = "adapmoe"
    wants_next_gate = True
    needs_layers = True

    def __init__(self, shape: CacheShape) -> None:
        super().__init__(shape)
        self._cache = LruShares(shape.num_layers, shape.num_slots)
        self._accuracy = np.full(shape.num_layers, _FIRST_ACCURACY)
        self._accuracy[0] = 0.0  # nobody guesses for the first layer
        self._guess: ExpertKey | None = None
        self._steps = 0

    def observe(self, event: Event) -> Sequence[PrefetchRequest]:
        """Ask for the first guess that is not here; learn whether it was right."""
        match event:
            case NextGateGuessed():
                here = self._residency()[event.layer]
                wanted = self.shape.known(event.experts)[: self.shape.experts_per_token]
                first = next((e for e in wanted if not here[e]), None)
                self._guess = None if first is None else ExpertKey(event.layer, first)
                return () if self._guess is None else [PrefetchRequest(self._guess, float(event.layer))]
            case LayerDemanded() if self._guess is not None and self._guess.layer == event.layer:
                right = self._guess.expert in event.experts
                self._accuracy[event.layer] += _ACCURACY_WEIGHT * (right - self._accuracy[event.layer])
                self._guess = None
            case StepFinished():
                if self._steps % _RESOLVE_STEPS == 0:
                    self._resolve()
                self._steps += 1
            case _:
                pass
        return ()

    def _resolve(self) -> None:
        shape = self.shape
        if self._cache.layers_have_shares:
            costs = expected_copies(shape.num_experts, shape.experts_per_token, self._accuracy)
            self._cache.shares = best_shares(costs, shape.num_slots)

    def choose_victim(self, room: RoomWanted) -> ExpertKey | None:
        """The least recently used expert of the layer, once it has its share of the slots."""
        return self._cache.victim(room)

    def keep_scores(self, last_use: NDArray[np.int64]) -> KeepScores:
        """The longer ago, the sooner it goes."""
        return self._cache.keep_scores(last_use)


def expected_copies(num_experts: int, top_k: int, accuracy: NDArray[np.float64]) -> NDArray[np.float64]:
    """f (L, E + 1): expected copies on demand of a token at each layer with 0 .. E of its experts here."""
    all_missing, beyond_first = _missing(num_experts, top_k)
    a = accuracy[:, None]
    costs: NDArray[np.float64] = (1.0 - a) * np.array(all_missing) + a * np.array(beyond_first)
    return costs


@cache
def _missing(num_experts: int, top_k: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """E[M] and E[max(M - 1, 0)] for s = 0 .. E: M of the K are among the E - s that are not here."""
    draws = comb(num_experts, top_k)
    expected, beyond = [], []
    for here in range(num_experts + 1):
        absent = num_experts - here
        chances = [comb(absent, m) * comb(here, top_k - m) / draws for m in range(top_k + 1)]
        expected.append(sum(m * chance for m, chance in enumerate(chances)))
        beyond.append(sum((m - 1) * chance for m, chance in enumerate(chances) if m > 1))
    return tuple(expected), tuple(beyond)


def best_shares(costs: NDArray[np.float64], num_slots: int) -> list[int]:
    """Slots of each layer, at least one and summing to `num_slots` (or to all experts), with the least total
    cost. costs: (L, E + 1)."""
    layers, sizes = costs.shape
    budget = min(num_slots, layers * (sizes - 1))
    best = np.full(budget + 1, np.inf)
    best[0] = 0.0
    taken = np.zeros((layers, budget + 1), dtype=np.int64)
    for layer, row in enumerate(costs):
        options = np.full((sizes, budget + 1), np.inf)
        for size in range(1, min(sizes, budget + 1)):
            options[size, size:] = best[: budget + 1 - size] + row[size]
        taken[layer] = options.argmin(axis=0)
        best = options.min(axis=0)
    shares, left = [], budget
    for layer in range(layers - 1, -1, -1):
        shares.append(int(taken[layer, left]))
        left -= shares[-1]
    return shares[::-1]
