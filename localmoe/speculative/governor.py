"""Who picks the draft length: fixed, or the one whose expected tokens a second are highest (MoE-SpeQ 3.2,
equations 2 to 4); and where a step may stop earlier than that (`draft_gate`).

Expected tokens of a step with draft length g: those of `acceptance_rates`, or where the draft tells the
margins of what it chooses, of `margin_rates`. Time of a step: what steps of that length took lately, with
what the host takes beside their passes; where a step may stop earlier, g draft passes plus one verify pass of
g + 1 tokens, likewise (`verify_times`). Output never depends on the choice, only speed does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localmoe.core.gates import Gate
from localmoe.speculative.acceptance_rates import AcceptanceRates
from localmoe.speculative.draft_gate import DraftGate
from localmoe.speculative.margin_rates import MarginRates
from localmoe.speculative.step_record import StepRecord
from localmoe.speculative.verify_times import HostTimes, StepTimes, VerifyTimes, typical

CANDIDATES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_RECENT = 5  # steps whose draft passes say how long one takes
_WARM_UP = (4, 0, 8)  # draft lengths tried first, so that the model has something to interpolate
_WARM_UP_AT = (0, 24, 96)  # steps: the first ones meet empty slots, which makes long windows look slow
# a neighbour is tried now and then, since an unused length would never be measured again: often where it is
# thought to be nearly as fast as the best
_REVISIT_STEPS, _RARE_REVISIT_STEPS, _NEAR = 16, 48, 0.85
_SPEED_STEPS = 64  # that the speed which a step has to keep up is taken from
_EASED = 0.9  # of it: what a step drafts and leaves out, the next one drafts again
_LONGER = 2  # times the longest window measured, which a step may become
_LEAST_MOST = 8  # drafted tokens that any step may become
_OUTLOOK_STEPS = 4
_COMPARED_S = 0.01  # of steps, after which lengths are compared anew: the GPU may wait 0.1 ms for that
_FAR_SLOWER = 1.5  # times what was expected of a step, from which on they are, too


class Governor(Protocol):
    """Chooses before each step, and learns after it."""

    def choose(self) -> int:
        """How many tokens the next step drafts."""

    def choose_gated(self, most: int) -> tuple[int, Gate | None]:
        """The same for a step that may stop earlier: how many tokens it drafts, `most` at most, and what ends
        it before that (None: nothing does)."""

    def observe(self, step: StepRecord) -> None:
        """After each step."""

    def instead(self, margins: Sequence[float]) -> int:
        """How many tokens that were looked up in the text, with these margins, to verify in the place of a
        draft; 0: draft."""


class FixedGovernor:
    """Always the same draft length."""

    def __init__(self, draft_length: int) -> None:
        self._draft_length = draft_length

    def choose(self) -> int:
        """The fixed length."""
        return self._draft_length

    def choose_gated(self, most: int) -> tuple[int, Gate | None]:
        """The fixed length, whatever is drafted."""
        return min(self._draft_length, most), None

    def observe(self, step: StepRecord) -> None:
        """Learns nothing."""

    def instead(self, margins: Sequence[float]) -> int:
        """None: the draft is as long as was asked for."""
        return 0


@dataclass(frozen=True, slots=True)
class _Speeds:
    """What is expected of steps whose length is given.

    Attributes:
        seconds, per_s: of a step, and tokens a second, by draft length from 0 on.
        best, longer, seen: see `_Outlook`.
    """

    seconds: NDArray[np.float64]
    per_s: NDArray[np.float64]
    best: int
    longer: int
    seen: int

    def agree_with(self, drafted: int, took_s: float) -> bool:
        """Whether a step says nothing new: it drafted no more than others had, and was not far slower than
        expected."""
        return drafted < self.seen and bool(took_s < _FAR_SLOWER * self.seconds[drafted])


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What is expected of steps that are gated, for some of them: the GPU waits while this is worked out.

    Attributes:
        verify_s: of passes over 1, 2, .. tokens, and what the host takes for such steps.
        plain_per_s: tokens a second where nothing is drafted.
        best, longer: see `AutoGovernor._best`.
        one_is_near: drafting one token is nearly as fast as drafting none, or faster.
        seen: the longest window that was measured lately.
        until: step from which on it is looked anew.
    """

    verify_s: NDArray[np.float64]
    plain_per_s: float
    best: int
    longer: int
    one_is_near: bool
    seen: int
    until: int


