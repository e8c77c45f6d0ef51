"""Builds the loaded engine's better draft in a thread of its own, one build at a time. Decides neither
whether one is wanted nor what the page says of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from app.engine_status import INTERNAL_ERROR, EngineLike
from localmoe.core.errors import LocalMoeError
from localmoe.core.types import Progress

STAGE = "Preparing"  # until the engine's first report: an answer may have to end before


class DraftImprover:
    """Runs `EngineLike.improve_draft`.

    Its lock is held for a moment only and nothing is called under it; `report` and `ended` are called from
    the thread of the build, `ended` once it is out of the engine.
    """

    def __init__(
        self,
        report: Callable[[EngineLike, Progress, threading.Event], None],
        ended: Callable[[EngineLike, str], None],
    ) -> None:
        """
        Args:
            report: the engine, how far its build is, and an event that is set if nobody wants to know.
            ended: the engine, and one sentence if the build failed; "" if it succeeded, was cancelled, or had
                nothing to build.
        """
        self._report, self._ended = report, ended
        self._lock = threading.Lock()
        self._cancel: threading.Event | None = None  # of the build that is wanted; None: there is none
        self._thread: threading.Thread | None = None  # the last one; it waits for those before

    def start(self, engine: EngineLike) -> None:
        """Begin, unless a build is under way. Returns at once."""
        with self._lock:
            if self._cancel is not None:
                return
            self._cancel = threading.Event()
            args = (self._thread, engine, self._cancel)
            self._thread = threading.Thread(target=self._run, args=args, name="better-draft", daemon=True)
            self._thread.start()

    def cancel(self) -> None:
        """End the build after the piece of work under way. Returns at once."""
        with self._lock:
            if self._cancel is not None:
                self._cancel.set()
                self._cancel = None

    def join(self) -> None:
        """Wait for the end of a cancelled build. Hold no lock that `report` or `ended` takes."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self, previous: threading.Thread | None, engine: EngineLike, cancelled: threading.Event) -> None:
        if previous is not None:
            previous.join()
        note = ""
        try:
            if not cancelled.is_set() and not engine.why_no_better_draft():
                self._build(engine, cancelled)
        except LocalMoeError as failure:
            note = "" if cancelled.is_set() else str(failure)
        except Exception:
            note = INTERNAL_ERROR
            raise  # to the terminal
        finally:
            with self._lock:
                if self._cancel is cancelled:
                    self._cancel = None
            self._ended(engine, note)

    def _build(self, engine: EngineLike, cancelled: threading.Event) -> None:
        total = engine.footprint.total_experts
        self._report(engine, Progress(STAGE, 0, total, "experts"), cancelled)
        engine.improve_draft(
            progress=lambda progress: self._report(engine, progress, cancelled), cancel=cancelled
        )
