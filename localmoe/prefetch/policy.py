"""The protocol of a prefetch policy. A policy decides; it never touches a stream, a slot or a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localmoe.core.events import Event, PrefetchRequest, RoomWanted
from localmoe.core.types import ExpertKey


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a policy may know of the machine: MoE layers, experts a layer, experts a token, slots."""

    num_layers: int
    num_experts: int
    experts_per_token: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class KeepScores:
    """Which experts to keep, all at once: a GPU picks victims by itself in the middle of a pass.

    Attributes:
        scores: float32 (L, E); the lowest makes room, an infinite one never does.
        per_layer: room for an expert is made among its own layer's experts only.
    """

    scores: NDArray[np.float32]
    per_layer: bool


class Policy(Protocol):
    """Sees every event in order and answers with prefetch requests; is asked for a victim whenever a copy
    needs room, or for the scores of all experts before a pass that the host does not see."""

    name: str

    def observe(self, event: Event) -> Sequence[PrefetchRequest]:
        """Requests that this event gives rise to. An expert that is here already costs nothing to request."""

    def choose_victim(self, room: RoomWanted) -> ExpertKey | None:
        """Which of `room.candidates` makes room for `room.key`.

        None means: take a free slot if there is one; otherwise a prefetch waits and a demand takes the oldest
        candidate.
        """

    def keep_scores(self, last_use: NDArray[np.int64]) -> KeepScores:
        """Scores for the pass that comes next. last_use: (L, E), number of the last pass that used each
        expert."""


PolicyFactory = Callable[[CacheShape], Policy]
