"""The protocol of a prefetch policy. A policy decides; it never touches a stream, a slot or a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from localmoe.core.events import Event, PrefetchRequest, RoomWanted
from localmoe.core.types import ExpertKey


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a policy may know of the machine: MoE layers, experts a layer, experts a token, slots."""

    num_layers: int
    num_experts: int
    experts_per_token: int
    num_slots: int


class Policy(Protocol):
    """Sees every event in order and answers with prefetch requests; is asked for a victim whenever a copy
    needs room."""

    name: str

    def observe(self, event: Event) -> Sequence[PrefetchRequest]:
        """Requests that this event gives rise to. An expert that is here already costs nothing to request."""

    def choose_victim(self, room: RoomWanted) -> ExpertKey | None:
        """Which of `room.candidates` makes room for `room.key`.

        None means: take a free slot if there is one; otherwise a prefetch waits and a demand takes the oldest
        candidate.
        """


PolicyFactory = Callable[[CacheShape], Policy]
