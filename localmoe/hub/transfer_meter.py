"""Counts what a download has and receives, and turns it into progress reports. Receives nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from localmoe.core.types import Progress
from localmoe.core.units import format_rate

WINDOW_S = 5.0  # the rate is that of the last so many seconds: a stalled link shows 0 B/s soon
STAGE = "download"


class TransferMeter:
    """Bytes held (from now and from before) and bytes received (now) of one download's files."""

    def __init__(self, total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_bytes = total_bytes
        self._clock = clock
        self._held: dict[str, int] = {}
        self._notes: dict[str, str] = {}
        self._received = 0
        self._samples: deque[tuple[float, int]] = deque([(clock(), 0)])  # (time, bytes received until then)

    def hold(self, name: str, num_bytes: int) -> None:
        """So many bytes of this file are on the disk."""
        self._held[name] = num_bytes

    def receive(self, num_bytes: int) -> None:
        """So many bytes more came over the network."""
        self._received += num_bytes

    def note(self, name: str, text: str) -> None:
        """What holds this file up; "" when nothing does."""
        if text:
            self._notes[name] = text
        else:
            self._notes.pop(name, None)

    def report(self) -> Progress:
        """The state now. Call it a few times a second: the rate is taken between calls."""
        now = self._clock()
        self._samples.append((now, self._received))
        while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()
        began, before = self._samples[0]
        rate = (self._received - before) / (now - began) if now > began else 0.0
        done = sum(self._held.values())
        left = self.total_bytes - done
        seconds_left = left / rate if rate > 0 else None
        detail = "; ".join([format_rate(rate), *self._notes.values()])
        return Progress(STAGE, done, self.total_bytes, "bytes", 0.0 if left == 0 else seconds_left, detail)
