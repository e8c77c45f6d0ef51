"""Experts in simulated time that the CPU computes where they lie in RAM, layer by layer, and that come there
from the disk: the way of an engine without a GPU. Reads and computes nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
from numpy.typing import NDArray

from localmoe.core.types import ExpertKey
from localmoe.experts.ram_places import NOWHERE
from localmoe.prefetch.simulator_disk import SimulatedReads
from localmoe.prefetch.simulator_types import Disk, Experts, Machine


class InPlaceMemory:
    """Stands where LayerMemory does; there are no slots, and what is in RAM is a hit."""

    copies = 0  # nothing is copied

    def __init__(self, machine: Machine, disk: Disk) -> None:
        self.now = self.stall_s = 0.0
        self._machine = machine
        self._reads = SimulatedReads(disk, (machine.num_layers, machine.num_experts))

    @property
    def lock(self) -> AbstractContextManager[object]:
        """There is one thread."""
        return nullcontext()

    @property
    def reads(self) -> int:
        """Experts that were read from the disk."""
        return self._reads.done

    @property
    def prefetched(self) -> int:
        """Those of them that were read ahead of need."""
        return self._reads.prefetched

    @property
    def wasted(self) -> int:
        """Those of the latter that gave way before anybody asked for them."""
        return self._reads.wasted

    def residency(self) -> NDArray[np.bool_]:
        """(L, E): in RAM, or on its way there."""
        found: NDArray[np.bool_] = self._reads.places.place != NOWHERE
        return found

    def begin_answer(self) -> None:
        """What was prefetched for the answer before is no waste of the next one, as in an engine."""
        self._reads.places.forget_unused()

    def prefetch(self, key: ExpertKey, deadline: float) -> None:
        """Read it ahead of need."""
        self._reads.prefetch(key)

    def drop_prefetches(self, layer: int | None = None) -> None:
        """What was begun goes on."""

    def advance(self, seconds: float) -> None:
        """Let time pass; reads go on."""
        self.now += seconds
        self._reads.advance(seconds)

    def demand(self, layer: int, experts: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Ask for a layer's experts now: which are here, on their way, missing. `compute` comes next."""
        return self._reads.demand(layer, experts, counts=True)

    def note_tokens(self, layer: int, chosen: Experts) -> None:
        """What the tokens of a pass chose in the layer that was demanded last, (n, K)."""
        if len(chosen) > 1:
            self._reads.note_tokens(layer, chosen)

    def compute(self, layer: int, ready: list[int], awaited: list[int]) -> None:
        """Those that are here first, the others as they arrive."""
        expert_s = self._machine.expert_s
        self.advance(expert_s * len(ready))
        left = awaited
        while left:
            arrived = [expert for expert in left if self._reads.here[layer, expert]]
            if arrived:
                left = [expert for expert in left if expert not in arrived]
                self.advance(expert_s * len(arrived))
                continue
            self._reads.ask_again(layer, left)
            waited_s = self._reads.next_s
            self.stall_s += waited_s
            self.advance(waited_s)
        self._reads.let_go(layer, [*ready, *awaited])
