"""An expert memory in simulated time whose experts lie on the disk, and whose CPU computes all that is in no
slot, from RAM or once it was read, beside whole passes on a GPU: by the rules of experts.disk_memory and
experts.disk_lane. Reads, copies and computes nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localmoe.core.types import ExpertKey
from localmoe.experts.worth_a_slot import SOON, most_lent, worth_a_slot
from localmoe.prefetch.scheduler import Scheduler
from localmoe.prefetch.simulator_disk import SimulatedReads
from localmoe.prefetch.simulator_passes import PassMemory
from localmoe.prefetch.simulator_types import Disk, Experts, Lane, Machine


class DiskPassMemory(PassMemory):
    """Slots, copies in flight, experts on the CPU, and reads.

    Attributes:
        cpu_busy_s: in which the CPU computed experts.
    """

    def __init__(self, machine: Machine, scheduler: Scheduler, lane: Lane, disk: Disk) -> None:
        super().__init__(machine, scheduler)
        self.cpu_busy_s = 0.0
        self._lane = lane
        self._reads = SimulatedReads(disk, (machine.num_layers, machine.num_experts))
        self._most_lent = most_lent(disk.ram_experts, machine.num_experts)
        self._worthy: list[ExpertKey] = []  # behind the last pass
        self._ready: list[ExpertKey] = []  # and of passes before, from the next one on
        self._behind = False
        self._may_leave = np.zeros((machine.num_layers, machine.num_experts), dtype=np.bool_)  # their slots

    @property
    def reads(self) -> int:
        """Experts that were read from the disk."""
        return self._reads.done

    def prefetch(self, key: ExpertKey, deadline: float) -> None:
        """Ask for a copy ahead of need, or, of what is not in RAM, have it read."""
        if self._here[key]:
            return
        if self._reads.here[key]:
            super().prefetch(key, deadline)
        else:
            self._reads.prefetch(key)

    def begin_step(self, drafted: int) -> None:
        """A pass without drafts begins before the host has heard of the one before, and copies come a pass
        later."""
        self._behind = not drafted

    def advance(self, seconds: float) -> None:
        """Let time pass; copies and reads go on."""
        super().advance(seconds)
        self._reads.advance(seconds)

    def pump(self) -> None:
        """As PassMemory's, of what is in RAM still, and of what is worth a slot."""
        if not self._behind:
            self._ready, self._worthy = [*self._ready, *self._worthy], []
        for key in self._ready:
            super().prefetch(key, SOON)
        self._ready, self._worthy = self._worthy, []
        wanted = [key for key, _ in self._queue.in_order()]
        room = max(0, self._most_lent - len(self._copies))
        for place, key in enumerate(wanted):
            if place >= room or not self._reads.here[key]:
                self._queue.remove(key)
        super().pump()

    def _issue(self, key: ExpertKey) -> None:
        super()._issue(key)
        self._reads.places.held[key] += 1

    def _complete(self) -> None:
        self._reads.places.held[self._copies[0]] -= 1
        super()._complete()

    def _room(self) -> tuple[NDArray[np.float32], bool]:
        scores = self._reads.places.worth().astype(np.float32)
        scores[~self._here | self._guarded | ~self._may_leave] = np.inf
        return scores, False

    def _bring(self, layer: int, missing: list[int], tokens: NDArray[np.int64]) -> list[int]:
        lane, reads = self._lane, self._reads
        hits, late, absent = reads.demand(layer, missing, counts=False)
        busy_s = lane.handover_s + sum(lane.seconds(int(tokens[e])) for e in hits)
        self.advance(busy_s)
        left = [*late, *absent]
        while left:
            arrived = [expert for expert in left if reads.here[layer, expert]]
            if not arrived:
                reads.ask_again(layer, left)
                self.advance(reads.next_s)
                continue
            left = [expert for expert in left if expert not in arrived]
            arrived_s = sum(lane.seconds(int(tokens[e])) for e in arrived)
            busy_s += arrived_s
            self.advance(arrived_s)
        reads.let_go(layer, missing)
        self.cpu_busy_s += busy_s
        self.computed[layer, missing] = True
        return []

    def _passed(self, demanded: NDArray[np.bool_]) -> None:
        places = self._reads.places
        places.note_pass(demanded)
        places.elsewhere = self._here.copy()
        self._may_leave = places.may_leave(self._here)
        self._worthy = worth_a_slot(places.worth(), self.computed, self._may_leave, self.free)

    def note_prompt(self, chosen: Experts) -> None:
        """As PassMemory's: RAM keeps what is used most, and of late, of what it asked for."""
        for layer in range(self._machine.num_layers):
            self._reads.note_tokens(layer, chosen[:, layer])

    def stream(self, tokens: NDArray[np.int64]) -> None:
        """A prompt's pass: as any other."""
        self.run_pass(tokens)
