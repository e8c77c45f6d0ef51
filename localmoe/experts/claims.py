"""Which copy starts next, and who leaves for it: the rules that no policy may break, where copies are made
one at a time. Copies nothing and holds no lock; ExpertMemory and the simulator both go by it.

An expert being read, or waiting for its reader, is never evicted; a prefetch never evicts an unused prefetch,
it waits; a demand goes on even if the policy names nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from localmoe.core.events import RoomWanted
from localmoe.core.types import ExpertKey
from localmoe.experts.queue import CopyQueue
from localmoe.experts.residency import ResidencyTable

VictimChooser = Callable[[RoomWanted], ExpertKey | None]  # None: take a free slot, or wait if there is none


@dataclass(frozen=True, slots=True)
class Claim:
    """A copy that may start: its expert, the slot that is assigned, whether the target waits for it, and
    whether an unused prefetch left for it."""

    key: ExpertKey
    slot: int
    is_demand: bool
    wasted: bool


def claim_copy(
    table: ResidencyTable, queue: CopyQueue, awaited: Set[ExpertKey], choose_victim: VictimChooser
) -> Claim | None:
    """Take the most urgent copy for which there is a slot off the queue, and evict for it. None: nothing to
    do, or nothing can start.

    Args:
        awaited: experts that a reader waits for and has not pinned yet.

    Raises:
        ValueError: the policy chose an expert that may not be evicted.
    """
    for key, is_demand in queue.in_order():
        if table.is_resident(key) or table.is_loading(key):
            queue.remove(key)
            continue
        evictable = [k for k in table.evictable(spare_unused_prefetches=not is_demand) if k not in awaited]
        room = RoomWanted(key, evictable, table.num_free, table.slots_of_layer(key.layer), is_demand)
        victim = choose_victim(room)
        if victim is None and is_demand and not table.num_free and evictable:
            victim = evictable[0]  # a demand must go on
        if victim is None and not table.num_free:
            if is_demand:
                continue
            return None  # the most urgent prefetch waits, and so do all behind it
        wasted = False
        if victim is not None:
            if victim not in evictable:
                raise ValueError(f"the policy chose {victim}, which may not be evicted")
            wasted = table.evict(victim)
        queue.remove(key)
        return Claim(key, table.begin_copy(key), is_demand, wasted)
    return None
