"""Who picks the draft length: fixed, or the one whose expected tokens a second are highest (MoE-SpeQ 3.2,
equations 2 to 4).

Expected tokens of a step with draft length g: those of `acceptance_rates`. Time of a step: g draft passes
plus one verify pass of g + 1 tokens, as measured lately; times of windows not yet seen are interpolated.
Output never depends on the choice, only speed does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from localmoe.speculative.acceptance_rates import AcceptanceRates

CANDIDATES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_RECENT = 5  # measurements that a time is the lower median of: one disturbed step does not count
_WARM_UP = (4, 0, 8)  # draft lengths tried first, so that the model has something to interpolate
_WARM_UP_AT = (0, 24, 96)  # steps: the first ones meet empty slots, which makes long windows look slow
# a neighbour is tried now and then, since an unused length would never be measured again: often where it is
# thought to be nearly as fast as the best
_REVISIT_STEPS, _RARE_REVISIT_STEPS, _NEAR = 16, 48, 0.85


class Governor(Protocol):
    """Chooses before each step, and learns after it."""

    def choose(self) -> int:
        """Draft length of the next step."""

    def observe(self, drafted: int, accepted: int, draft_s: float, verify_s: float) -> None:
        """What the step took."""


class FixedGovernor:
    """Always the same draft length."""

    def __init__(self, draft_length: int) -> None:
        self._draft_length = draft_length

    def choose(self) -> int:
        """The fixed length."""
        return self._draft_length

    def observe(self, drafted: int, accepted: int, draft_s: float, verify_s: float) -> None:
        """Learns nothing."""


class AutoGovernor:
    """Maximises expected tokens a second; turns drafting off when it does not pay. Keeps what it learnt
    across answers."""

    def __init__(self, max_draft_length: int) -> None:
        self._candidates = [g for g in CANDIDATES if g <= max_draft_length]
        self._steps = 0
        self._draft_token_s: deque[float] = deque(maxlen=_RECENT)
        self._verify_s: dict[int, deque[float]] = {}  # window -> seconds
        self._acceptance = AcceptanceRates(max_draft_length)

    def choose(self) -> int:
        """Warm-up lengths first and twice again, else the best, now and then a neighbour of it. Tokens share
        experts, so long windows cost less than a straight line says: where the longest tried is best, the
        next one is tried."""
        tried = next(self._steps - at for at in reversed(_WARM_UP_AT) if self._steps >= at)
        if tried < len(_WARM_UP):
            return min(_WARM_UP[tried], self._candidates[-1])
        speed = self._objective()
        best = max(self._candidates, key=speed)
        longer = next((g for g in self._candidates if g > best), best)
        if best + 1 == max(self._verify_s) < longer + 1:
            return longer
        if self._steps % _REVISIT_STEPS == 0:
            shorter = next((g for g in reversed(self._candidates) if g < best), longer)
            neighbour = longer if (self._steps // _REVISIT_STEPS) % 2 else shorter
            if self._steps % _RARE_REVISIT_STEPS == 0 or speed(neighbour) >= _NEAR * speed(best):
                return neighbour
        return best

    def observe(self, drafted: int, accepted: int, draft_s: float, verify_s: float) -> None:
        """Update the running averages."""
        self._steps += 1
        self._verify_s.setdefault(drafted + 1, deque(maxlen=_RECENT)).append(verify_s)
        if drafted:
            self._draft_token_s.append(draft_s / drafted)
        self._acceptance.observe(drafted, accepted)

    def expected_tokens_per_s(self, draft_length: int) -> float:
        """The objective of equation 2."""
        return self._objective()(draft_length)

    def _objective(self) -> Callable[[int], float]:
        """As a function of the draft length: what all lengths have in common is computed once, for the GPU
        waits meanwhile."""
        tokens = self._acceptance.expected_tokens()
        draft_token_s = _typical(self._draft_token_s) if self._draft_token_s else 0.0
        times = {window: _typical(seconds) for window, seconds in sorted(self._verify_s.items())}

        def speed(draft_length: int) -> float:
            step_s = draft_length * draft_token_s + _time_of(draft_length + 1, times)
            return tokens[min(draft_length, len(tokens) - 1)] / max(1e-9, step_s)

        return speed


def _time_of(window: int, times: dict[int, float]) -> float:
    """Measured, or on the straight line through the nearest measured windows. times: by window, ascending."""
    known = list(times)
    if window in times or len(known) == 1:
        return times.get(window, times[known[0]])
    upper = next((w for w in known if w > window), known[-1])
    lower = known[max(0, known.index(upper) - 1)]
    if lower == upper:
        upper = known[1]
    slope = (times[upper] - times[lower]) / (upper - lower)
    return times[lower] + max(0.0, slope) * (window - lower)


def _typical(seconds: Iterable[float]) -> float:
    """The lower median: disturbances only ever make a step slower."""
    ordered = sorted(seconds)
    return ordered[(len(ordered) - 1) // 2]
