"""Order in which wanted experts are copied: demands first, then prefetches by deadline. Single-threaded; the
owner holds the lock.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from localmoe.core.types import ExpertKey

DEMAND_DEADLINE = float("-inf")


class CopyQueue:
    """A priority queue of expert keys in which an entry can be hastened or withdrawn."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ExpertKey]] = []
        self._current: dict[
            ExpertKey, tuple[float, int, ExpertKey]
        ] = {}  # older entries in the heap are dead
        self._count = 0  # ties: first come, first served

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._current

    def push(self, key: ExpertKey, deadline: float) -> None:
        """Add a key, or bring its deadline forward if it waits already."""
        current = self._current.get(key)
        if current is not None and deadline >= current[0]:
            return
        entry = self._current[key] = (deadline, self._count, key)
        heapq.heappush(self._heap, entry)
        self._count += 1

    def remove(self, key: ExpertKey) -> None:
        """Withdraw a key, if it waits."""
        self._current.pop(key, None)

    def drop_prefetches(self, layer: int | None = None) -> None:
        """Withdraw all but demands, of one layer or of all."""
        self._current = {
            key: entry
            for key, entry in self._current.items()
            if entry[0] == DEMAND_DEADLINE or (layer is not None and key.layer != layer)
        }
        self._heap = sorted(self._current.values())

    def in_order(self) -> Iterator[tuple[ExpertKey, bool]]:
        """(key, is a demand) from the most urgent on. Keys may be removed meanwhile."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        if not self._heap:
            return
        head = self._heap[0]
        yield head[2], head[0] == DEMAND_DEADLINE
        for entry in sorted(entry for entry in self._heap if entry is not head and self._is_current(entry)):
            yield entry[2], entry[0] == DEMAND_DEADLINE

    def _is_current(self, entry: tuple[float, int, ExpertKey]) -> bool:
        return self._current.get(entry[2]) is entry
