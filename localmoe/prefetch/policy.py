"""The protocol of a prefetch policy. A policy decides; it never touches a stream, a slot or a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localmoe.core.events import NOTHING_MEASURED, Event, PrefetchRequest, Rates, RoomWanted
from localmoe.core.types import ExpertKey


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a policy may know of the machine: MoE layers, experts a layer, experts a token, slots, and the
    rates that are known before anything was measured."""

    num_layers: int
    num_experts: int
    experts_per_token: int
    num_slots: int
    rates: Rates = NOTHING_MEASURED

    def known(self, experts: Sequence[int]) -> list[int]:
        """Those of a router's choices that are experts: an index outside of them means "none"."""
        return [expert for expert in experts if 0 <= expert < self.num_experts]


Residency = Callable[[], NDArray[np.bool_]]  # (L, E): in a slot, or on its way there; not to be written to


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
    wants_next_gate: bool  # NextGateGuessed is made only for policies that ask for it
    needs_layers: bool  # decides in the middle of a pass: where whole passes run, only its cache is left

    @property
    def asks_after_drafts(self) -> bool:
        """Whether what the last draft routes, or DraftFinished, may give rise to requests; else the verify
        pass need not wait for the host to hear of them."""

    def watch(self, residency: Residency) -> None:
        """Where to look up what is in slots. Called again when the slots are made anew."""

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


class PolicyBase:
    """Defaults of a policy: no events beyond the common ones, and what is in slots at hand."""

    wants_next_gate = False
    needs_layers = False

    def __init__(self, shape: CacheShape) -> None:
        nothing = np.zeros((shape.num_layers, shape.num_experts), dtype=np.bool_)
        self.shape = shape
        self._residency: Residency = lambda: nothing

    @property
    def asks_after_drafts(self) -> bool:
        """It may."""
        return True

    def watch(self, residency: Residency) -> None:
        """Where to look up what is in slots."""
        self._residency = residency


PolicyFactory = Callable[[CacheShape], Policy]
