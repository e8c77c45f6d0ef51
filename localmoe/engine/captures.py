"""What is done ahead while nobody waits for an answer, so that the next one need not wait for it: passes are
captured, of which the runner knows which (model.pass_kinds), and experts come from the disk into free RAM,
and from RAM into free slots.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from localmoe.core.config import SamplingConfig
from localmoe.core.errors import LocalMoeError
from localmoe.core.threads import begin_thread
from localmoe.engine.loading import Runner
from localmoe.engine.log_lines import log_no_captures, log_not_captured, log_not_filled
from localmoe.engine.turns import Turns


class Captures:
    """Of one engine. The engine itself begins none: whoever holds it does, once it is loaded and after each
    answer."""

    def __init__(
        self,
        runner: Runner,
        busy: threading.Lock,
        turns: Turns,
        fill_ram: Callable[[], None] = lambda: None,
        fill_slots: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            busy: held while an answer is written or memory is divided.
            fill_ram: returns at once, and what it begins ends with the next answer.
            fill_slots: with some experts; whether there will be more.
        """
        self._runner, self._busy, self._turns = runner, busy, turns
        self._fill_ram, self._fill_slots = fill_ram, fill_slots
        self._closed = False
        self._capturing = threading.Lock()
        self._lock = threading.Lock()  # guards what follows
        self._sampling: SamplingConfig | None = None
        self._wanted = self._runs = False
        self._active = 0  # calls that capture, or wait for their turn

    def begin(self, sampling: SamplingConfig | None = None) -> None:
        """Capture in a thread of its own what the next answers will likely run, one pass after the other,
        until all are there, then fill slots, or until the engine is in use. Returns at once; call it when
        that has ended again.

        Args:
            sampling: of the answers to come; None: as the last one's.
        """
        if not self._closed and not self._busy.locked():
            self._fill_ram()
        with self._lock:
            self._sampling, self._wanted = sampling, True
            if self._runs:
                return
        try:
            begin_thread("captures", self._run)
        except RuntimeError:  # the next call may get one
            log_no_captures()

    def _run(self) -> None:
        with self._lock:
            if self._runs:  # another one was faster
                return
            self._runs = True
        while True:
            with self._lock:
                if not self._wanted:
                    self._runs = False
                    return
                self._wanted, sampling = False, self._sampling
            try:
                while self.ahead(sampling):
                    pass
            # others have taken it; an answer that needs more says so. Any other error ends captures for good
            except torch.OutOfMemoryError:
                log_not_captured()
            except LocalMoeError as error:  # whoever needs the expert will be told
                log_not_filled(error)

    def ahead(self, sampling: SamplingConfig | None = None) -> bool:
        """Capture one, or fill some slots; some tenths of a second, for which an answer that is asked for
        meanwhile waits. False where there is nothing to do, or the engine is in use or closed.

        Raises:
            torch.OutOfMemoryError: the GPU has no memory for it. LocalMoeError: experts cannot be read.
        """
        with self._lock:
            self._active += 1  # before it counts among the answers, see in_use
        try:
            # in this order: nobody waits for a build's piece of work
            with self._turns.answer(), self._capturing:
                if self._closed or self._busy.locked():
                    return False
                return self._runner.capture_ahead(sampling) or self._fill_slots()
        finally:
            with self._lock:
                self._active -= 1

    def in_use(self) -> bool:
        """Whether an answer is written or a pass captured, or wants its turn: a build that is cancelled must
        not give memory back until then."""
        return self._busy.locked() or self._active > 0

    def wait(self) -> None:
        """Once the engine is in use: until the one that is captured is there; no other one begins."""
        with self._capturing:
            pass

    def close(self) -> None:
        """Capture no more; when this returns, none is being captured."""
        self._closed = True
        self.wait()
