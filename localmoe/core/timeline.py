"""When what ran in the last steps: spans by lane in a bounded ring, and the same as a file for Perfetto or
chrome://tracing. Measures nothing itself: whoever does the work tells when it began and ended.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from localmoe.core.output_file import write_output

# draft: the low-bit model's tokens; verify: passes of the target; cpu: experts that the CPU computes in them;
# stall: the target waits for a copy; copies: host to device; host: neither draft nor target runs
Lane = Literal["draft", "verify", "cpu", "stall", "copies", "host"]
LANES: tuple[Lane, ...] = get_args(Lane)
DEFAULT_STEPS = 64  # that are kept
TIMELINE = "The timeline"  # to people
_PASSES = ("draft", "verify")  # what the host's time is the rest of
_MAX_SPANS = 20_000  # of a step; a prompt of a large model copies every expert


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran. Times in seconds of time.perf_counter; num_bytes: that were copied."""

    lane: Lane
    name: str
    start_s: float
    end_s: float
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepSpans:
    """A step: from its beginning to that of the next one, or to the answer's end. Steps of an answer follow
    each other without a gap. A copy belongs to the step in which it ended and may have begun before; all
    other spans lie within."""

    name: str
    start_s: float
    end_s: float
    spans: tuple[Span, ...]


class Timeline:
    """The last steps. Any thread may add to the open step and read the others."""

    def __init__(
        self, max_steps: int = DEFAULT_STEPS, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.now = clock
        self._lock = threading.Lock()
        self._steps: deque[StepSpans] = deque(maxlen=max_steps)
        self._open: tuple[str, float, list[Span]] | None = None
        self._next_s: float | None = None  # since when the next step runs, if it does

    def begin_step(self, name: str) -> None:
        """A step begins, and with it the one before ends: now, or where `next_begins` was called since."""
        with self._lock:
            begins_s = self.now() if self._next_s is None else self._next_s
            self._close(begins_s)
            self._open = name, begins_s, []

    def next_begins(self, at_s: float | None = None) -> None:
        """The next step begins then (None: now), whatever its name will be."""
        self._next_s = self.now() if at_s is None else at_s

    def end_step(self) -> None:
        """The answer is over; nothing is open from here on."""
        with self._lock:
            self._close(self.now())

    def add(
        self, lane: Lane, name: str, start_s: float, end_s: float | None = None, num_bytes: int = 0
    ) -> None:
        """Something ended, now if end_s is None. What ended when no step was open is not kept."""
        with self._lock:
            end_s = self.now() if end_s is None else end_s
            if self._open is None or end_s < self._open[1] or len(self._open[2]) >= _MAX_SPANS:
                return
            if lane in _PASSES:  # one may have been issued behind the last step's
                start_s = max(start_s, self._open[1])
            self._open[2].append(Span(lane, name, start_s, end_s, num_bytes))

    @contextmanager
    def span(self, lane: Lane, name: str) -> Iterator[None]:
        """Time what runs inside."""
        started = self.now()
        try:
            yield
        finally:
            self.add(lane, name, started)

    def steps(self) -> tuple[StepSpans, ...]:
        """Those that have ended, oldest first."""
        with self._lock:
            return tuple(self._steps)

    def _close(self, now: float) -> None:
        self._next_s = None
        if self._open is None:
            return
        name, start_s, spans = self._open
        self._open = None
        spans += _host_spans(start_s, now, spans)
        spans.sort(key=lambda span: (span.start_s, -span.end_s))
        self._steps.append(StepSpans(name, start_s, now, tuple(spans)))


def _host_spans(start_s: float, end_s: float, spans: Sequence[Span]) -> list[Span]:
    """The parts of a step in which neither draft nor target runs: sampling, policy, text, its reader."""
    found, reached = [], start_s
    for busy in sorted((span.start_s, span.end_s) for span in spans if span.lane in _PASSES):
        if busy[0] > reached:
            found.append(Span("host", "host", reached, busy[0]))
        reached = max(reached, busy[1])
    if end_s > reached:
        found.append(Span("host", "host", reached, end_s))
    return found


def trace_events(steps: Sequence[StepSpans], process: str = "localmoe") -> dict[str, object]:
    """The steps in the Trace Event Format's JSON object form (Google, "Trace Event Format", "Complete
    Events" and "Metadata Events"); times in microseconds since the first step's beginning."""
    zero = min((span.start_s for step in steps for span in step.spans), default=0.0)
    zero = min(zero, steps[0].start_s) if steps else zero
    lanes: tuple[str, ...] = ("steps", *LANES)
    events: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": process}}
    ]
    for place, lane in enumerate(lanes):
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": place, "args": {"name": lane}})
        events.append(
            {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": place, "args": {"sort_index": place}}
        )
    for step in steps:
        events.append(_complete("steps", step.name, step.start_s - zero, step.end_s - zero, 0, {}))
        for span in step.spans:
            more: dict[str, object] = {"bytes": span.num_bytes} if span.num_bytes else {}
            tid = lanes.index(span.lane)
            events.append(_complete(span.lane, span.name, span.start_s - zero, span.end_s - zero, tid, more))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _complete(
    category: str, name: str, start_s: float, end_s: float, tid: int, more: dict[str, object]
) -> dict[str, object]:
    return {
        "name": name, "cat": category, "ph": "X", "ts": round(1e6 * start_s, 3),
        "dur": round(1e6 * (end_s - start_s), 3), "pid": 1, "tid": tid, "args": more,
    }  # fmt: skip


def write_trace(path: Path, steps: Sequence[StepSpans], process: str = "localmoe") -> None:
    """Save under this very name, for Perfetto; a file of that name is replaced once the new one is complete.

    Raises:
        ConfigError: it cannot be written.
    """
    write_output(TIMELINE, path, json.dumps(trace_events(steps, process)).encode())
