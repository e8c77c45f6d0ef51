"""How many tokens of a prompt the GPU takes in its next pass, and so how their experts come. Of a window each
layer brings those that it asks for, over the link and with the CPU's lane; past a longer pass all that are
missing are streamed, over the link alone. Learns what either takes. Runs nothing.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator

from localmoe.model.pass_kinds import WINDOW_BUCKETS

WINDOW = WINDOW_BUCKETS[-1]  # tokens
# tokens, and more than a template puts before an answer, which the last window has at least: recurrent layers
# can go back to where that begins
BEFORE_THE_END = 32
_LEAST = 24  # tokens of a window that tells what a full one takes
_TELLING = 1024  # tokens of a streamed pass that takes as long as the link
_KEPT = 5  # passes of either kind
_BETTER = 0.9  # of a stream's time, which windows have to take at most: what either takes scatters
_TRIED = 2 * WINDOW  # tokens that go through as windows while nobody knows what one takes


class PromptWays:
    """Of one model and budget."""

    def __init__(self, *, helped: bool) -> None:
        """helped: by a CPU lane. Without one nothing is tried: a window's experts come over the link, too."""
        self._helped = helped
        self._windows: deque[float] = deque(maxlen=_KEPT)  # seconds of a full one
        self._streams: deque[float] = deque(maxlen=_KEPT)  # seconds for each expert that was missing

    def rows(self, left: int, longest: int, missing: int) -> int:
        """Tokens of the next pass.

        Args:
            left: of the prompt, that are still to come.
            longest: pass that there is memory for.
            missing: experts of all layers that are in no slot.
        """
        if left <= WINDOW:
            return left
        if not missing or not self._windows_win(left, missing):
            return min(left, longest)
        return next(_windows(left))

    def _windows_win(self, left: int, missing: int) -> bool:
        if not self._windows or not self._streams:
            return self._helped and left <= _TRIED
        windows_s = statistics.median(self._windows) * sum(map(_share, _windows(left)))
        return windows_s < _BETTER * statistics.median(self._streams) * missing

    def note(self, tokens: int, missing: int, seconds: float) -> None:
        """A pass of a prompt took so long, of which capturing it is left out. missing: before it."""
        if tokens > WINDOW:
            if missing and tokens <= _TELLING:
                self._streams.append(seconds / missing)
        elif tokens >= _LEAST:
            self._windows.append(seconds / _share(tokens))

    def forget(self) -> None:
        """The budget is another one."""
        self._windows.clear()
        self._streams.clear()


def _windows(left: int) -> Iterator[int]:
    """Tokens of each."""
    while left > WINDOW:
        rows = min(WINDOW, left - BEFORE_THE_END)
        left -= rows
        yield rows
    yield left


def _share(rows: int) -> float:
    """Of a full window's time: tokens choose the same experts, the more often the more there are."""
    return float((rows / WINDOW) ** 0.5)
