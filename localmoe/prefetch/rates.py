"""Times passes and copies by the events that are told of them. Decides nothing: policies hear of rates that
have changed noticeably (RatesMeasured).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

from localmoe.core.events import (
    DraftFinished,
    Event,
    LayerDemanded,
    PassRouted,
    PrefillStarted,
    Rates,
    StepFinished,
    StepStarted,
)

_RECENT = 8  # passes that a time is taken from
_COPY_INTERVALS = 256  # stretches of time of which the one with the fastest copies tells the link's rate
_LEAST_COPIES = 8  # in a stretch that counts
_DRIFT = 0.2  # relative change from which on a rate is told again

_Mark: TypeAlias = tuple[float, float, float, float]  # now, copies, seconds of the CPU, seconds of waiting


class RateMeter:
    """Measures draft tokens, target layers and copies.

    A disturbance makes a draft or a copy longer and never shorter, so the least of several measurements is
    taken. Layers are timed by the gap between neighbouring demands, the least of a step, since others wait
    for copies; where only whole passes are seen, what they waited for experts is subtracted, and the median
    is taken. Where nobody measures that, it is what their copies take, or what the CPU computed meanwhile if
    that is more (both go on at once).

    Attributes:
        copy_s: seconds of one copy, where the memory measures that; None where it does not (yet).
        copies: copies so far, where whole passes run. Where copy_s is not known, a stretch of time divided by
            its copies is; that is too long where the link is not what the stretch waited for.
        stall_s: seconds that whole passes waited for experts so far, where that is measured.
        cpu_busy_s: seconds in which the CPU computed experts so far, where it does.
        issue_s: seconds that asking for one copy takes the host, where that is on the way of a step.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.copy_s: Callable[[], float | None] | None = None
        self.copies: Callable[[], float] | None = None
        self.stall_s: Callable[[], float | None] | None = None
        self.cpu_busy_s: Callable[[], float] | None = None
        self.issue_s: Callable[[], float | None] | None = None
        self._clock = clock
        self._draft_token_s: deque[float] = deque(maxlen=_RECENT)
        self._clocked_draft_token_s: deque[float] = deque(maxlen=_RECENT)  # better: no host between
        self._target_layer_s: deque[float] = deque(maxlen=_RECENT)
        self._interval_copy_s: deque[float] = deque(maxlen=_COPY_INTERVALS)
        self._interval: _Mark | None = None  # when it began
        self._step_began: float | None = None
        self._pass_began: _Mark | None = None
        self._demanded: tuple[int, float] | None = None  # last layer and when
        self._least_gap_s: float | None = None  # of this step's layers
        self._cpu_helps = False  # in the last pass
        self._told = Rates()

    def tell_again(self) -> None:
        """Whoever listens has heard nothing yet."""
        self._told = Rates()

    def note(self, event: Event) -> Rates | None:
        """Take the time of an event; the rates, where they have changed noticeably since they were told."""
        match event:
            case StepStarted():
                self._end_interval()
                self._interval = self._pass_began = self._mark()
                self._step_began = self._interval[0]
                self._demanded = self._least_gap_s = None
                return self._news()
            case DraftFinished() if self._step_began is not None:
                self._pass_began = self._mark()
                if event.drafted and not event.looked_up:
                    self._draft_token_s.append((self._pass_began[0] - self._step_began) / event.drafted)
            case LayerDemanded() if self._step_began is not None:
                self._layer(event.layer, self._clock())
            case PassRouted():
                self._end_pass(len(event.demanded))
            case StepFinished():
                if event.draft_token_s is not None:
                    self._clocked_draft_token_s.append(event.draft_token_s)
                if self._least_gap_s is not None:
                    self._target_layer_s.append(self._least_gap_s)
            case PrefillStarted():
                self._step_began = self._pass_began = None  # a prompt's passes are longer
                self._interval = self._mark()
            case _:
                pass
        return None

    def _mark(self) -> _Mark:
        copies = 0.0 if self.copies is None else self.copies()
        busy_s = 0.0 if self.cpu_busy_s is None else self.cpu_busy_s()
        return self._clock(), copies, busy_s, self._stall_s() or 0.0

    def _since(self, mark: _Mark) -> _Mark:
        now, copies, busy_s, stall_s = self._mark()
        return now - mark[0], copies - mark[1], busy_s - mark[2], stall_s - mark[3]

    def _end_interval(self) -> None:
        if self._interval is not None:
            took_s, copies, *_ = self._since(self._interval)
            if copies >= _LEAST_COPIES:
                self._interval_copy_s.append(took_s / copies)
        self._interval = None

    def _end_pass(self, num_layers: int) -> None:
        if self._pass_began is None:
            return self._end_interval()  # a prompt's, of which every copy is over
        took_s, copies, busy_s, waited_s = self._since(self._pass_began)
        self._pass_began = None
        if self._stall_s() is None:
            waited_s = max(copies * (self._copy_s() or 0.0), busy_s)
        self._cpu_helps = busy_s > 0
        self._target_layer_s.append(max(0.0, took_s - waited_s) / num_layers)

    def _layer(self, layer: int, now: float) -> None:
        if self._demanded is not None and layer == self._demanded[0] + 1:
            gap_s = now - self._demanded[1]
            self._least_gap_s = gap_s if self._least_gap_s is None else min(gap_s, self._least_gap_s)
        self._demanded = layer, now

    def _stall_s(self) -> float | None:
        return None if self.stall_s is None else self.stall_s()

    def _copy_s(self) -> float | None:
        if self.copy_s is not None:
            return self.copy_s()
        return min(self._interval_copy_s, default=None)

    def _news(self) -> Rates | None:
        draft_token_s = min(self._clocked_draft_token_s or self._draft_token_s, default=None)
        layer_s = _median(self._target_layer_s)
        issue_s = None if self.issue_s is None else self.issue_s()
        found = Rates(self._copy_s(), draft_token_s, layer_s, self._cpu_helps, issue_s)
        told = self._told
        pairs = (
            (found.copy_s, told.copy_s),
            (found.draft_token_s, told.draft_token_s),
            (found.target_layer_s, told.target_layer_s),
            (found.issue_s, told.issue_s),
        )
        if found.cpu_helps == told.cpu_helps and not any(_differs(new, old) for new, old in pairs):
            return None
        self._told = found
        return found


def _median(values: Iterable[float]) -> float | None:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else None


def _differs(new: float | None, old: float | None) -> bool:
    if new is None or old is None:
        return new is not old
    return abs(new - old) > _DRIFT * old
