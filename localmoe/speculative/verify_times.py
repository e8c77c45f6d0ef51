"""What steps take by the number of their verify pass's tokens, from what they took lately. Chooses no
length."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_RECENT = 5  # measurements that a time is the lower median of: one disturbed step does not count
_UP_TO = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65)  # windows that are looked at together, by the largest
_KEPT_PASSES = 128
_POWERS = np.array([1.0, 0.85, 0.7, 0.55, 0.4, 0.25])
_LEAST_S = 1e-9


class _Measured(NamedTuple):
    window: int
    seconds: float
    number: int  # of the pass


class _LatelyMeasured:
    """Seconds by window. Windows of nearly the same length share their measurements. What was not measured
    for long is forgotten, for slots, texts and whoever takes the tokens change."""

    def __init__(self) -> None:
        self._found: list[deque[_Measured]] = [deque(maxlen=_RECENT) for _ in (*_UP_TO, None)]
        self._passes = 0

    def observe(self, window: int, seconds: float) -> None:
        """With a pass over `window` tokens it took so long."""
        self._passes += 1
        self._found[bisect_left(_UP_TO, window)].append(_Measured(window, seconds, self._passes))
        for found in self._found:
            while found and found[0].number <= self._passes - _KEPT_PASSES:
                found.popleft()

    def _medians(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Windows that were looked at together, ascending, what they took, and how many there were."""
        known = [found for found in self._found if found]
        windows = np.array([sum(measured.window for measured in found) / len(found) for found in known])
        seconds = np.array([typical(measured.seconds for measured in found) for found in known])
        return windows, seconds, np.array([float(len(found)) for found in known])


class VerifyTimes(_LatelyMeasured):
    """Of one model's verify passes."""

    @property
    def longest(self) -> int:
        """The longest window that was measured; 0: none was."""
        return max((measured.window for found in self._found for measured in found), default=0)

    def between(self, longest: int) -> NDArray[np.float64]:
        """Seconds of passes over 1 .. longest tokens, of which none takes longer than a longer one: measured,
        or on the straight line between the nearest that were. Beyond the longest one a further token costs
        ever less, as if tokens shared experts: windows that are thought to be cheap are tried, and then
        known. For steps of a few lengths, each of which is measured often."""
        windows, medians, _ = self._medians()
        # a time that is longer than a longer window's was disturbed, or is of emptier slots
        seconds = np.minimum.accumulate(medians[::-1])[::-1]
        wanted = np.arange(1.0, longest + 1)
        curve: NDArray[np.float64] = np.interp(wanted, windows, seconds)
        if len(windows) == 1:
            return curve
        first, last = (np.diff(seconds[at]) / np.diff(windows[at]) for at in (slice(0, 2), slice(-2, None)))
        before = np.maximum(0.0, seconds[0] - first * (windows[0] - wanted))
        beyond = seconds[-1] + last * windows[-1] * np.log(np.maximum(1.0, wanted / windows[-1]))
        return np.where(wanted > windows[-1], beyond, np.where(wanted < windows[0], before, curve))

    def fitted(self, longest: int) -> NDArray[np.float64]:
        """The same as the nearest a + b n^c to what was measured, relatively. With c = 1 every token costs
        the same, and less the more experts tokens share. For steps of any length: passes over as many tokens
        of other texts differ by a fifth, so single windows say little."""
        windows, seconds, counts = self._medians()
        if len(windows) == 1:
            return np.full(longest, seconds[0])
        weights = counts / np.maximum(seconds, _LEAST_S) ** 2
        first_s, slope, power = _fit(windows, seconds, weights / weights.sum())
        curve: NDArray[np.float64] = first_s + slope * np.arange(1.0, longest + 1) ** power
        return curve


class HostTimes(_LatelyMeasured):
    """What the host takes for a step beside its passes: where passes take longer, more of it goes on
    meanwhile."""

    def of(self, longest: int) -> NDArray[np.float64]:
        """Seconds of steps with 1 .. longest tokens: measured, or between the nearest that were; 0 where none
        was."""
        windows, seconds, _ = self._medians()
        if not len(windows):
            return np.zeros(longest)
        found: NDArray[np.float64] = np.interp(np.arange(1.0, longest + 1), windows, seconds)
        return found


def _fit(
    windows: NDArray[np.float64], seconds: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[float, float, float]:
    """(a, b, c) of the least squares of a + b n^c, a and b not negative."""
    grown = windows ** _POWERS[:, None]  # (C, P), as everything is that follows
    mean, mean_s = grown @ weights, seconds @ weights
    apart = grown - mean[:, None]
    slopes = np.maximum(0.0, (apart * (seconds - mean_s)) @ weights / (apart**2 @ weights))
    firsts = mean_s - slopes * mean
    through_0 = firsts < 0.0
    slopes = np.where(through_0, (grown * seconds) @ weights / (grown**2 @ weights), slopes)
    firsts = np.where(through_0, 0.0, firsts)
    errors = (firsts[:, None] + slopes[:, None] * grown - seconds) ** 2 @ weights
    best = int(errors.argmin())
    return float(firsts[best]), float(slopes[best]), float(_POWERS[best])


def typical(seconds: Iterable[float]) -> float:
    """The lower median: disturbances only ever make a step slower."""
    ordered = sorted(seconds)
    return ordered[(len(ordered) - 1) // 2]
