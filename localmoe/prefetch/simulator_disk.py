"""A disk with all experts in simulated time, and RAM that holds some of them: the same decisions about what
gives way as in an engine (experts.ram_places), and the same rules of reading (experts.disk_reads). Reads
nothing.

Reads end one after the other, in the order in which they began: several share what the disk gives, and one is
no faster alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localmoe.core.types import ExpertKey
from localmoe.experts.ram_places import MOST_AHEAD, MOST_SWEPT, NOWHERE, RamPlaces, sweeps
from localmoe.prefetch.simulator_types import Disk, Experts


class SimulatedReads:
    """Attributes:
    here: bool (L, E), all of it in RAM.
    done: experts that were read. prefetched, wasted: of these, ahead of need, and in vain.
    """

    def __init__(self, disk: Disk, shape: tuple[int, int]) -> None:
        """shape: (L, E)."""
        self.places = RamPlaces(min(disk.ram_experts, shape[0] * shape[1]), shape)
        self.here: NDArray[np.bool_] = np.zeros(shape, dtype=np.bool_)
        self.done = self.prefetched = self.wasted = 0
        self._disk = disk
        self._coming: deque[ExpertKey] = deque()
        self._left_s = 0.0  # of the first of them
        self._before = 0  # see RamPlaces.victim

    @property
    def next_s(self) -> float:
        """Seconds until another one is there; some read is under way."""
        assert self._coming, "what is awaited is read, or waits for a place that a read has"
        return self._left_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        while self._coming and self._left_s <= seconds:
            seconds -= self._left_s
            key = self._coming.popleft()
            self.places.held[key] -= 1
            self.here[key] = True
            self.done += 1
            self._left_s = self._disk.read_s
        self._left_s -= seconds if self._coming else 0.0

    def demand(
        self, layer: int, experts: Sequence[int], *, counts: bool, choices: int = 0
    ) -> tuple[list[int], list[int], list[int]]:
        """Ask for a layer's experts now: which are here, on their way, missing. All of them stay, once they
        are there, until `let_go`. counts, choices: see experts.disk_reads.ExpertReads.held."""
        keys = [ExpertKey(layer, expert) for expert in experts]
        if counts:
            self.places.note_demand(layer, experts)
        for key in keys:
            self.places.held[key] += 1
        hits = [key.expert for key in keys if self.here[key]]
        late = [key.expert for key in keys if key in self._coming]
        missing = [key for key in keys if not self.here[key] and key not in self._coming]
        num_layers, num_experts = self.here.shape
        sweeping = sweeps(len(keys), choices, num_experts)
        self._before = layer if sweeping else 0
        self._start(missing)
        if sweeping and layer + 1 < num_layers:
            absent = np.flatnonzero(self.places.place[layer + 1] == NOWHERE)
            best = absent[self.places.worth()[layer + 1, absent].argsort()[::-1]]
            room = max(0, MOST_SWEPT - len(self._coming))
            self._start([ExpertKey(layer + 1, int(expert)) for expert in best[:room]], ahead=True)
        return hits, late, [key.expert for key in missing]

    def note_tokens(self, layer: int, chosen: Experts) -> None:
        """What the tokens of a pass, which was noted, chose in a layer, (n, K)."""
        self.places.note_tokens(layer, chosen)

    def ask_again(self, layer: int, experts: Sequence[int]) -> None:
        """Of a demand, for those that found no place."""
        keys = [ExpertKey(layer, expert) for expert in experts]
        self._start([key for key in keys if not self.here[key] and key not in self._coming])

    def let_go(self, layer: int, experts: Sequence[int]) -> None:
        """Of what was demanded."""
        self.places.held[layer, list(experts)] -= 1

    def prefetch(self, key: ExpertKey) -> None:
        """Read it ahead of need, unless enough others are read."""
        if not self.here[key] and key not in self._coming and len(self._coming) < MOST_AHEAD:
            self._start([key], ahead=True)

    def _start(self, keys: Sequence[ExpertKey], *, ahead: bool = False) -> None:
        for key in keys:
            place = self.places.free_place()
            if place is None:
                victim = self.places.victim(ahead=ahead, before=self._before)
                if victim is None:
                    return
                place, wasted = self.places.evict(victim)
                self.here[victim] = False
                self.wasted += wasted
            self.places.give(place, key, asked=not ahead, ahead=ahead)
            self.places.held[key] += 1  # by the read
            self.prefetched += ahead
            if not self._coming:
                self._left_s = self._disk.start_s + self._disk.read_s
            self._coming.append(key)
