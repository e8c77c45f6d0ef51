"""What it is worth to let experts that a pass missed take the slots of others: uses of those that entered,
less uses of those that left for them. Slots that were free say nothing of that. Chooses nobody.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_HORIZON = 24  # passes for which a change is followed
_EVERY = 4  # passes, of which one's changes are followed
_FIRST = 1.0  # uses that a change is taken to be worth before one was seen
_SMOOTHING = 0.005  # weight of one change in the mean: chance moves it by a tenth of a use then
_FORGETTING = 0.004  # a pass, while no change is followed
# Uses that a change has to be worth: less cannot be told from chance, and what is copied for it takes time of
# the host's memory from the CPU's threads, which fetch ahead then (docs/log.md)
_LEAST = 0.15


class SlotWorth:
    """For experts that are numbered through all layers.

    Attributes:
        gain: uses within the horizon that a change was worth lately, in the mean.
    """

    def __init__(self) -> None:
        self.gain = _FIRST
        self._changes = np.zeros((4, 0), dtype=np.int64)  # entered, left, age, gain
        self._passes = 0

    def link_time(self, idle: float, expert: float) -> float:
        """Of the link, that bringing an expert in may take beside the computation: as long as it is idle
        anyway before the next layer's experts, and as much longer as is saved. For what holds
        the link up the CPU computes more, as far as it is faster, and a miss less saves both lanes' time
        likewise; so a use saved is worth an expert's time over the link.

        Args:
            idle: the link's, between two layers' experts. expert: what one takes over the link. Both in one
                unit, the result's.
        """
        return 0.0 if self.gain < _LEAST else idle + self.gain * expert

    def observe(
        self, demanded: NDArray[np.bool_], entered: NDArray[np.int64], left: NDArray[np.int64]
    ) -> None:
        """A pass is over. demanded: (L, E), what it asked for. entered: numbers of experts that it put into
        slots; left: of those whose slots these were, -1 where one was free."""
        if self._changes.size:
            self._follow(demanded.reshape(-1))
        else:
            self.gain += _FORGETTING * (_FIRST - self.gain)
        changed = left >= 0
        if self._passes % _EVERY == 0 and changed.any():
            begun = np.zeros((4, int(changed.sum())), dtype=np.int64)
            begun[0], begun[1] = entered[changed], left[changed]
            self._changes = np.hstack([self._changes, begun])
        self._passes += 1

    def _follow(self, asked: NDArray[np.bool_]) -> None:
        entered, left, age, gain = self._changes
        gain += asked[entered].astype(np.int64) - asked[left]
        age += 1
        over = age >= _HORIZON
        if over.any():
            keep = (1 - _SMOOTHING) ** int(over.sum())
            self.gain = keep * self.gain + (1 - keep) * float(gain[over].mean())
            self._changes = self._changes[:, ~over]
