"""Takes the chance out of a real engine's copies: each begins before the next expert is read, and ends when
the target waits. What is then in which slot depends on routing and policy alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from localmoe.core.types import ExpertKey
from localmoe.experts.link import Link
from localmoe.experts.memory import ExpertMemory
from localmoe.experts.slots import DeviceSlots

_LONG_S = 10.0


class _Steps:
    """A link and a reader that wait for each other."""

    def __init__(self, memory: ExpertMemory) -> None:
        self._memory = memory
        self._link: Link = memory.link
        self._wait = memory._wait_for_any
        self._changed = memory.lock
        self._copying = self._over = False
        self._remaining: set[ExpertKey] = set()  # what the reader waits for

    def copy(self, record: Tensor, slots: DeviceSlots, slot: int) -> None:
        with self._changed:
            self._copying = True
            self._changed.notify_all()
            assert self._changed.wait_for(self._reader_waits, _LONG_S)
        self._link.copy(record, slots, slot)
        with self._changed:
            self._copying = False

    def _reader_waits(self) -> bool:
        arrived = any(self._memory._table.is_resident(key) for key in self._remaining)
        return self._over or (bool(self._remaining) and not arrived)

    def after_read(self, slot: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._copying or not self._memory._wanted, _LONG_S)
        self._link.after_read(slot)

    def wait_for_any(self, remaining: set[ExpertKey], pinned: list[ExpertKey]) -> ExpertKey:
        with self._changed:
            self._remaining = remaining
            self._changed.notify_all()
            try:
                return self._wait(remaining, pinned)
            finally:
                self._remaining = set()

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()


@contextmanager
def in_lockstep(memory: ExpertMemory) -> Iterator[None]:
    """Of one memory, on which nothing is under way."""
    steps = _Steps(memory)
    memory.link, memory._wait_for_any = steps, steps.wait_for_any  # type: ignore[method-assign]
    try:
        yield
    finally:
        steps.end()
        memory.link = steps._link
        del memory._wait_for_any
