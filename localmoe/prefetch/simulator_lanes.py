"""An expert memory in simulated time whose CPU computes a part of what a pass misses, as the engine's does
beside whole passes on a GPU: divided likewise, if by 20 parts of an expert (kernels.gpu.lane_shares), and
completed afterwards by the same rule (experts.slot_worth). Computes nothing.

What the link still has to copy of a pass's experts, it does while it is idle; where it is asked for more
before, that waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localmoe.experts.lane_trial import LaneTrial
from localmoe.experts.slot_worth import SlotWorth
from localmoe.prefetch.scheduler import Scheduler
from localmoe.prefetch.simulator_passes import PassMemory
from localmoe.prefetch.simulator_types import Lane, Machine

_PARTS = 20  # that an expert is split into
# Neither lane takes just as long as expected, so one waits for the other: a layer whose experts both have a
# part in takes so much longer than by the lanes' rates (the rows of benchmarks/simulator_lanes.py)
_APART_S = 25e-6


def divide(
    tokens: Sequence[int], copy_s: float, lane: Lane, busy_s: float = 0.0, others_s: float = 0.0
) -> list[float]:
    """The CPU's share of each missing expert, so that both lanes end together: whole experts first, then a
    part of one.

    Args:
        tokens: that chose each of them, in the order in which the CPU takes them.
        copy_s: of an expert over the link. busy_s: in which the link has other things to bring before.
        others_s: of experts that the CPU computes beside these.
    """
    shares, spent_s = [], lane.handover_s + others_s
    for place, count in enumerate(tokens):
        cost_s = lane.seconds(count)
        part = (busy_s + (len(tokens) - place) * copy_s - spent_s) / (cost_s + copy_s)
        shares.append(round(min(max(part, 0.0), 1.0) * _PARTS) / _PARTS)
        spent_s += cost_s
    return shares


def in_turn(missing: Sequence[int], tokens: NDArray[np.int64], rotation: int, num_experts: int) -> list[int]:
    """The order in which the CPU takes them: those of few tokens first, of equals another one each time."""
    turn = rotation % num_experts
    return sorted(missing, key=lambda expert: (tokens[expert], (expert - turn) % num_experts))


class LaneMemory(PassMemory):
    """Slots, copies in flight, and experts on the CPU.

    Attributes:
        cpu_busy_s: in which the CPU computed experts.
    """

    def __init__(self, machine: Machine, scheduler: Scheduler, lane: Lane) -> None:
        super().__init__(machine, scheduler)
        self.cpu_busy_s = 0.0
        self._lane = lane
        self._trial = LaneTrial()
        self._single = False  # the pass at hand is of one token
        self._worth = SlotWorth()
        self._changes: list[tuple[int, int]] = []  # experts that entered, and left for them (-1: nobody)
        self._owed_s = 0.0  # of the link, for what is to be completed
        self._rotation = 0

    def begin_answer(self) -> None:
        """As of PassMemory."""
        super().begin_answer()
        self._trial.begin_text()

    def advance(self, seconds: float) -> None:
        """Let time pass; what is to be completed comes once no copy runs."""
        copying_s = self._left_s + (len(self._copies) - 1) * self._machine.copy_s if self._copies else 0.0
        super().advance(seconds)
        self._owed_s = max(0.0, self._owed_s - max(0.0, seconds - copying_s))

    def run_pass(self, tokens: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """As of PassMemory; of one token it is tried out whether the CPU helps."""
        began, machine = self.now, self._machine
        self._single = int(tokens.sum()) == machine.num_layers * machine.experts_per_token
        found = super().run_pass(tokens)
        if self._single and not self._lane.always:
            self._trial.note(self.now - began)
        return found

    def _bring(self, layer: int, missing: list[int], tokens: NDArray[np.int64]) -> list[int]:
        machine, lane = self._machine, self._lane
        if self._single and self._trial.out:
            return super()._bring(layer, missing, tokens)
        self._rotation += 7
        order = in_turn(missing, tokens, self._rotation, machine.num_experts)
        counts = [int(tokens[e]) for e in order]
        busy_s = self._owed_s + len(self._copies) * machine.copy_s
        shares = divide(counts, machine.copy_s, lane, busy_s + _APART_S)
        cpu_s = sum(share * lane.seconds(count) for share, count in zip(shares, counts, strict=True))
        cpu_s += lane.handover_s if cpu_s else 0.0
        link_s = sum(1.0 - share for share in shares) * machine.copy_s
        began = self.now
        if link_s:
            owed_s, self._owed_s = self._owed_s, 0.0
            self._read_over_link(owed_s + link_s + (_APART_S if cpu_s else 0.0))
        self.advance(max(0.0, began + cpu_s - self.now))
        self.cpu_busy_s += cpu_s
        self.copies += link_s / machine.copy_s
        self.computed[layer, [e for e, share in zip(order, shares, strict=True) if share == 1.0]] = True
        may_take_s = self._worth.link_time(machine.layer_s, machine.copy_s)
        entering = []
        for expert, share in zip(order, shares, strict=True):
            rest_s = share * machine.copy_s
            if share == 0.0 or (share < 1.0 and rest_s <= may_take_s):
                entering.append(expert)
                self._owed_s += rest_s
                self.copies += share
        return sorted(entering)  # the kernel finds places in this order

    def _kept(self, layer: int, expert: int, victim: int | None) -> None:
        first = layer * self._machine.num_experts
        self._changes.append((first + expert, -1 if victim is None else first + victim))

    def _passed(self, demanded: NDArray[np.bool_]) -> None:
        owed_s, self._owed_s = self._owed_s, 0.0
        self._read_over_link(owed_s)
        entered, left = np.array(self._changes, dtype=np.int64).reshape(-1, 2).T
        self._worth.observe(demanded, entered, left)
        self._changes.clear()
