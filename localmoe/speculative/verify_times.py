"""What steps and their passes take by the number of the verify pass's tokens, from what they took lately.
Chooses no length."""

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

    @property
    def longest(self) -> int:
        """The longest window that was measured; 0: none was."""
        return max((measured.window for found in self._known() for measured in found), default=0)

    def between(self, longest: int, token_s: float = 0.0) -> NDArray[np.float64]:
        """Seconds for 1 .. longest tokens, never more than for a longer window: measured, or on the straight
        line between the nearest that were. Beyond the longest one a further token costs `token_s`, and what
        the last ones cost above that, ever less of it, as if tokens shared experts: windows that are thought
        to be cheap are tried, and then known. For steps of a few lengths, each of which is measured often."""
        windows, medians, _ = self._medians()
        # a time that is longer than a longer window's was disturbed, or is of emptier slots
        seconds = np.minimum.accumulate(medians[::-1])[::-1]
        wanted = np.arange(1.0, longest + 1)
        slopes = np.diff(seconds) / np.diff(windows) if len(windows) > 1 else np.array([token_s])
        before = np.maximum(0.0, seconds[0] - slopes[0] * (windows[0] - wanted))
        shared = max(0.0, slopes[-1] - token_s) * windows[-1] * np.log(np.maximum(1.0, wanted / windows[-1]))
        beyond = seconds[-1] + token_s * (wanted - windows[-1]) + shared
        curve: NDArray[np.float64] = np.interp(wanted, windows, seconds)
        return np.where(wanted > windows[-1], beyond, np.where(wanted < windows[0], before, curve))

    def _known(self) -> list[deque[_Measured]]:
        """What is not forgotten, by windows that were looked at together, ascending."""
        for found in self._found:
            while found and found[0].number <= self._passes - _KEPT_PASSES:
                found.popleft()
        return [found for found in self._found if found]

    def _medians(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Windows that were looked at together, ascending, what they took, and how many there were."""
        known = self._known()
        windows = np.array([sum(measured.window for measured in found) / len(found) for found in known])
        seconds = np.array([typical(measured.seconds for measured in found) for found in known])
        return windows, seconds, np.array([float(len(found)) for found in known])


class VerifyTimes(_LatelyMeasured):
    """Of one model's verify passes."""

    def fitted(self, longest: int) -> NDArray[np.float64]:
        """Seconds of passes over 1 .. longest tokens, as the nearest a + b n^c to what was measured,
        relatively. With c = 1 every token costs the same, and less the more experts tokens share. For steps
        of any length: passes over as many tokens of other texts differ by a fifth, so single windows say
        little."""
        windows, seconds, counts = self._medians()
        if len(windows) == 1:
            return np.full(longest, seconds[0])
        weights = counts / np.maximum(seconds, _LEAST_S) ** 2
        first_s, slope, power = _fit(windows, seconds, weights / weights.sum())
        curve: NDArray[np.float64] = first_s + slope * np.arange(1.0, longest + 1) ** power
        return curve


class StepTimes:
    """Of a step's passes together, from the first draft to the end of the verify pass. In between the GPU may
    wait for the host, among the drafts or behind them, as the length decides: so what either took says little
    of other lengths. Longer steps wait as well, so that taking none for slower than a longer one hides no
    wait."""

    def __init__(self) -> None:
        self._passes, self._drafts = _LatelyMeasured(), _LatelyMeasured()

    def observe(self, drafted: int, verified: int, draft_s: float, verify_s: float) -> None:
        """A step drafted so many tokens and verified some of them. It counts as one that drafted no more than
        those."""
        if drafted:
            self._drafts.observe(drafted, draft_s)
            draft_s *= verified / drafted
        self._passes.observe(verified + 1, draft_s + verify_s)

    def of(self, longest: int) -> NDArray[np.float64]:
        """Seconds of steps with windows of 1 .. longest tokens."""
        return self._passes.between(longest, self._further_draft_s())

    def _further_draft_s(self) -> float:
        """Of one more draft pass in a long step: what the longest drafts took more than the next shorter
        ones; at most what a pass took on average in any step, waits included."""
        passes, seconds, _ = self._drafts._medians()
        if not len(passes):
            return 0.0
        share = float((seconds / passes).min())
        further = float((seconds[-1] - seconds[-2]) / (passes[-1] - passes[-2])) if len(passes) > 1 else share
        return further if 0.0 < further < share else share


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
