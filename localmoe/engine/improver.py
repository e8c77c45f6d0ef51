"""The life of an engine's background build: one at a time, ended by whoever asked for it or with the engine.
Builds nothing itself (draft_upgrade does)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from localmoe.core.config import EngineConfig
from localmoe.core.types import ProgressCallback
from localmoe.engine.draft_upgrade import improve_draft
from localmoe.engine.loading import EngineParts
from localmoe.engine.log_lines import log_better_draft
from localmoe.engine.turns import Turns


class DraftImprover:
    """Runs `improve_draft` for one engine."""

    def __init__(self, turns: Turns, busy: Callable[[], bool], reserve: Callable[[int], None]) -> None:
        """busy: whether something uses the engine that has, or waits for, an answer's turn. reserve: see
        improve_draft."""
        self._turns = turns
        self._busy = busy
        self._reserve = reserve
        self._running = threading.Lock()
        self._closing = threading.Event()  # set when the engine is being closed

    @property
    def running(self) -> bool:
        """Whether a build is under way."""
        return self._running.locked()

    def run(
        self,
        parts: EngineParts,
        config: EngineConfig,
        progress: ProgressCallback | None,
        cancel: threading.Event | None,
    ) -> str:
        """Build and take over; what the draft is now.

        Raises:
            LocalMoeError: as improve_draft.
        """
        stop = _Stop(self._closing, cancel or threading.Event(), self._busy)
        with self._running:
            info = improve_draft(parts, config, self._turns, self._lend, progress=progress, cancel=stop)
        log_better_draft(str(info))
        return str(info)

    def _lend(self, num_bytes: int) -> None:
        if not self._closing.is_set():  # else nobody may touch the slots: an answer may use them still
            self._reserve(num_bytes)

    def close(self) -> None:
        """End the build; returns when it has let go of the weights."""
        self._closing.set()
        self._turns.wake()
        with self._running:
            pass


class _Stop(threading.Event):
    """Set when the engine is being closed, or when `cancel` is and nothing uses the engine: a build that ends
    gives its part of the budget back, which makes the slots anew, and an answer must not lose its slots. So
    nobody has to be woken after `cancel`: a build that waits for an answer looks at it when that ends."""

    def __init__(self, closing: threading.Event, cancel: threading.Event, busy: Callable[[], bool]) -> None:
        super().__init__()
        self._closing, self._cancel, self._busy = closing, cancel, busy

    def is_set(self) -> bool:
        return self._closing.is_set() or (self._cancel.is_set() and not self._busy())
