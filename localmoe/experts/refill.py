"""Which experts come into slots beside plain passes: those that passes missed and that entered no slot, since
the CPU computed them in whole or in part. Where layers miss many, the link reads some whole, which enter
slots by themselves; where they miss one or two, the lanes share each, and the slots would hold for good what
they held. How many copies at a time follows from what earlier ones turned out to be worth. Copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localmoe.core.types import ExpertKey
from localmoe.experts.victims import worst_key

_SPARE = 16  # of the slots, one in so many may be spare, so that a copy need not wait for readers
_HORIZON = 24  # passes for which a change of slots is followed
_LEAST, _FIRST, _MOST = 1.0, 2.0, 24.0  # copies under way at a time
# A copy keeps the link from sharing in what is missing for as long as both lanes take for one expert, so it
# has to save more than one use of an expert that would be missing
_WORTH, _NOT_WORTH = 2.0, 1.2
_STEP = 1.05  # factor of the rate a pass
_SMOOTHING = 0.02  # weight of one followed change in the mean
# Misses a layer below which copies beside passes pay, and above which they do not any more, as shares of the
# misses of which the link reads one whole; by a clock of layers with the rates of an H200's lanes, for
# uniform and sticky routing and such with favourites (docs/log.md)
_FEW, _MANY = 0.46, 0.58
_MISS_SMOOTHING = 0.1  # weight of one pass


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """Experts to copy, and experts whose slots are wanted; equally many but while spare slots are made."""

    enter: list[ExpertKey]
    leave: list[ExpertKey]


class Refill:
    """For L layers of E experts, of which `num_slots` are in slots.

    Attributes:
        rate: copies under way at a time for which others may leave; to fill empty slots there may be more.
        pays: whether there are so few misses that none would enter slots by itself.
        gain: uses of what entered less uses of what left for it, within the horizon, in the mean.
    """

    def __init__(self, num_layers: int, num_experts: int, num_slots: int) -> None:
        self._most_spare = max(1, num_slots // _SPARE)
        self._missed = np.zeros((num_layers, num_experts), dtype=np.bool_)
        self._changes = np.zeros((4, 0), dtype=np.int64)  # entered, left, age, gain; left: -1 for nobody
        self.rate, self.gain = _FIRST, (_WORTH + _NOT_WORTH) / 2
        self._misses, self.pays = float("inf"), False

    def count(self, missed: NDArray[np.bool_], whole_from: float) -> None:
        """A pass of one token missed these, (L, E). whole_from: misses of a layer of which the link reads one
        whole."""
        misses = float(missed.sum()) / len(missed)
        if self._misses < float("inf"):
            misses = self._misses + _MISS_SMOOTHING * (misses - self._misses)
        self._misses = misses
        self.pays = misses < (_MANY if self.pays else _FEW) * whole_from

    def observe(self, demanded: NDArray[np.bool_], missed: NDArray[np.bool_]) -> None:
        """A pass is over. missed: (L, E), what it asked for and was in no slot."""
        self._missed = missed
        if not self._changes.size:
            return
        asked = np.append(demanded.reshape(-1), False)  # asked[-1]: of nobody
        entered, left, age, gain = self._changes
        gain += asked[entered].astype(np.int64) - asked[left]
        age += 1
        over = age >= _HORIZON
        if over.any():
            keep = (1 - _SMOOTHING) ** int(over.sum())
            self.gain = keep * self.gain + (1 - keep) * float(gain[over].mean())
            self._changes = self._changes[:, ~over]
            if self.gain > _WORTH:
                self.rate = min(self.rate * _STEP, _MOST)
            elif self.gain < _NOT_WORTH:
                self.rate = max(self.rate / _STEP, _LEAST)

    def choose(
        self, scores: NDArray[np.float32], leavable: NDArray[np.bool_], here: NDArray[np.bool_],
        *, per_layer: bool, under_way: int, free: int, promised: int, idle: bool,
    ) -> SlotChanges:  # fmt: skip
        """What changes before the next pass.

        Args:
            scores: (L, E), the policy's: what is kept longest. Nobody leaves for one that scores no better.
            leavable: (L, E), whose slot may be taken. here: in a slot, or on its way.
            per_layer: whether an expert only takes the place of one of its layer.
            under_way: copies that have not ended.
            free, promised: slots that hold nothing and can be written now, and once open passes have ended.
            idle: there are no open passes, so what leaves can be written now too.
        """
        most, absent = min(int(self.rate), self._most_spare), int((~here).sum())
        wanted = np.argwhere(self._missed & ~here)
        order = np.argsort(-scores[wanted[:, 0], wanted[:, 1]], kind="stable")
        rest = np.where(leavable, scores, np.inf)
        changes, entered, left = SlotChanges([], []), [], []
        for place, pair in enumerate(wanted[order[: max(0, int(_MOST) - under_way)]].tolist()):
            key, victim = ExpertKey(*pair), None
            if free + promised < min(most + 1, absent):  # else there is room for it and spare slots besides
                if place >= most - under_way:
                    break
                victim = worst_key(rest, key.layer if per_layer else None)
                if victim is None or rest[victim] >= scores[key]:
                    continue
                rest[victim] = np.inf
                changes.leave.append(victim)
                free, promised, absent = free + idle, promised + (not idle), absent + 1
            if free:
                changes.enter.append(key)
                free, absent = free - 1, absent - 1
                entered.append(key.layer * scores.shape[1] + key.expert)
                left.append(-1 if victim is None else victim.layer * scores.shape[1] + victim.expert)
        if entered:
            nothing = np.zeros((2, len(entered)), dtype=np.int64)
            self._changes = np.hstack([self._changes, np.vstack([[entered, left], nothing])])
        self._missed = np.zeros_like(self._missed)
        return changes
