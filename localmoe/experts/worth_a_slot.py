"""Which experts that a pass asked for, and that were in no slot, come into one behind it, and which give way,
where no pass puts any there itself, and RAM holds a part of all. Copies nothing.

Slots and RAM together hold as many experts as they can: what is in a slot is the first that RAM does without.
So who loses its slot is on the disk alone, mostly, from where it takes many times what a slot saves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localmoe.core.types import ExpertKey

SOON = 1.0  # deadline of what is worth a slot, behind all that is foretold
_MOST_COPIED = 64  # behind a pass, into free slots: the next one may wait for some of them
_MOST_CHANGED = 16  # of slots that somebody has
_WORTH_MORE = 0.5  # uses by which an expert has to be worth more than who has its slot


def may_leave(
    worth: NDArray[np.float64], in_slots: NDArray[np.bool_], in_ram: NDArray[np.bool_], *, ram_is_full: bool
) -> NDArray[np.bool_]:
    """(L, E): who may lose its slot: what RAM holds too, and what is worth no more than the least that RAM
    holds alone, which would be the next to go anyway.

    Args:
        worth: (L, E), as RamPlaces.worth. in_slots, in_ram: (L, E).
        ram_is_full: else nothing has to go.
    """
    alone = in_ram & ~in_slots
    least = worth[alone].min() if ram_is_full and alone.any() else -np.inf
    found: NDArray[np.bool_] = in_slots & (in_ram | (worth <= least))
    return found


def worth_a_slot(
    worth: NDArray[np.float64], asked: NDArray[np.bool_], leaving: NDArray[np.bool_], num_free: int
) -> list[ExpertKey]:
    """The best first: for each free slot, and then each slot whose expert is worth less by enough to pay for
    a copy.

    Args:
        worth: (L, E). asked: (L, E), those that were in no slot. leaving: (L, E), see may_leave.
        num_free: slots that nobody has.
    """
    most = max(_MOST_CHANGED, min(num_free, _MOST_COPIED))
    order = worth[asked].argsort()[::-1][:most]
    best = np.argwhere(asked)[order]
    rivals = np.full(len(best), np.inf)
    rivals[:num_free] = -np.inf
    least = np.sort(worth[leaving])[: max(0, min(len(best), _MOST_CHANGED) - num_free)]
    rivals[num_free : num_free + len(least)] = least
    pays = worth[tuple(best.T)] > rivals + _WORTH_MORE
    return [ExpertKey(*pair) for pair in best[pays].tolist()]