class AutoGovernor:
    """Maximises expected tokens a second; turns drafting off when it does not pay. Keeps what it learnt
    across answers."""

    def __init__(self, max_draft_length: int) -> None:
        self._longest = max_draft_length
        self._candidates = [g for g in CANDIDATES if g <= max_draft_length]
        self._steps = 0
        self._drafted = False  # by the last step
        self._draft_token_s: deque[float] = deque(maxlen=_RECENT)
        self._whole, self._times, self._host = StepTimes(), VerifyTimes(), HostTimes()
        self._acceptance, self._margins = AcceptanceRates(max_draft_length), MarginRates()
        self._recent: deque[tuple[int, float]] = deque(maxlen=_SPEED_STEPS)  # tokens and seconds of steps
        self._speeds: _Speeds | None = None  # as compared `_compared_s` of steps ago; None: to be compared
        self._compared_s = 0.0
        self._outlook: _Outlook | None = None

    def choose(self) -> int:
        """Warm-up lengths first and twice again, else the best, now and then a neighbour of it."""
        warm_up = self._warm_up()
        if warm_up is not None:
            self._speeds = None
            return warm_up
        if self._speeds is None or self._compared_s >= _COMPARED_S:
            self._speeds, self._compared_s = self._compare(), 0.0
        speeds, best = self._speeds.per_s, self._speeds.best
        if self._steps % _REVISIT_STEPS == 0:
            longer = self._speeds.longer
            shorter = next((g for g in reversed(self._candidates) if g < best), longer)
            neighbour = longer if (self._steps // _REVISIT_STEPS) % 2 else shorter
            if self._steps % _RARE_REVISIT_STEPS == 0 or speeds[neighbour] >= _NEAR * speeds[best]:
                return neighbour
        return best

    def choose_gated(self, most: int) -> tuple[int, Gate | None]:
        """A step that may stop anywhere up to twice the longest window so far. Now and then one of a length
        that is given: where steps draft, one that does not, or a long one, and where none does, one that
        does."""
        if self._warm_up() is not None or not self._margins.known:
            return min(self.choose(), most), None
        if self._outlook is None or self._steps >= self._outlook.until:
            self._outlook = self._look()
        outlook, most = self._outlook, min(most, self._longest)
        if outlook.best + 1 > outlook.seen:
            return min(outlook.best, most), None
        tokens, seconds = (sum(column) for column in zip(*self._recent, strict=True))
        speed = max(outlook.plain_per_s, _EASED * tokens / max(1e-9, seconds))
        verify_s = outlook.verify_s[: most + 1]
        gate = DraftGate(self._margins, typical(self._draft_token_s), verify_s, speed)
        if not gate.goes_on(()):
            try_one = self._steps % (_REVISIT_STEPS if outlook.one_is_near else _RARE_REVISIT_STEPS) == 0
            return min(int(try_one), most), None
        if self._steps % _RARE_REVISIT_STEPS == 0:
            return min(outlook.longer if (self._steps // _RARE_REVISIT_STEPS) % 2 else 0, most), None
        return min(most, max(_LEAST_MOST, _LONGER * outlook.seen)), gate

    def observe(self, step: StepRecord) -> None:
        """Update the running averages."""
        assert not step.found, "nothing is looked up: see EitherGovernor"
        self._steps += 1
        self._times.observe(step.drafted + 1, step.verify_s)
        passes = max(step.drafted, len(step.margins))
        self._whole.observe(passes, step.drafted, step.draft_s, step.verify_s)
        if self._drafted == (passes > 0):  # else it began otherwise than such steps do in a row
            self._host.observe(step.drafted + 1, step.host_s)
        self._drafted = passes > 0
        if passes:
            self._draft_token_s.append(step.draft_s / passes)
        self._acceptance.observe(step.drafted, step.accepted)
        self._margins.observe(step.margins, step.drafted, step.accepted)
        self._recent.append((step.tokens, step.took_s))
        self._compared_s += step.took_s
        if self._speeds is not None and not self._speeds.agree_with(step.drafted, step.took_s):
            self._speeds = None

    def instead(self, margins: Sequence[float]) -> int:
        """None."""
        return 0

    def expected_tokens_per_s(self, draft_length: int) -> float:
        """The objective of equation 2."""
        return float(self._compare().per_s[min(draft_length, self._longest)])

    def _compare(self) -> _Speeds:
        windows = self._longest + 1
        seconds = self._whole.of(windows) + self._host.of(windows)
        per_s = np.array(self._acceptance.expected_tokens()) / np.maximum(1e-9, seconds)
        return _Speeds(seconds, per_s, *self._best(per_s), self._times.longest)

    def _look(self) -> _Outlook:
        verify_s = self._times.fitted(self._longest + 1) + self._host.of(self._longest + 1)
        draft_token_s = typical(self._draft_token_s) if self._draft_token_s else 0.0
        seconds = np.arange(self._longest + 1) * draft_token_s + verify_s
        speeds = np.array(self._margins.expected_tokens(self._longest)) / np.maximum(1e-9, seconds)
        best, longer = self._best(speeds)
        near = self._longest > 0 and bool(speeds[1] >= _NEAR * speeds[0])
        until = self._steps + _OUTLOOK_STEPS
        return _Outlook(verify_s, float(speeds[0]), best, longer, near, self._times.longest, until)

    def _warm_up(self) -> int | None:
        tried = next(self._steps - at for at in reversed(_WARM_UP_AT) if self._steps >= at)
        return min(_WARM_UP[tried], self._candidates[-1]) if tried < len(_WARM_UP) else None

    def _best(self, speeds: NDArray[np.float64]) -> tuple[int, int]:
        """The fastest length, and the next longer one. Tokens share experts, so long windows cost less than a
        straight line says: where the longest tried is best, the next one is tried."""
        best = max(self._candidates, key=lambda length: float(speeds[length]))
        longer = next((g for g in self._candidates if g > best), best)
        return (longer, longer) if best + 1 == self._times.longest < longer + 1 else (best, longer)
