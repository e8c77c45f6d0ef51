"""Which expert is in which slot, which slots are being written, which are being read. Single-threaded data
structure: its owner (ExpertMemory) holds the lock. Decides no eviction.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np
from numpy.typing import NDArray

from localmoe.core.types import ExpertKey


class ResidencyTable:
    """States of an expert: absent, loading (slot assigned, copy running), resident. Pinned experts may not
    be evicted."""

    def __init__(self, num_slots: int, shape: tuple[int, int] = (0, 0)) -> None:
        """shape: layers and experts a layer, for `here`; without it that is not kept."""
        self.num_slots = num_slots
        self.here: NDArray[np.bool_] = np.zeros(shape, dtype=np.bool_)  # (L, E): resident or loading
        self._free = list(range(num_slots - 1, -1, -1))
        self._resident: OrderedDict[ExpertKey, int] = OrderedDict()  # oldest use first
        self._loading: dict[ExpertKey, int] = {}
        self._pins: dict[ExpertKey, int] = {}
        self._unused_prefetches: set[ExpertKey] = set()
        self._slots_of_layer: Counter[int] = Counter()

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def slots_of_layer(self, layer: int) -> int:
        """Slots that hold, or are being filled with, experts of a layer."""
        return self._slots_of_layer[layer]

    def is_resident(self, key: ExpertKey) -> bool:
        """Whether the expert can be computed with now."""
        return key in self._resident

    def is_loading(self, key: ExpertKey) -> bool:
        """Whether a copy of the expert is running."""
        return key in self._loading

    def resident_keys(self) -> list[ExpertKey]:
        """All resident experts, least recently used first."""
        return list(self._resident)

    def slot(self, key: ExpertKey) -> int:
        """The slot of a resident expert."""
        return self._resident[key]

    def evictable(self, *, spare_unused_prefetches: bool) -> list[ExpertKey]:
        """Experts that may be evicted, least recently used first."""
        spared = self._unused_prefetches if spare_unused_prefetches else ()
        return [key for key in self._resident if key not in self._pins and key not in spared]

    def evict(self, key: ExpertKey) -> bool:
        """Free an expert's slot; True if it was prefetched and never used."""
        assert key not in self._pins, f"{key} is being read"
        self._free.append(self._resident.pop(key))
        self._note(key, here=False)
        wasted = key in self._unused_prefetches
        self._unused_prefetches.discard(key)
        return wasted

    def forget_unused(self) -> None:
        """Prefetches that were not used so far are as any other expert."""
        self._unused_prefetches.clear()

    def begin_copy(self, key: ExpertKey) -> int:
        """Assign a free slot to an absent expert."""
        assert key not in self._resident and key not in self._loading, f"{key} is here already"
        slot = self._loading[key] = self._free.pop()
        self._note(key, here=True)
        return slot

    def finish_copy(self, key: ExpertKey, *, prefetch: bool) -> None:
        """The copy is complete: the expert becomes resident."""
        self._resident[key] = self._loading.pop(key)
        if prefetch:
            self._unused_prefetches.add(key)

    def abort_copy(self, key: ExpertKey) -> None:
        """The copy failed: its slot is free again."""
        self._free.append(self._loading.pop(key))
        self._note(key, here=False)

    def _note(self, key: ExpertKey, *, here: bool) -> None:
        self._slots_of_layer[key.layer] += 1 if here else -1
        if self.here.size:
            self.here[key] = here

    def pin(self, key: ExpertKey) -> None:
        """Protect a resident expert while it is read, and count this as a use."""
        self._pins[key] = self._pins.get(key, 0) + 1
        self._resident.move_to_end(key)
        self._unused_prefetches.discard(key)

    def unpin(self, key: ExpertKey) -> None:
        """Undo one pin, if there is one."""
        pins = self._pins.pop(key, 0)
        if pins > 1:
            self._pins[key] = pins - 1
