"""What the page knows of an engine: the calls that it makes, and a snapshot of how far a load is. Runs
nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from app.host_memory import HostMemory
from localmoe.core.config import DrafterName, EngineConfig, GenerationRequest, SamplingConfig
from localmoe.core.errors import BudgetError
from localmoe.core.live_state import LiveState, PromptState, ReuseBound
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.stream import StreamEvent
from localmoe.core.timeline import StepSpans
from localmoe.core.types import ModelFootprint, Progress, ProgressCallback
from localmoe.experts.counters import TransferCounters

if TYPE_CHECKING:
    from localmoe.engine import EngineInfo
    from localmoe.model.routing_trace import RoutingRecorder

INTERNAL_ERROR = "Something went wrong inside localmoe; the terminal window shows the details."
NO_THREAD = (
    "The answer could not begin, as the system has no memory or thread to give: "
    "close other programs and try again."
)


class RamAloneError(BudgetError):
    """RAM does not hold a model's experts, and it would run with them on the disk."""


class LiveLike(Protocol):
    """What the page uses of `localmoe.engine.live.LiveView`."""

    def state(self) -> LiveState: ...
    def prompt(self) -> PromptState | None: ...
    def reuse_bound(self) -> ReuseBound | None: ...
    def capture_s(self) -> float: ...
    def record_timeline(self, steps: int | None = ...) -> None: ...
    def timeline(self) -> tuple[StepSpans, ...]: ...


class CapturesLike(Protocol):
    """What the page uses of `localmoe.engine.captures.Captures`."""

    def begin(self, sampling: SamplingConfig | None = ...) -> None: ...


class EngineLike(Protocol):
    """What the page uses of `localmoe.engine.Engine`."""

    @property
    def plan(self) -> MemoryPlan: ...
    @property
    def footprint(self) -> ModelFootprint: ...
    def info(self) -> EngineInfo: ...
    def stream(
        self, request: GenerationRequest, stop: threading.Event | None = None
    ) -> Iterator[StreamEvent]: ...
    @property
    def live(self) -> LiveLike: ...
    @property
    def captures(self) -> CapturesLike: ...
    def count_tokens(self, text: str, /) -> int: ...
    def reset(self, *, ram: bool = ...) -> None: ...
    def record_routing(self, recorder: RoutingRecorder | None) -> None: ...
    def transfer_counters(self) -> TransferCounters: ...
    def device_memory(self) -> dict[str, int]: ...
    def takes_budget(self, budget: int | None, /) -> bool: ...
    def resize(self, vram_budget_bytes: int | None) -> MemoryPlan: ...
    def why_no_better_draft(self) -> str: ...
    def improve_draft(
        self, *, progress: ProgressCallback | None = None, cancel: threading.Event | None = None
    ) -> str: ...
    def close(self) -> None: ...


class EngineLoader(Protocol):
    """`Engine.load`, or something that stands in for it."""

    def __call__(
        self, model: str, config: EngineConfig, *, progress: ProgressCallback, cancel: threading.Event
    ) -> EngineLike: ...


@dataclass(frozen=True, slots=True)
class ReadyEngine:
    """A loaded engine that may be asked now, and what it said of itself. drafts: whether it has a draft."""

    engine: EngineLike
    info: EngineInfo
    drafts: bool


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot. `revision` grows with every change; info, plan and footprint are there when ready."""

    phase: Literal["loading", "ready", "error"] = "loading"
    model: str = ""
    progress: Progress | None = None
    error: str = ""
    better_budget: int | None = None  # bytes, with which the load or the answer that failed would work
    better_context: int | None = None  # tokens, likewise
    runs_from_disk: bool = False  # the load that failed would work with experts there
    info: EngineInfo | None = None
    plan: MemoryPlan | None = None
    footprint: ModelFootprint | None = None
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes by owner when last asked
    ram: HostMemory | None = None  # likewise
    load_s: float = 0.0  # that the load took
    improvement: Progress | None = None  # of the better draft that is being built
    improvement_note: str = ""  # why building it failed
    notice: str = ""  # what did not work beside a load that did
    drafter: DrafterName = "auto"  # that was asked for
    revision: int = 0

    def drafts_alike(self, drafter: DrafterName) -> bool:
        """Whether what is loaded would be the same with this drafter: by itself a model drafts with its MTP
        layer, if it has one, in whole steps alone."""
        if self.info is None or self.info.drafter != "self" or self.drafter not in ("auto", "self"):
            return False
        by_layers = not self.info.passes.startswith("whole steps")
        return drafter in ("self", self.drafter) or (drafter == "auto" and by_layers)

    @property
    def lacks_mtp(self) -> bool:
        """Whether the MTP layer was asked for, and the loaded model has none that can draft."""
        return self.info is not None and self.drafter == "mtp" != self.info.drafter
