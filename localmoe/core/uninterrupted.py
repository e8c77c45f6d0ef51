"""Work that must not end in the middle. Imports nothing of the project."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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
