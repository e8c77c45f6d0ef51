"""Holds the one engine: loads it in the background, swaps it, resizes it, has its draft improved, and says
how far it is. Decides no setting."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from app.draft_improver import DraftImprover
from app.engine_status import INTERNAL_ERROR, EngineLike, EngineLoader, EngineStatus, RamAloneError
from app.host_memory import HostMemory
from localmoe.core.config import EngineConfig, SamplingConfig
from localmoe.core.errors import BudgetError, LocalMoeError
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.types import Progress

_LOG = logging.getLogger(__name__)
STOPPED = "Loading was stopped."
UNLOADED = "The model was unloaded, and its memory is free for other programs."


class EngineNotReadyError(LocalMoeError):
    """No model is loaded at the moment."""


class EngineHolder:
    """At most one engine at a time. `before_unload` must end whatever still uses the old one; `on_ready` is
    called after each load that succeeded, in its thread; what it cannot do it tells by `note`.

    Locks, in the order in which they are taken: `_use`, the engine's own, `_lock`, the improver's. Under
    `_lock` nothing is called that waits. Closing an engine, under `_use`, waits for its draft build; so the
    build's thread only tries to take `_use` while it is in the engine, and waits for it once it is out.
    """

    def __init__(
        self,
        loader: EngineLoader,
        before_unload: Callable[[], None] = lambda: None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._loader = loader
        self._before_unload = before_unload
        self._on_ready = on_ready
        self._lock = threading.Lock()  # guards the status and the names below
        self._use = threading.Lock()  # held while the engine is resized or closed
        self._improver = DraftImprover(self._show_improvement, self._end_improvement)
        self._engine: EngineLike | None = None
        self._status = EngineStatus()
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None
        self.config = EngineConfig()  # of the last load asked for
        self.loads = 0  # that were asked for

    def status(self) -> EngineStatus:
        """How far the engine is."""
        with self._lock:
            return self._status

    def engine(self) -> EngineLike:
        """The loaded engine.

        Raises:
            EngineNotReadyError: it is still loading, or could not be loaded.
        """
        with self._lock:
            if self._engine is not None and self._status.phase == "ready":
                return self._engine
            loading = self._status.phase == "loading"
        if loading:
            raise EngineNotReadyError("The model is still loading: send the message when it is ready.")
        raise EngineNotReadyError("No model is loaded: choose one under Models.")

    def load(self, model: str, config: EngineConfig) -> None:
        """Start to load the model, instead of whatever is loaded or loading. Returns at once."""
        with self._lock:
            self._cancel.set()
            self._cancel = threading.Event()
            self.config, self.loads = config, self.loads + 1
            self._publish(EngineStatus(phase="loading", model=model))
            _LOG.info("loading %s", model)
            args = (self._thread, model, config, self._cancel)
            self._thread = threading.Thread(target=self._load, args=args, name="load", daemon=True)
            self._thread.start()

    def cancel_load(self) -> None:
        """End the load under way; nothing is loaded then. Returns at once."""
        with self._lock:
            if self._status.phase == "loading":
                self._cancel.set()
                _LOG.info("loading %s was stopped", self._status.model)
                self._publish(EngineStatus(phase="error", model=self._status.model, error=STOPPED))

    def unload(self) -> None:
        """Give the loaded model's memory back; what uses it is ended. Returns at once."""
        with self._lock:
            if self._status.phase != "ready":
                return
            _LOG.info("%s is unloaded", self._status.model)
            self._publish(EngineStatus(phase="error", model=self._status.model, error=UNLOADED))
            self._thread = threading.Thread(
                target=self._unload_after, args=(self._thread,), name="unload", daemon=True
            )
            self._thread.start()

    def resize(self, vram_budget_bytes: int | None) -> MemoryPlan:
        """Divide another budget, without a reload; on an error everything stays as it was."""
        engine = self.engine()
        with self._use:
            plan = engine.resize(vram_budget_bytes)
            memory, info = engine.device_memory(), engine.info()
            with self._lock:
                self.config = replace(self.config, vram_budget_bytes=vram_budget_bytes)
                if self._shows(engine):
                    better = replace(self._status, error="", better_budget=None)
                    self._publish(replace(better, plan=plan, memory=memory, info=info))
        return plan

    def capture_ahead(self, sampling: Callable[[SamplingConfig | None], SamplingConfig]) -> None:
        """Let the loaded engine, if there is one, do ahead what the next answers would wait for. Returns at
        once. sampling: how those choose tokens, by what the model's makers recommend."""
        with self._lock:
            engine, info = self._engine, self._status.info
        if engine is not None and info is not None:
            engine.captures.begin(sampling(info.own_sampling))

    def improve_draft(self, wanted: bool) -> None:
        """Have a better draft built in the pauses between answers, now and after the load under way; or end
        that. Does nothing where there is none to build. Returns at once."""
        with self._lock:
            self.config = replace(self.config, improve_draft=wanted)
            if wanted and self._engine is not None and self._shows(self._engine):
                self._improver.start(self._engine)
            elif not wanted:
                self._improver.cancel()
                self._publish(replace(self._status, improvement=None, improvement_note=""))

    @contextmanager
    def without_improvement(self) -> Iterator[None]:
        """Nobody builds a better draft meanwhile, which would take time and memory; finished layers are
        kept, and it goes on after that. No model may be loaded meanwhile."""
        wanted = self.config.improve_draft
        if wanted:
            self.improve_draft(False)
            self._improver.join()
        try:
            yield
        finally:
            if wanted:
                self.improve_draft(True)

    def note_memory(self, engine: EngineLike) -> None:
        """Ask the engine what it holds and is. Call this from the thread that uses it, between two steps."""
        memory, ram, plan, info = engine.device_memory(), HostMemory.now(), engine.plan, engine.info()
        with self._lock:
            status = replace(self._status, memory=memory, ram=ram, plan=plan, info=info)
            if self._shows(engine) and status != self._status:
                self._publish(status)

    def note_out_of_memory(self, engine: EngineLike, failure: BudgetError) -> None:
        """An answer ran out of memory: show what would work."""
        with self._lock:
            if self._shows(engine):
                self._publish(replace(self._status, error=str(failure), better_budget=failure.budget_bytes))

    def note(self, notice: str) -> None:
        """Show a sentence beside the loaded model, until another one; "" takes it away."""
        with self._lock:
            if self._status.phase == "ready" and self._status.notice != notice:
                self._publish(replace(self._status, notice=notice))

    def close(self) -> None:
        """Cancel a load, end the answer and a draft build, free the engine."""
        with self._lock:
            self._cancel.set()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._unload()

    def _publish(self, status: EngineStatus) -> None:
        self._status = replace(status, revision=self._status.revision + 1)  # the lock is held

    def _shows(self, engine: EngineLike) -> bool:
        """Whether the status is this engine's; the lock is held."""
        return engine is self._engine and self._status.phase == "ready"

    def _unload(self) -> None:
        self._improver.cancel()
        self._before_unload()
        with self._use:
            with self._lock:
                engine, self._engine = self._engine, None
                self._improver.cancel()  # if one was begun meanwhile
            if engine is not None:
                engine.close()
        self._improver.join()

    def _unload_after(self, previous: threading.Thread | None) -> None:
        if previous is not None:
            previous.join()
        self._unload()

    def _load(
        self, previous: threading.Thread | None, model: str, config: EngineConfig, cancel: threading.Event
    ) -> None:
        self._unload_after(previous)

        def on_progress(progress: Progress) -> None:
            with self._lock:
                if not cancel.is_set():
                    self._publish(replace(self._status, progress=progress))

        failed, began = EngineStatus(phase="error", model=model), time.monotonic()
        engine: EngineLike | None = None
        try:
            if not cancel.is_set():
                engine = self._loader(model, config, progress=on_progress, cancel=cancel)
        except BudgetError as failure:
            failed = replace(
                failed, error=str(failure), better_budget=failure.budget_bytes,
                better_context=failure.context, runs_from_disk=isinstance(failure, RamAloneError),
            )  # fmt: skip
        except LocalMoeError as failure:
            failed = replace(failed, error=str(failure))
        except Exception:
            failed = replace(failed, error=INTERNAL_ERROR)
            raise
        finally:
            self._finish(engine, model, cancel, failed, time.monotonic() - began)

    def _finish(
        self,
        engine: EngineLike | None,
        model: str,
        cancel: threading.Event,
        failed: EngineStatus,
        load_s: float,
    ) -> None:
        with self._lock:
            superseded = cancel.is_set()
            if not superseded and engine is not None:
                self._engine = engine
                self._publish(
                    EngineStatus(
                        phase="ready",
                        model=model,
                        info=engine.info(),
                        plan=engine.plan,
                        footprint=engine.footprint,
                        memory=engine.device_memory(),
                        ram=HostMemory.now(),
                        load_s=load_s,
                        drafter=self.config.drafter,
                    )
                )
                if self.config.improve_draft:
                    self._improver.start(engine)
            elif not superseded:
                _LOG.error("%s was not loaded: %s", model, failed.error)
                self._publish(failed)
        if engine is not None and superseded:
            engine.close()
        elif engine is not None:
            self._on_ready()

    def _show_improvement(self, engine: EngineLike, progress: Progress, cancelled: threading.Event) -> None:
        """Called in the engine, between two pieces of work. Plan and memory are shown too, as a build may
        borrow of the budget; unless the engine is being resized or closed now."""
        idle = self._use.acquire(blocking=False)
        try:
            plan, memory = (engine.plan, engine.device_memory()) if idle else (None, None)
            with self._lock:
                if cancelled.is_set() or not self._shows(engine):
                    return
                status = replace(self._status, improvement=progress, improvement_note="")
                if plan is not None and memory is not None:
                    status = replace(status, plan=plan, memory=memory)
                self._publish(status)
        finally:
            if idle:
                self._use.release()

    def _end_improvement(self, engine: EngineLike, note: str) -> None:
        """Called when the build has left the engine."""
        with self._use:
            with self._lock:
                if engine is not self._engine:
                    return  # closed
            info, plan, memory = engine.info(), engine.plan, engine.device_memory()
            with self._lock:
                if self._shows(engine):
                    status = replace(self._status, info=info, plan=plan, memory=memory)
                    self._publish(replace(status, improvement=None, improvement_note=note))
