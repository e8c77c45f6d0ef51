"""Who is answered when: one order at a time on the engine, the others wait in a row of bounded length. Runs
in a thread of its own and knows neither HTTP nor an event loop."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Protocol, cast

from localmoe.core.config import GenerationRequest
from localmoe.core.stream import StreamEvent
from localmoe.server.deltas import Delta, write_deltas
from localmoe.server.errors import ApiError
from localmoe.server.order import Order

Deliver = Callable[[Delta | Exception], None]
_FIRST_GUESS_S = 10.0  # how long an answer takes, before any was written
_RECENT = 8  # answers that the mean time is of


class Streams(Protocol):
    """The part of the engine that is used here."""

    def stream(
        self, request: GenerationRequest, stop: threading.Event | None = None
    ) -> Iterator[StreamEvent]:
        """One answer, an event a step."""


class Ticket:
    """An order in the row, or the one that is answered. `deliver` is called from the desk's thread."""

    def __init__(self, order: Order, deliver: Deliver) -> None:
        self.order, self.deliver = order, deliver
        self.stop = threading.Event()


class AnswerDesk:
    """Answers orders in the order in which they came; `close` ends it."""

    def __init__(self, engine: Streams, max_waiting: int, on_idle: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            max_waiting: orders beside the one that is answered.
            on_idle: called after an answer where nobody waits for the next one; returns at once.
        """
        self._engine, self._max_waiting = engine, max_waiting
        self._on_idle = on_idle
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._current: Ticket | None = None
        self._closed = False
        self._times_s: deque[float] = deque(maxlen=_RECENT)
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self._thread.start()

    def submit(self, order: Order, deliver: Deliver) -> Ticket:
        """Take a place in the row. What comes is delivered: deltas up to one with a finish reason, or an
        exception that ends the answer.

        Raises:
            ApiError: 503; the row is full, or the server ends.
        """
        with self._changed:
            if self._closed:
                raise _ending()
            if len(self._waiting) + (self._current is not None) > self._max_waiting:
                raise self._full()
            ticket = Ticket(order, deliver)
            self._waiting.append(ticket)
            self._changed.notify_all()
            return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Nobody waits for this answer any more: it leaves the row, or ends after the step under way."""
        ticket.stop.set()
        with self._changed, contextlib.suppress(ValueError):  # it is not in the row any more
            self._waiting.remove(ticket)

    def counts(self) -> tuple[int, int]:
        """Orders that are answered now (0 or 1), and that wait."""
        with self._changed:
            return int(self._current is not None), len(self._waiting)

    def close(self) -> None:
        """End the answer under way and refuse those that wait; returns at once. May be called again."""
        with self._changed:
            self._closed = True
            refused = list(self._waiting)
            self._waiting.clear()
            if self._current is not None:
                self._current.stop.set()
            self._changed.notify_all()
        for ticket in refused:
            ticket.deliver(_ending())

    def join(self) -> None:
        """After `close`: wait until the engine is let go."""
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                ticket = self._current = self._waiting.popleft()
            started = time.monotonic()
            last = self._answer(ticket)
            self._times_s.append(time.monotonic() - started)
            with self._changed:
                self._current = None
            ticket.deliver(last)  # now, so that who has read it finds the engine free
            del ticket, last  # while nobody asks, its pictures need no room
            if self.counts() == (0, 0):
                self._on_idle()

    def _answer(self, ticket: Ticket) -> Delta | Exception:
        """Deliver all deltas but the last one; that one, or what ended the answer."""
        order = ticket.order
        events = cast(Generator[StreamEvent], self._engine.stream(order.generation, ticket.stop))
        try:
            with contextlib.closing(events):  # a stop string leaves it unfinished
                tools, splits = order.generation.tools, order.splits_thoughts
                for delta in write_deltas(events, order.stops, split_thoughts=splits, tools=tools):
                    if delta.finish is not None:
                        return _ending() if delta.finish == "cancelled" else delta
                    ticket.deliver(delta)
            raise AssertionError("an answer has a last event")
        except Exception as error:
            return error  # its client is told, and the next order is answered

    def _full(self) -> ApiError:
        mean_s = sum(self._times_s) / len(self._times_s) if self._times_s else _FIRST_GUESS_S
        return ApiError(
            503,
            f"{len(self._waiting)} requests wait already, the most that this server keeps: try again later, "
            "or start it with a larger --max-waiting.",
            code="queue_full",
            retry_after_s=max(1, math.ceil(mean_s)),
        )


def _ending() -> ApiError:
    return ApiError(503, "The server ends: start it again.", code="shutting_down")
