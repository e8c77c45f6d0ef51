"""An expert memory in simulated time whose experts lie on the disk, beside whole passes on a GPU: what is in
no slot the CPU computes, once it was read, or the link brings, if it was in RAM when the pass began. By the
rules of experts.disk_memory and experts.disk_lane. Reads, copies and computes nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localmoe.core.types import ExpertKey
from localmoe.experts.ram_reach import most_lent
from localmoe.experts.worth_a_slot import SOON, worth_a_slot
from localmoe.prefetch.scheduler import Scheduler
from localmoe.prefetch.simulator_disk import SimulatedReads
from localmoe.prefetch.simulator_lanes import divide, in_turn
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
        self._reached = self._here.copy()  # by the link, in the pass at hand
        self._asked_for = self._here.copy()  # by it, and in no slot
        self._rotation = 0
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

    def run_pass(self, tokens: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """As PassMemory's; what is in RAM by now is within the link's reach."""
        self._asked_for[:] = False
        return super().run_pass(tokens)

    def _begun(self) -> None:
        places = self._reads.places
        self._reached = places.reach.prepare(places.worth(), self._reads.here & ~self._here)
        places.reach.opened()

    def _bring(self, layer: int, missing: list[int], tokens: NDArray[np.int64]) -> list[int]:
        reads = self._reads
        self._asked_for[layer, missing] = True
        shares = self._shares(layer, missing, tokens)
        cpu_s = {e: share * self._lane.seconds(int(tokens[e])) for e, share in shares.items() if share}
        self.computed[layer, [expert for expert, share in shares.items() if share == 1.0]] = True
        here, late, absent = reads.demand(layer, list(cpu_s), counts=False, choices=int(tokens.sum()))
        began, crossing = self.now, sum(1.0 - share for share in shares.values())
        self._read_over_link(crossing * self._machine.copy_s)
        reads.advance(self.now - began)
        self.copies += crossing
        busy_s = sum(cpu_s[expert] for expert in here) + (self._lane.handover_s if cpu_s else 0.0)
        self.advance(max(0.0, began + busy_s - self.now))
        left = [*late, *absent]
        while left:
            arrived = [expert for expert in left if reads.here[layer, expert]]
            if not arrived:
                reads.ask_again(layer, left)
                self.advance(reads.next_s)
                continue
            left = [expert for expert in left if expert not in arrived]
            arrived_s = sum(cpu_s[expert] for expert in arrived)
            busy_s += arrived_s
            self.advance(arrived_s)
        reads.let_go(layer, list(cpu_s))
        self.cpu_busy_s += busy_s
        return []

    def _shares(self, layer: int, missing: list[int], tokens: NDArray[np.int64]) -> dict[int, float]:
        """The CPU's, of each: of what the link does not reach all."""
        machine, lane = self._machine, self._lane
        self._rotation += 7
        order = in_turn(missing, tokens, self._rotation, machine.num_experts)
        reached = [expert for expert in order if self._reached[layer, expert]]
        alone = [expert for expert in order if not self._reached[layer, expert]]
        alone_s = sum(lane.seconds(int(tokens[expert])) for expert in alone)
        counts = [int(tokens[expert]) for expert in reached]
        shares = divide(counts, machine.copy_s, lane, len(self._copies) * machine.copy_s, alone_s)
        return {**dict(zip(reached, shares, strict=True)), **dict.fromkeys(alone, 1.0)}

    def _passed(self, demanded: NDArray[np.bool_]) -> None:
        places = self._reads.places
        places.note_pass(demanded)
        places.elsewhere = self._here.copy()
        self._may_leave = places.may_leave(self._here)
        self._worthy = worth_a_slot(places.worth(), self._asked_for, self._may_leave, self.free)
        places.reach.closed()

    def note_prompt(self, chosen: Experts) -> None:
        """As PassMemory's: RAM keeps what is used most, and of late, of what it asked for."""
        for layer in range(self._machine.num_layers):
            self._reads.note_tokens(layer, chosen[:, layer])

    def stream(self, tokens: NDArray[np.int64]) -> None:
        """A prompt's pass: as any other."""
        self.run_pass(tokens)
