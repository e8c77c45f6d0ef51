"""When the copies ran that a device memory issued, for a timeline: marks in the stream of copies, read once a
step is over and only if they have been reached. Waits for nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from localmoe.core.timeline import Timeline
from localmoe.core.types import ExpertKey
from localmoe.experts.transfers import Transfers

_PENDING = 4096  # copies at most that wait to be placed


class CopyTimes:
    """Marks around copies. What kernels read over the link themselves is not among them."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._pending: deque[tuple[ExpertKey, int, Any, Any]] = deque(maxlen=_PENDING)

    def mark(self) -> object:
        """The point before a copy."""
        return self._transfers.time_mark()

    def copied(self, key: ExpertKey, num_bytes: int, before: object) -> None:
        """A copy was issued after `before`."""
        self._pending.append((key, num_bytes, before, self._transfers.time_mark()))

    def place(self, timeline: Timeline, anchor: Any, anchor_s: float) -> None:
        """Tell of the copies that are complete.

        Args:
            anchor: a point of the computation that has been reached.
            anchor_s: its time, in seconds of the timeline's clock.
        """
        for _ in range(len(self._pending)):
            key, num_bytes, before, after = self._pending.popleft()
            if isinstance(before, float):
                start_s, end_s = before, float(after)
            elif after.query():
                start_s = anchor_s + anchor.elapsed_time(before) / 1e3
                end_s = anchor_s + anchor.elapsed_time(after) / 1e3
            else:
                self._pending.append((key, num_bytes, before, after))  # told of after the next step
                continue
            timeline.add("copies", f"prefetch {key.layer}/{key.expert}", start_s, end_s, num_bytes)
