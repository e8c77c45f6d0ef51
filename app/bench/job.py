"""One benchmark in a thread of its own, which no page reload ends: how far it is, and how it ended. Measures
nothing itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from app.engine_status import INTERNAL_ERROR
from localmoe.core.errors import LocalMoeError


class BenchmarkStoppedError(LocalMoeError):
    """The user stopped it."""


@dataclass(frozen=True, slots=True)
class BenchmarkView:
    """A snapshot.

    Attributes:
        stage, values: an English text of the page and what is filled in.
        share: done, 0 to 1.
        result: id of what came of it, when it is done.
    """

    phase: Literal["running", "done", "stopped", "failed"] = "running"
    stage: str = "Waiting for the engine"
    values: Mapping[str, object] = field(default_factory=dict)
    share: float = 0.0
    seconds_left: float | None = None
    error: str = ""
    result: str = ""
    revision: int = 0


class BenchmarkJob:
    """Runs `work` and shows what it reports. `stop` is what `work` has to look at between two steps."""

    def __init__(self, work: Callable[[BenchmarkJob], str], ended: Callable[[], None]) -> None:
        """work: gives the id of its result, or raises. ended: called at the very end."""
        self.stop = threading.Event()
        self._work, self._ended = work, ended
        self._lock = threading.Lock()
        self._view = BenchmarkView()
        self._since = 0.0  # when the work began that the time left is told from
        self._thread = threading.Thread(target=self._run, name="benchmark", daemon=True)

    def start(self) -> None:
        """Begin. Returns at once."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join()

    def view(self) -> BenchmarkView:
        """How far it is."""
        with self._lock:
            return self._view

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.view().phase == "running"

    def report(self, stage: str, share: float, **values: object) -> None:
        """Show how far the work is. What is left is told from the pace so far, once there is some."""
        now = time.monotonic()
        self._since = self._since or now
        left = (now - self._since) * (1.0 - share) / share if share > 0.02 else None
        self._show(stage=stage, values=values, share=min(1.0, share), seconds_left=left)

    def _show(self, **changes: Any) -> None:
        with self._lock:
            self._view = replace(self._view, revision=self._view.revision + 1, **changes)

    def _run(self) -> None:
        end: dict[str, Any] = {"phase": "failed", "error": INTERNAL_ERROR}
        try:
            end = {"phase": "done", "result": self._work(self), "share": 1.0}
        except LocalMoeError as failure:
            end = {"phase": "failed", "error": str(failure)}
            if self.stop.is_set():
                end = {"phase": "stopped"}
        finally:
            self._ended()
            self._show(seconds_left=None, **end)
