"""What Ctrl+C does where Python's exception would do harm. Imports nothing of the project."""

from __future__ import annotations

import os
import signal
import threading
from _thread import RLock
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # the exit code of what Ctrl+C has ended


class Monitor(RLock):  # type: ignore[misc]  # final, says typeshed
    """A threading.Condition that Ctrl+C does not leave locked for ever. Python heeds it wherever a function
    written in Python begins, as Condition's __exit__ is, which then gives no lock back; a lock's own is
    none."""

    def __init__(self) -> None:
        super().__init__()
        changed = threading.Condition(self)
        self.wait, self.wait_for, self.notify_all = changed.wait, changed.wait_for, changed.notify_all


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl+C is heeded when the block has ended, as whoever handles it would have. For tenths of a second.

    Python interrupts its main thread alone; in others the block runs as it is.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    asked: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: asked.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if asked:
            before(*asked[0])


@contextmanager
def ended_at_once(exit_code: int = INTERRUPTED) -> Iterator[None]:
    """Ctrl+C ends the process there and then, as nothing is open yet: while modules are imported, Python's
    exception may be swallowed by a library, or leave one half imported, which ends in another error.

    Only in the main thread, and where nobody else handles Ctrl+C.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(exit_code))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
