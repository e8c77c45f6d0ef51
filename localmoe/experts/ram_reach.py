"""Which of the experts in RAM kernels may read over the link, where all of a model lie on the disk: those of
the most worth. They keep their places until the pass is over, so enough others have to be left to give way to
what it has read. Copies nothing.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

_LEAST_LENT, _MOST_LENT = 16, 128  # what changes slots behind a pass; twice what fills free ones
_OF_A_PASS = 7 / 8  # of all that may be within reach: two passes may be under way, which differ somewhat


def most_lent(ram_experts: int, num_experts: int) -> int:
    """Records in RAM that may be on their way into slots: a pass that waits for the disk may need the places
    of a whole layer, and nobody takes back meanwhile."""
    beyond = max(0, ram_experts - num_experts)
    return min(max(beyond // 4, min(beyond // 2, _LEAST_LENT)), _MOST_LENT)


class RamReach:
    """Of passes that are open, or prepared for.

    Attributes:
        held: bool (L, E), within reach of any of them.
    """

    def __init__(self, ram_experts: int, shape: tuple[int, int]) -> None:
        """shape: (L, E)."""
        lent = most_lent(ram_experts, shape[1])
        self.most = max(0, ram_experts - lent - 2 * shape[1])  # else of two layers, one of them read ahead
        self.held: NDArray[np.bool_] = np.zeros(shape, dtype=np.bool_)
        self._nothing = self.held.copy()
        self._next: NDArray[np.bool_] | None = None
        self._open: deque[NDArray[np.bool_]] = deque()

    def prepare(self, worth: NDArray[np.float64], may_be: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """(L, E), within reach of the pass that is opened next, in the place of what was before.

        Args:
            worth: (L, E), as RamPlaces.worth. may_be: (L, E), those that are in RAM, and in no slot.
        """
        self._next = None
        self._settle()
        found = _best(worth, may_be, int(self.most * _OF_A_PASS))
        found = (found & self.held) | _best(worth, found & ~self.held, self.most - int(self.held.sum()))
        self._next = found
        self._settle()
        return found

    def opened(self) -> None:
        """A pass, the one that was prepared for, if one was."""
        self._open.append(self._nothing if self._next is None else self._next)
        self._next = None

    def withdrawn(self) -> None:
        """The pass that was prepared for does not come as it was."""
        self._next = None
        self._settle()

    def closed(self) -> None:
        """The pass that was opened first."""
        self._open.popleft()
        self._settle()

    def clear(self) -> None:
        """No pass is under way."""
        self._open.clear()
        self._next = None
        self._settle()

    def _settle(self) -> None:
        masks = [*self._open, *([] if self._next is None else [self._next])]
        self.held = np.logical_or.reduce(masks) if masks else self._nothing


def _best(worth: NDArray[np.float64], of: NDArray[np.bool_], most: int) -> NDArray[np.bool_]:
    """So many of these that are worth most."""
    at, most = np.flatnonzero(of), max(0, most)
    if len(at) > most:
        at = at[worth.ravel()[at].argpartition(len(at) - most - 1)[len(at) - most :]]
    found = np.zeros_like(of)
    found.ravel()[at] = True
    return found
