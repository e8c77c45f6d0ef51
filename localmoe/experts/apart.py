"""Who leaves a slot where experts come into slots one by one and RAM holds a part of all: whom RAM holds too,
so that both together hold as many as they can. Copies nothing.

What comes into a slot came through RAM, so there is always one in both, and it makes room for the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from localmoe.core.events import RoomWanted
from localmoe.core.types import ExpertKey
from localmoe.experts.claims import VictimChooser
from localmoe.experts.disk_store import DiskStore


class ApartFromRam:
    """A VictimChooser: the policy chooses among those that RAM holds too, as long as there are some."""

    def __init__(
        self, store: DiskStore, choose: VictimChooser, in_slots: Callable[[], NDArray[np.bool_]]
    ) -> None:
        """in_slots: (L, E), those in slots or on their way there; asked as often as for a victim."""
        self._store, self._choose, self._in_slots = store, choose, in_slots

    def __call__(self, room: RoomWanted) -> ExpertKey | None:
        """Who leaves. RAM hears who is in slots then."""
        in_ram = self._store.addresses.tolist()  # an array is slow to ask one by one
        doubled = [key for key in room.candidates if in_ram[key.layer][key.expert]]
        victim = self._choose(replace(room, candidates=doubled)) if doubled else None
        if victim is None and not room.num_free:
            victim = self._choose(room)  # of a prefetch: None: it waits
            if doubled and (room.is_demand or victim is not None):
                victim = doubled[0]
        here = self._in_slots().copy()
        if victim is not None:
            here[victim] = False
        here[room.key] = victim is not None or room.num_free > 0
        self._store.in_slots(here)
        return victim
