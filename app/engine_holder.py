"""Holds the one engine: loads it in the background, swaps it, resizes it, and says how far it is. Decides no
setting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.errors import LocalMoeError
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.stream import StreamEvent
from localmoe.core.types import ModelFootprint, Progress, ProgressCallback

if TYPE_CHECKING:
    from localmoe.engine import EngineInfo

INTERNAL_ERROR = "Something went wrong inside localmoe; the terminal window shows the details."


class EngineLike(Protocol):
    """What the page uses of `localmoe.engine.Engine`."""

    plan: MemoryPlan

    @property
    def footprint(self) -> ModelFootprint: ...
    def info(self) -> EngineInfo: ...
    def stream(
        self, request: GenerationRequest, stop: threading.Event | None = None
    ) -> Iterator[StreamEvent]: ...
    def device_memory(self) -> dict[str, int]: ...
    def resize(self, vram_budget_bytes: int | None) -> MemoryPlan: ...
    def close(self) -> None: ...


class EngineLoader(Protocol):
    """`Engine.load`, or something that stands in for it."""

    def __call__(
        self, model: str, config: EngineConfig, *, progress: ProgressCallback, cancel: threading.Event
    ) -> EngineLike: ...


class EngineNotReadyError(LocalMoeError):
    """No model is loaded at the moment."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot. `revision` grows with every change; info, plan and footprint are there when ready."""

    phase: Literal["loading", "ready", "error"] = "loading"
    model: str = ""
    progress: Progress | None = None
    error: str = ""
    info: EngineInfo | None = None
    plan: MemoryPlan | None = None
    footprint: ModelFootprint | None = None
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes by owner when last asked
    revision: int = 0


class EngineHolder:
    """At most one engine at a time. `before_unload` must end whatever still uses the old one; `on_ready` is
    called after each load that succeeded, in its thread."""

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
        self._use = threading.Lock()  # held while the engine is made, resized or closed
        self._engine: EngineLike | None = None
        self._status = EngineStatus()
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None
        self.config = EngineConfig()  # of the last load asked for

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
        raise EngineNotReadyError("No model is loaded: choose one under Settings and press Apply.")

    def load(self, model: str, config: EngineConfig) -> None:
        """Start to load the model, instead of whatever is loaded or loading. Returns at once."""
        with self._lock:
            self._cancel.set()
            self._cancel = threading.Event()
            self.config = config
            self._publish(EngineStatus(phase="loading", model=model))
            args = (self._thread, model, config, self._cancel)
            self._thread = threading.Thread(target=self._load, args=args, name="load", daemon=True)
            self._thread.start()

    def resize(self, vram_budget_bytes: int | None) -> MemoryPlan:
        """Divide another budget, without a reload; on an error everything stays as it was."""
        engine = self.engine()
        with self._use:
            plan = engine.resize(vram_budget_bytes)
            memory = engine.device_memory()
        with self._lock:
            self.config = replace(self.config, vram_budget_bytes=vram_budget_bytes)
            self._publish(replace(self._status, plan=plan, memory=memory, info=engine.info()))
        return plan

    def note_memory(self, engine: EngineLike) -> None:
        """Ask the engine what it holds now. Call this from the thread that uses it, between two steps."""
        memory = engine.device_memory()
        with self._lock:
            if engine is self._engine and memory != self._status.memory:
                self._publish(replace(self._status, memory=memory))

    def close(self) -> None:
        """Cancel a load, end the answer, free the engine."""
        with self._lock:
            self._cancel.set()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._unload()

    def _publish(self, status: EngineStatus) -> None:
        self._status = replace(status, revision=self._status.revision + 1)  # the lock is held

    def _unload(self) -> None:
        self._before_unload()
        with self._use:
            with self._lock:
                engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()

    def _load(
        self, previous: threading.Thread | None, model: str, config: EngineConfig, cancel: threading.Event
    ) -> None:
        if previous is not None:
            previous.join()
        self._unload()

        def on_progress(progress: Progress) -> None:
            with self._lock:
                if not cancel.is_set():
                    self._publish(replace(self._status, progress=progress))

        error = ""
        engine: EngineLike | None = None
        try:
            if not cancel.is_set():
                engine = self._loader(model, config, progress=on_progress, cancel=cancel)
        except LocalMoeError as failure:
            error = str(failure)
        except Exception:
            error = INTERNAL_ERROR
            raise
        finally:
            self._finish(engine, model, cancel, error)

    def _finish(self, engine: EngineLike | None, model: str, cancel: threading.Event, error: str) -> None:
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
                    )
                )
            elif not superseded:
                self._publish(EngineStatus(phase="error", model=model, error=error))
        if engine is not None and superseded:
            engine.close()
        elif engine is not None:
            self._on_ready()
