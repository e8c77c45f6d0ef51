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

from collections.abc import Iterable, Sequence

from localmoe.core.events import (
    DraftFinished,
    DraftRouted,
    Event,
    LayerDemanded,
    LayerFinished,
    PrefetchRequest,
    RoomWanted,
    StepFinished,
    StepStarted,
)
from localmoe.core.types import ExpertKey
from localmoe.prefetch.policy import CacheShape

_DECAY = 0.9  # weight of a use one step ago


class MoeSpeqPolicy:
    """State: experts that the current window needs, and a decayed use count of every expert."""

    name = "moe-speq"

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape
        self._needed: dict[ExpertKey, int] = {}  # key -> window tokens that want it
        self._requested: set[ExpertKey] = set()
        self._score: dict[ExpertKey, float] = {}
        self._increment = 1.0  # grows by 1/decay a step, which decays all older uses at once

    def observe(self, event: Event) -> Sequence[PrefetchRequest]:
        """Collect needs while the draft runs and turn them into requests phase by phase."""
        match event:
            case StepStarted():
                self._needed.clear()
                self._requested.clear()
            case DraftRouted():
                return self._draft_routed(event)
            case DraftFinished():  # phase III: saturation
                return self._request(self._needed)
            case LayerDemanded():
                for expert in event.experts:
                    key = ExpertKey(event.layer, expert)
                    self._score[key] = self._score.get(key, 0.0) + self._increment
            case LayerFinished():
                for key in [key for key in self._needed if key.layer == event.layer]:
                    del self._needed[key]
            case StepFinished():
                self._age()
            case _:
                pass
        return ()

    def _draft_routed(self, event: DraftRouted) -> Sequence[PrefetchRequest]:
        total = sum(event.confidences)
        ready: list[ExpertKey] = []
        for expert, confidence in zip(event.experts, event.confidences, strict=True):
            key = ExpertKey(event.layer, expert)
            self._needed[key] = self._needed.get(key, 0) + 1
            # phase I: token 0 is verified in any case; phase II: at least half an equal share of the
            # router's weight
            confident = confidence * len(event.experts) * 2 >= total
            if event.token == 0 or confident or self._needed[key] > 1:
                ready.append(key)
        return self._request(ready)

    def _request(self, keys: Iterable[ExpertKey]) -> Sequence[PrefetchRequest]:
        new = [key for key in keys if key not in self._requested]
        self._requested.update(new)
        return [PrefetchRequest(key, deadline=float(key.layer)) for key in new]

    def _age(self) -> None:
        self._increment /= _DECAY
        if self._increment > 1e12:  # keep the numbers small
            self._score = {key: score / self._increment for key, score in self._score.items()}
            self._increment = 1.0

    def choose_victim(self, room: RoomWanted) -> ExpertKey | None:
        """Belady within the window, decayed frequency beyond it."""
        if room.num_free:
            return None
        outside = [key for key in room.candidates if key not in self._needed]
        if outside:  # ties: min keeps the first, which is the least recently used
            return min(outside, key=lambda key: self._score.get(key, 0.0))
        last = max(room.candidates, key=lambda key: key.layer, default=None)
        return last if last is not None and (room.is_demand or last.layer > room.key.layer) else None
