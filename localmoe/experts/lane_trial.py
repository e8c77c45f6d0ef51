"""Whether passes of one token are faster with the CPU's part or without: what the CPU computes all of enters
no slot, so where experts are asked for again soon it may cost more than it saves. Tried out, not reckoned.
"""

from __future__ import annotations

from collections.abc import Sequence

_SETTLING = 24  # passes after a change, until slots hold what they will
_MEASURED = 40  # passes that are compared
_GLANCE = 8  # passes after which one that is far slower is not tried to its end
_FAR = 1.4  # slower
_BETTER = 0.97  # of the other's time, or what is done stays
_APART, _MOST_APART = 1024, 8192  # passes between trials; twice as many each time that nothing changes
_CHANGED = 0.15  # of a pass's time since the last trial, by which another one is due
_LEAST_APART = 256  # passes between trials at least
_TRIMMED = 10  # one in so many, at either end: a hiccup says nothing of both


class LaneTrial:
    """Of one model's lane.

    Attributes:
        out: whether passes are to do without the CPU.
        trying: whether that is being tried.
    """

    def __init__(self) -> None:
        self.out = False
        self.trying = False
        self._seconds: list[float] = []  # of passes since the last change, of one text
        self._passes = 0  # since the last trial
        self._before = 0.0  # a pass's, of the way that is compared with
        self._decided = 0.0  # a pass's, after the last trial; 0: not known yet
        self._apart = 0  # at first as soon as enough was measured

    def begin_text(self) -> None:
        """What comes next is of another text, whose passes are not to be compared with those of the last."""
        if self.trying:  # to begin one in every answer that is too short for its end would cost for ever
            self._keep(_LEAST_APART)
        self._seconds = []

    def note(self, seconds: float) -> None:
        """A pass of one token, right behind another one, took so long on the GPU."""
        self._seconds.append(seconds)
        count = len(self._seconds)
        if not self.trying:
            self._passes += 1
            if count >= _SETTLING + _MEASURED and (count - _SETTLING) % _MEASURED == 0:
                self._look(_mean(self._seconds[-_MEASURED:]))
            return
        if count == _GLANCE and _mean(self._seconds) > _FAR * self._before:
            self._keep()
        elif count == _SETTLING + _MEASURED:
            if _mean(self._seconds[-_MEASURED:]) < _BETTER * self._before:
                self._apart = _APART
                self._decide(out=self.out)
            else:
                self._keep()

    def _look(self, mean: float) -> None:
        """Whether it is time for a trial."""
        changed = self._decided > 0 and abs(mean / self._decided - 1) > _CHANGED
        if self._passes >= self._apart or (changed and self._passes >= _LEAST_APART):
            self._before = mean
            self.out, self.trying, self._seconds = not self.out, True, []
        elif not self._decided:
            self._decided = mean

    def _keep(self, apart: int = _APART) -> None:
        """What was done before, for `apart` passes at least."""
        self._apart = min(max(2 * self._apart, apart), _MOST_APART)
        self._decide(out=not self.out)

    def _decide(self, *, out: bool) -> None:
        self.out, self.trying, self._seconds = out, False, []
        self._passes, self._decided = 0, 0.0


def _mean(seconds: Sequence[float]) -> float:
    """Without the least and the most."""
    cut = max(1, len(seconds) // _TRIMMED)
    kept = sorted(seconds)[cut : len(seconds) - cut]
    return sum(kept) / len(kept)
