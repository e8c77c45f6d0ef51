"""Looks at the loaded engine while it answers, for every open page at once: slots, heat, link, timeline, and
what an answer could have reused. Draws nothing; nothing is looked at while no page asks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from app.engine_status import EngineLike
from localmoe.core.errors import LocalMoeError
from localmoe.core.live_state import LiveState, ReuseBound
from localmoe.core.timeline import StepSpans

LOOK_S = 0.4  # pages that ask more often share a look
RATE_S = 1.0  # the link's use is the mean over at least so long
TIMELINE_S = 5.0  # recording ends so long after the last page asked


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen. copied_bytes_per_s: None before the second look."""

    state: LiveState
    copied_bytes_per_s: float | None
    steps: tuple[StepSpans, ...]


class LiveMonitor:
    """Of whichever engine is loaded. Any thread may call anything."""

    def __init__(self, engine: Callable[[], EngineLike], clock: Callable[[], float] = time.monotonic) -> None:
        """engine: the loaded one, or raises a LocalMoeError."""
        self._engine, self._clock = engine, clock
        self._lock = threading.Lock()
        self._looked: tuple[EngineLike, float, Look] | None = None
        self._copied: deque[tuple[float, int]] = deque(maxlen=64)  # when, and bytes by then; newest last
        self._recorded: EngineLike | None = None  # whose timeline is on
        self._timeline_until = 0.0
        self._last: tuple[int, ReuseBound | None] = (0, None)  # answer's number and bound; read unlocked

    @property
    def revision(self) -> int:
        """Changes with `bound`."""
        answers, bound = self._last
        return 2 * answers + (bound is not None)

    @property
    def bound(self) -> ReuseBound | None:
        """Of the last answer; None while it is written, and until it is computed."""
        return self._last[1]

    def begin_answer(self) -> int:
        """Another answer begins; its number, for `end_answer`."""
        with self._lock:
            number = self._last[0] + 1
            self._last = number, None
            return number

    def end_answer(self, engine: EngineLike, number: int) -> None:
        """Compute what the answer could have reused, in the caller's thread."""
        try:
            with self._lock:
                self._record(engine, self._clock(), False)  # ends it where the last page was closed
            bound = engine.live.reuse_bound()
        except LocalMoeError:
            return  # closed meanwhile, and nobody looks at its last answer any more
        with self._lock:
            if number == self._last[0]:  # else the next answer was begun, and this may be of a part of it
                self._last = number, bound

    def look(self, *, timeline: bool = False) -> Look | None:
        """What there is to see now; None while no model is loaded. timeline: somebody wants to see steps, so
        they are recorded from now on and for a while."""
        with self._lock:
            now = self._clock()
            try:
                engine = self._engine()
                self._record(engine, now, timeline)
                if self._looked is None or self._looked[0] is not engine or now - self._looked[1] >= LOOK_S:
                    self._looked = engine, now, self._take(engine)
            except LocalMoeError:
                self._looked = self._recorded = None
                self._copied.clear()
                return None
            return self._looked[2]

    def _record(self, engine: EngineLike, now: float, wanted: bool) -> None:
        if wanted:
            self._timeline_until = now + TIMELINE_S
        on = now < self._timeline_until
        if on and self._recorded is not engine:
            engine.live.record_timeline()
            self._recorded = engine
        elif not on and self._recorded is engine:
            engine.live.record_timeline(None)
            self._recorded = None

    def _take(self, engine: EngineLike) -> Look:
        state = engine.live.state()
        if self._looked is None or self._looked[0] is not engine:
            self._copied.clear()
        if self._copied and state.h2d_bytes < self._copied[-1][1]:
            self._copied.clear()  # its slots were made anew
        self._copied.append((state.at_s, state.h2d_bytes))
        while len(self._copied) > 2 and state.at_s - self._copied[1][0] >= RATE_S:
            self._copied.popleft()
        (then_s, then_bytes), rate = self._copied[0], None
        if state.at_s > then_s:
            rate = (state.h2d_bytes - then_bytes) / (state.at_s - then_s)
        return Look(state, rate, engine.live.timeline())
