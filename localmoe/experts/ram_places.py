"""Which of a model's experts RAM holds, where all lie on the disk, and which of them gives way. Moves no
bytes.

What gives way is what is worth least by the measure that slots go by too (core.reuse_decay). By either part
of it alone, or in the order of last uses, fewer are there when they are asked for. What was brought ahead
stays until its layer has asked, and then as what it is worth.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localmoe.core.reuse_decay import FREQUENCY_DECAY, FREQUENCY_WEIGHT, TOKEN_DECAY
from localmoe.core.types import ExpertKey
from localmoe.experts.ram_reach import RamReach
from localmoe.experts.worth_a_slot import may_leave

NOWHERE = -1
MOST_AHEAD = 4  # reads for what comes that are under way: a demand waits for some of them
MOST_SWEPT = 16  # of a pass that asks for most experts, and in the order of layers
_FRESH = 1e9  # worth of what the pass at hand has brought, if that is noted at its end only


def sweeps(asked: int, choices: int, num_experts: int) -> bool:
    """Whether a pass asks for most experts of a layer, as a prompt's do: for so many here, or its tokens make
    so many choices."""
    return max(asked, choices // 4) > num_experts // 2


class RamPlaces:
    """Places for so many experts.

    Attributes:
        place: int32 (L, E), NOWHERE for those that have none.
        held: int32 (L, E), how many hold an expert there, which keeps its place meanwhile.
        elsewhere: bool (L, E), those that are in a GPU's memory too, and go first.
        reach: those that a GPU may read any moment, and which keep their places, too.
    """

    def __init__(self, num_places: int, shape: tuple[int, int]) -> None:
        """shape: (L, E)."""
        self.place: NDArray[np.int32] = np.full(shape, NOWHERE, dtype=np.int32)
        self.held: NDArray[np.int32] = np.zeros(shape, dtype=np.int32)
        self.elsewhere: NDArray[np.bool_] = np.zeros(shape, dtype=np.bool_)
        self.reach = RamReach(num_places, shape)
        self._free = list(range(num_places - 1, -1, -1))
        self._recent, self._frequency = np.zeros(shape), np.zeros(shape)
        self._when = np.zeros(shape, dtype=np.int64)  # that they were noted, in passes
        self._value: NDArray[np.float64] | None = None  # of all, in this pass, once it was asked for
        self._fresh = np.zeros(shape, dtype=np.bool_)
        self._unused = np.zeros(shape, dtype=np.bool_)  # brought ahead of need, and not asked for yet
        self._awaited = np.zeros(shape, dtype=np.bool_)  # of these, whose layer has not asked since
        self._now = self._layers_asked = 0

    def note_demand(self, layer: int, experts: Iterable[int]) -> None:
        """Of one pass of a layer."""
        self._layers_asked += 1
        if self._layers_asked % self.place.shape[0] == 0:
            self._next_pass()
        self._fresh[layer] = self._awaited[layer] = False
        self._note((layer, list(experts)))

    def note_pass(self, demanded: NDArray[np.bool_]) -> None:
        """Of one pass of all layers, (L, E)."""
        self._next_pass()
        self._fresh[:] = self._awaited[:] = False
        self._note(np.nonzero(demanded))

    def note_tokens(self, layer: int, chosen: NDArray[np.int32]) -> None:
        """Of a layer's pass of several tokens, which was noted as one: what each chose, (n, K), nobody by
        numbers beyond. Else a prompt, which asks for nearly all, would leave nothing to tell them apart
        by."""
        tokens, top_k = chosen.shape
        ages, experts = np.repeat(np.arange(tokens)[::-1], top_k), chosen.ravel()
        known = experts < self.place.shape[1]
        ages, experts, once = ages[known], experts[known], 1.0 - FREQUENCY_DECAY
        self._recent[layer] += self._beyond(experts, np.power(TOKEN_DECAY, ages), 1.0)
        self._frequency[layer] += self._beyond(experts, once * np.power(FREQUENCY_DECAY, ages), once)
        self._value = None

    def _beyond(
        self, experts: NDArray[np.int32], worth: NDArray[np.float64], noted: float
    ) -> NDArray[np.float64]:
        """(E,): what all uses of each expert are worth, beyond what was noted of those that have any."""
        found = np.bincount(experts, worth, self.place.shape[1]).astype(np.float64)
        return np.where(found > 0.0, found - noted, 0.0)

    def _note(self, at: tuple[Any, ...]) -> None:
        age = self._now - self._when[at]
        self._recent[at] = self._recent[at] * TOKEN_DECAY**age + 1.0
        self._frequency[at] = self._frequency[at] * FREQUENCY_DECAY**age + (1.0 - FREQUENCY_DECAY)
        self._when[at] = self._now
        self._unused[at] = False
        if self._value is not None:
            self._value[at] = self._recent[at] + FREQUENCY_WEIGHT * self._frequency[at]

    def _next_pass(self) -> None:
        self._now += 1
        self._value = None

    def forget_unused(self) -> None:
        """What was brought so far counts no more as brought in vain."""
        self._unused[:] = False

    def free_place(self) -> int | None:
        """One that nobody has, the caller's from here on."""
        return self._free.pop() if self._free else None

    def victim(self, *, ahead: bool, spared: Collection[ExpertKey] = (), before: int = 0) -> ExpertKey | None:
        """Who gives way next, of those that nobody holds; None: nobody can.

        Args:
            before: of a pass that asks for most experts of all layers in turn, those of the layers before
                this one first, which are asked for again last; 0: it is no such pass.
            ahead: to make room for one that is brought ahead of need, for which others like it do not go.
            spared: who does not, either.
        """
        may_go = self._may_go()
        others = may_go & ~self._awaited
        if others.any() or ahead:
            may_go = others
        for key in spared:
            may_go[key] = False
        if not may_go.any():
            return None
        worth = np.where(self.elsewhere, -1.0, self.worth())
        if may_go[:before].any():
            may_go[before:] = False
        else:
            worth[self._fresh] = _FRESH
        worst = int(np.where(may_go, worth, np.inf).argmin())
        return ExpertKey(*divmod(worst, self.place.shape[1]))

    def doubled(self, spared: Collection[ExpertKey] = ()) -> ExpertKey | None:
        """Who is in a GPU's memory too, and whom nobody holds here; None: nobody is. spared: as victim's."""
        may_go = self._may_go() & self.elsewhere
        for key in spared:
            may_go[key] = False
        at = np.flatnonzero(may_go)
        return ExpertKey(*divmod(int(at[0]), self.place.shape[1])) if len(at) else None

    def _may_go(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (self.place != NOWHERE) & (self.held == 0) & ~self.reach.held
        return found

    def worth(self) -> NDArray[np.float64]:
        """(L, E): the higher, the sooner it is asked for again. Not to be written to."""
        if self._value is None:  # which takes longer than all else here
            age = self._now - self._when
            self._value = self._recent * TOKEN_DECAY**age
            self._value += FREQUENCY_WEIGHT * self._frequency * FREQUENCY_DECAY**age
        return self._value

    def may_leave(self, in_slots: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """(L, E): who may lose its slot, see worth_a_slot."""
        return may_leave(self.worth(), in_slots, self.place != NOWHERE, ram_is_full=not self._free)

    def evict(self, key: ExpertKey) -> tuple[int, bool]:
        """The place that it had, the caller's from here on, and whether it was brought in vain."""
        place, wasted = int(self.place[key]), bool(self._unused[key])
        self.place[key] = NOWHERE
        self._unused[key] = self._awaited[key] = self._fresh[key] = False
        return place, wasted

    def give(self, place: int, key: ExpertKey, *, asked: bool = False, ahead: bool = False) -> None:
        """It is this expert's. asked: it is needed now. ahead: it will be. Else it fills what is free."""
        self.place[key] = place
        self._unused[key] = self._awaited[key] = ahead
        self._fresh[key] = asked and self._when[key] != self._now

    def forget(self) -> list[ExpertKey]:
        """What was asked for so far; those that give way now, as nobody holds them. No pass is open."""
        self.reach.clear()
        self._recent[:] = self._frequency[:] = 0.0
        self._value = None
        self._fresh[:] = self._awaited[:] = False
        gone = [ExpertKey(*pair) for pair in np.argwhere(self._may_go()).tolist()]
        for key in gone:
            self.give_back(key)
        return gone

    def give_back(self, key: ExpertKey) -> None:
        """It is not there, or no longer."""
        self._free.append(self.evict(key)[0])
