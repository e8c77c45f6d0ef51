"""moe-speq: prefetch what the draft's routing says the verify pass will need (MoE-SpeQ 3.3), and evict by
lookahead.

Three phases over a window of drafted tokens (3.3.2): locality-aware priming (the first token's experts are
certain to be needed: protect those that are here, fetch the rest), bandwidth-guided prefetch (later tokens:
only experts that the router is confident of or that several tokens want), saturation (drafting is done:
everything else). Copies are ordered by the layer that needs them first. Eviction: what the window still
needs stays; beyond it, the expert whose decayed use count is lowest goes. With drafting off there is no
lookahead, and only this frequency rule remains.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localmoe.core.events import (
    DraftFinished,
    DraftRouted,
    Event,
    LayerDemanded,
    LayerFinished,
    PassRouted,
    PrefetchRequest,
    RoomWanted,
    StepFinished,
    StepStarted,
    TokenRouted,
)
from localmoe.core.types import ExpertKey
from localmoe.prefetch.policy import CacheShape, KeepScores

_DECAY = 0.9  # weight of a use one step ago


class MoeSpeqPolicy:
    """State, (L, E) each: how many tokens of the window need an expert, whether it was requested, and its
    decayed use count."""

    name = "moe-speq"

    def __init__(self, shape: CacheShape) -> None:
        cells = (shape.num_layers, shape.num_experts)
        self._needed = np.zeros(cells, dtype=np.int32)
        self._requested = np.zeros(cells, dtype=np.bool_)
        self._score = np.zeros(cells, dtype=np.float64)
        self._increment = 1.0  # grows by 1/decay a step, which decays all older uses at once

    def observe(self, event: Event) -> Sequence[PrefetchRequest]:
        """Collect needs while the draft runs and turn them into requests phase by phase."""
        match event:
            case StepStarted():
                self._needed[:] = 0
                self._requested[:] = False
            case DraftRouted():
                layer = np.array([[event.layer]])
                experts, confidences = np.array([event.experts]), np.array([event.confidences])
                return self._routed(event.token, layer, experts, confidences)
            case TokenRouted():
                layers = np.arange(len(event.experts))[:, None]
                return self._routed(event.token, layers, event.experts, event.confidences)
            case DraftFinished():  # phase III: saturation
                return self._request(*np.nonzero(self._needed))
            case LayerDemanded():
                self._score[event.layer, list(event.experts)] += self._increment
            case LayerFinished():
                self._needed[event.layer] = 0
            case PassRouted():
                self._score += self._increment * event.demanded
                self._needed[:] = 0
            case StepFinished():
                self._age()
            case _:
                pass
        return ()

    def _routed(
        self,
        token: int,
        layers: NDArray[np.integer],
        experts: NDArray[np.integer],
        confidences: NDArray[np.floating],
    ) -> Sequence[PrefetchRequest]:
        """One token's choices at some layers: layers (n, 1), experts and confidences (n, K)."""
        exists = (experts >= 0) & (experts < self._needed.shape[1])
        # phase I: token 0 is verified in any case; phase II: at least half an equal share of the router's
        # weight, or wanted by several tokens
        confident = confidences * (2 * experts.shape[1]) >= confidences.sum(axis=1, keepdims=True)
        rows, columns = np.broadcast_to(layers, experts.shape)[exists], experts[exists]
        self._needed[rows, columns] += 1
        ready = confident[exists] | (self._needed[rows, columns] > 1) | (token == 0)
        return self._request(rows[ready], columns[ready])

    def _request(
        self, layers: NDArray[np.integer], experts: NDArray[np.integer]
    ) -> Sequence[PrefetchRequest]:
        new = ~self._requested[layers, experts]
        layers, experts = layers[new], experts[new]
        self._requested[layers, experts] = True
        return [
            PrefetchRequest(ExpertKey(layer, expert), deadline=float(layer))
            for layer, expert in zip(layers.tolist(), experts.tolist(), strict=True)
        ]

    def _age(self) -> None:
        self._increment /= _DECAY
        if self._increment > 1e12:  # keep the numbers small
            self._score /= self._increment
            self._increment = 1.0

    def choose_victim(self, room: RoomWanted) -> ExpertKey | None:
        """Belady within the window, decayed frequency beyond it."""
        if room.num_free:
            return None
        outside = [key for key in room.candidates if not self._needed[key]]
        if outside:  # ties: min keeps the first, which is the least recently used
            return min(outside, key=lambda key: float(self._score[key]))
        last = max(room.candidates, key=lambda key: key.layer, default=None)
        return last if last is not None and (room.is_demand or last.layer > room.key.layer) else None

    def keep_scores(self, last_use: NDArray[np.int64]) -> KeepScores:
        """Decayed frequency; what the window needs stays."""
        scores = (self._score / self._increment).astype(np.float32)
        scores[self._needed > 0] = np.inf
        return KeepScores(scores, per_layer=False)
