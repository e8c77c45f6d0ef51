"""One answer being written, in a thread of its own that no page reload ends. Knows no gradio and picks no
setting."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from app.answer_text import AnswerText
from app.chats import AnswerUnsavedError, ChatError, ChatMessage, ChatStore
from app.engine_status import INTERNAL_ERROR, NO_THREAD, EngineLike
from app.job_view import JobView, Place
from localmoe.core.config import GenerationRequest
from localmoe.core.errors import BudgetError, LocalMoeError
from localmoe.core.stats import GenerationStats
from localmoe.core.stream import StreamEvent
from localmoe.core.threads import begin_thread

_LOG = logging.getLogger(__name__)
__all__ = ["GenerationJob", "JobRunner", "JobRunningError", "JobView", "Place"]
SAVE_EVERY_S = 1.0
STEP_EVERY_S = 0.25
SPEED_EVERY_S = 0.2  # decode time between two points of the speed line
MAX_SPEEDS = 120
STOP_WAIT_S = 0.2


class JobRunningError(LocalMoeError):
    """An answer is being written already."""


class BenchmarkRunningError(LocalMoeError):
    """A benchmark has the engine to itself."""


class GenerationJob:
    """Runs `engine.stream` to its end and keeps text, statistics and the safety copy on disk. `request` is
    called in its thread, as it may read files; `on_step` between two steps, and at the end: the moments when
    the engine can be asked; `on_end` when all is over. `link` says how the engine copies experts."""

    def __init__(
        self,
        engine: EngineLike,
        request: Callable[[], GenerationRequest],
        place: Place,
        chats: ChatStore,
        link: str,
        on_step: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
        on_out_of_memory: Callable[[BudgetError], None] = lambda failure: None,
    ) -> None:
        self._engine, self._request, self._chats, self._on_step = engine, request, chats, on_step
        self._on_end, self._on_out_of_memory = on_end, on_out_of_memory
        self._link = link
        self._lock = threading.Lock()  # guards the view and the names beside it
        self._saving = threading.Lock()  # taken before the other: saves happen one after the other
        self._frozen = False  # nothing is added to the text any more
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._created = time.time()
        self._text = AnswerText(place.before)
        self._speeds: list[float] = []
        self._mark = (0.0, 1)  # decode seconds and tokens at the last point of the speed line
        self._next_save = self._next_step = 0.0
        self._saver_runs = False  # writes a safety copy
        self._place = place
        self._view = JobView(
            place.chat_id, self._created, 0, self._text.text(), None, "", None, (), self._text.thought_s,
            self._text.runs(),
        )  # fmt: skip

    def view(self) -> JobView:
        """How far the answer is."""
        with self._lock:
            return self._view

    def start(self, after: GenerationJob | None = None) -> None:
        """Begin, once the job before has let go of the engine."""
        try:
            begin_thread("answer", lambda: self._run(after))
        except RuntimeError:
            self._finish("error", NO_THREAD)
            self._stop.set()
            self._run(after)  # to its end, which is at once

    def stop(self) -> None:
        """End the answer now and keep its text, even if the step under way takes longer."""
        self._stop.set()
        if not self._ended.wait(STOP_WAIT_S):
            self._finish("cancelled", "")

    def join(self) -> None:
        """Wait until the engine is free again."""
        self._ended.wait()

    def _run(self, after: GenerationJob | None) -> None:
        finish, error = "error", INTERNAL_ERROR
        try:
            if after is not None:
                after.join()
            finish, error = self._consume(), ""
        except LocalMoeError as failure:
            finish, error = "error", str(failure)
            _LOG.error("an answer failed: %s", type(failure).__name__)  # its sentence might quote a text
            if isinstance(failure, BudgetError):
                self._on_out_of_memory(failure)
        finally:
            try:
                self._finish(finish, error)
            finally:
                self._ended.set()
            self._on_end()

    def _consume(self) -> str:
        if self._stop.is_set():
            return "cancelled"
        stream = self._engine.stream(self._request(), self._stop)
        try:
            for event in stream:
                if not self._take(event):
                    return "cancelled"
                if event.finish_reason is not None:
                    return event.finish_reason
                if time.monotonic() >= self._next_save:
                    self._begin_safety_copy()
                    self._next_save = time.monotonic() + SAVE_EVERY_S
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()
        return "stop"

    def _take(self, event: StreamEvent) -> bool:
        """Add the event to the view; False if the answer was ended meanwhile."""
        if event.finish_reason is not None or time.monotonic() >= self._next_step:
            self._on_step()
            self._next_step = time.monotonic() + STEP_EVERY_S
        with self._lock:
            view = self._view
            if self._frozen:
                return False
            self._text.add(event)
            self._add_speed(event.stats)
            self._view = replace(
                view, revision=view.revision + 1, text=self._text.text(), stats=event.stats,
                speeds=tuple(self._speeds), thought_s=self._text.thought_s, runs=self._text.runs(),
                draft_length=view.last_draft_length(event.stats),
            )  # fmt: skip
        return True

    def _add_speed(self, stats: GenerationStats) -> None:
        decode_s = (stats.tpot_s or 0.0) * max(0, stats.new_tokens - 1)
        then_s, then_tokens = self._mark
        if decode_s - then_s >= SPEED_EVERY_S:
            self._speeds.append((stats.new_tokens - then_tokens) / (decode_s - then_s))
            self._mark = (decode_s, stats.new_tokens)
            del self._speeds[:-MAX_SPEEDS]

    def _finish(self, finish: str, error: str) -> None:
        """Freeze the text, save it, and only then say that the answer has ended."""
        with self._saving:
            with self._lock:
                if self._frozen:
                    return
                self._frozen = True
                view = replace(self._view, finish=finish, error=error)
            note = self._save(view)
            with self._lock:
                self._view = replace(view, revision=view.revision + 1, error=note or view.error)

    def _begin_safety_copy(self) -> None:
        """In a thread of its own, as the answer need not wait for the disk. One at a time."""
        if not self._saver_runs:
            self._saver_runs = True
            try:
                begin_thread("save", self._save_safety_copy)
            except RuntimeError:  # the answer waits
                self._save_safety_copy()

    def _save_safety_copy(self) -> None:
        try:
            with self._saving:
                with self._lock:
                    view, frozen = self._view, self._frozen
                note = "" if frozen else self._save(view)
            with self._lock:
                if not self._frozen:
                    self._view = replace(self._view, error=note)
        finally:
            self._saver_runs = False

    def _save(self, view: JobView) -> str:
        """Write the answer to the disk; a sentence if that failed. A deleted chat ends the answer."""
        error = view.error if view.finish is not None else ""  # before, it is of the last safety copy
        answer = ChatMessage(
            "assistant", view.text, self._created, view.finish, error, self._stats(view), view.thought_s,
            view.runs,
        )  # fmt: skip
        try:
            node = self._chats.save_answer(view.chat_id, answer, self._place.question, self._place.node)
            self._place = replace(self._place, node=node)
        except AnswerUnsavedError as failure:
            self._place = replace(self._place, node=failure.node)
            return str(failure)
        except ChatError:
            self._stop.set()
        return ""

    def _stats(self, view: JobView) -> dict[str, Any]:
        """Of the last run, with the tokens that an answer had before it was continued."""
        before = self._place.before
        if view.stats is None:
            return {} if before is None else before.stats
        stats = {**view.stats.as_dict(), "link": self._link}
        if before is not None:
            earlier = (before.stats.get(name) or 0 for name in ("new_tokens", "earlier_tokens"))
            stats["earlier_tokens"] = sum(earlier)
        return stats


class JobRunner:
    """At most one answer at a time; the last one stays visible after its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._job: GenerationJob | None = None
        self._reserved: threading.Event | None = None  # ends what has the engine to itself
        self._released = threading.Event()

    def view(self) -> JobView | None:
        """The running answer, or the last one."""
        job = self._job
        return None if job is None else job.view()

    def running(self, chat_id: str | None = None) -> bool:
        """Whether an answer (of this chat, or of any) is being written."""
        view = self.view()
        return view is not None and view.finish is None and chat_id in (None, view.chat_id)

    def busy(self) -> bool:
        """Whether an answer or a benchmark has the engine."""
        return self._reserved is not None or self.running()

    def check_free(self) -> None:
        """Raise JobRunningError if an answer is being written, BenchmarkRunningError if one would
        disturb a benchmark."""
        if self._reserved is not None:
            raise BenchmarkRunningError("A benchmark is running: wait for its end, or stop it first.")
        if self.running():
            raise JobRunningError("An answer is still being written: wait for its end, or press Stop first.")

    def start(self, make: Callable[[], GenerationJob]) -> GenerationJob:
        """Begin the job that `make` gives. It may change a chat: it is called only when an answer may begin.
        Raises as `check_free` and `make`."""
        with self._lock:
            self.check_free()
            job = make()
            previous, self._job = self._job, job
            job.start(after=previous)
        return job

    def reserve(self, stop: threading.Event) -> None:
        """Let nobody begin an answer until `release`; `stop` is set when the engine is wanted back. Raises
        as `check_free`."""
        with self._lock:
            self.check_free()
            self._reserved, self._released = stop, threading.Event()

    def release(self) -> None:
        """Answers may begin again."""
        with self._lock:
            self._reserved = None
            self._released.set()

    def settle(self) -> None:
        """Wait until the last answer, which has ended for its reader, has let go of the engine."""
        job = self._job
        if job is not None:
            job.join()

    def stop(self) -> None:
        """End the running answer and keep its text."""
        job = self._job
        if job is not None:
            job.stop()

    def stop_and_wait(self) -> None:
        """The same, and a benchmark; wait until the engine is free."""
        reserved, released = self._reserved, self._released
        if reserved is not None:
            reserved.set()
            released.wait()
        job = self._job
        if job is not None:
            job.stop()
            job.join()
