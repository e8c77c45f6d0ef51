"""Whose turn it is: answers go first, background work runs between them. Runs nothing itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from localmoe.core.uninterrupted import Monitor


class Turns:
    """Answers and one piece of background work exclude each other; work gives way at its next `pause`."""

    def __init__(self) -> None:
        self._changed = Monitor()
        self._answers = 0  # that are being written, or want to be
        self._working = False

    @contextmanager
    def answer(self) -> Iterator[None]:
        """An answer's time; waits for a piece of work to end."""
        counts = False
        try:
            with self._changed:
                self._answers, counts = self._answers + 1, True
                self._changed.wait_for(lambda: not self._working)  # where Ctrl+C may end it
            yield
        finally:
            with self._changed:
                self._answers -= counts
                self._changed.notify_all()

    @contextmanager
    def work(self, cancel: threading.Event) -> Iterator[None]:
        """The time of background work, which calls `pause` now and then. `cancel` ends the waiting; what
        works has to look at it."""
        self._take(cancel)
        try:
            yield
        finally:
            with self._changed:
                self._working = False
                self._changed.notify_all()

    def pause(self, cancel: threading.Event) -> None:
        """Let answers go first, if there are any."""
        with self._changed:
            if not self._answers:
                return
            self._working = False
            self._changed.notify_all()
        self._take(cancel)

    def wake(self) -> None:
        """After `cancel` was set."""
        with self._changed:
            self._changed.notify_all()

    def _take(self, cancel: threading.Event) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._answers or cancel.is_set())
            self._working = not self._answers
