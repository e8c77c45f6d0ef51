"""Order in which wanted experts are copied: demands first, then prefetches by deadline. Single-threaded; the
owner holds the lock.
"""

from __future__ import annotations

from collections.abc import Iterator

from localmoe.core.types import ExpertKey

DEMAND_DEADLINE = float("-inf")


class CopyQueue:
    """Expert keys by urgency, of which each can be hastened or withdrawn."""

    def __init__(self) -> None:
        self._waiting: dict[ExpertKey, tuple[float, int, ExpertKey]] = {}
        self._count = 0  # ties: first come, first served

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._waiting

    def push(self, key: ExpertKey, deadline: float) -> None:
        """Add a key, or bring its deadline forward if it waits already."""
        entry = self._waiting.get(key)
        if entry is None or deadline < entry[0]:
            self._waiting[key] = (deadline, self._count, key)
            self._count += 1

    def remove(self, key: ExpertKey) -> None:
        """Withdraw a key, if it waits."""
        self._waiting.pop(key, None)

    def drop_prefetches(self, layer: int | None = None) -> None:
        """Withdraw all but demands, of one layer or of all."""
        self._waiting = {
            key: entry
            for key, entry in self._waiting.items()
            if entry[0] == DEMAND_DEADLINE or (layer is not None and key.layer != layer)
        }

    def in_order(self) -> Iterator[tuple[ExpertKey, bool]]:
        """(key, is a demand) from the most urgent on. Keys may be removed meanwhile."""
        if not self._waiting:
            return
        head = min(self._waiting.values())  # often the only one that is looked at
        yield head[2], head[0] == DEMAND_DEADLINE
        for entry in sorted(self._waiting.values()):
            if entry is not head and self._waiting.get(entry[2]) is entry:
                yield entry[2], entry[0] == DEMAND_DEADLINE
