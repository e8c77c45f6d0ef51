"""A real run of the CPU engine as a story for the simulator: routing, acceptance, and what passes took."""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean

import numpy as np
from torch import Tensor

from localmoe.core.config import GenerationRequest
from localmoe.core.events import (
    DraftRouted,
    Event,
    LayerDemanded,
    LayerFinished,
    PrefillStarted,
    StepFinished,
    StepStarted,
)
from localmoe.core.stats import GenerationStats
from localmoe.engine import Engine
from localmoe.experts.link import Link
from localmoe.experts.memory import ExpertMemory
from localmoe.experts.slots import DeviceSlots
from localmoe.hardware.ram_experts import ram_bytes
from localmoe.prefetch.scheduler import Scheduler
from localmoe.prefetch.simulator_types import Disk, Machine, Prompt, Window
from support.engines import memory_of
from support.lockstep import in_lockstep


class TimedLink:
    """Notes when each copy began and ended."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.copies: list[tuple[float, float]] = []

    def copy(self, record: Tensor, slots: DeviceSlots, slot: int) -> None:
        began = time.perf_counter()
        self._link.copy(record, slots, slot)
        self.copies.append((began, time.perf_counter()))

    def after_read(self, slot: int) -> None:
        self._link.after_read(slot)

    def start_s(self, demanded_at: list[float]) -> float:
        """From a demand to the first copy that begins before the next demand."""
        begins = [began for began, _ in self.copies]
        found = [(at, begins[i]) for at in demanded_at if (i := bisect(begins, at)) < len(begins)]
        waits = [
            began - at for (at, began), later in zip(found, demanded_at[1:], strict=False) if began < later
        ]
        return mean(waits or [0.0])

    def cycle_s(self) -> float:
        """A copy, and what the worker takes until the next one where that waits already (less than 1 ms)."""
        durations = [end - began for began, end in self.copies]
        gaps = [after[0] - before[1] for before, after in pairwise(self.copies)]
        return mean(durations) + mean([gap for gap in gaps if gap < 1e-3] or [0.0])


@dataclass
class StoryRecorder:
    """Hears what the scheduler hears and what the target routes; stands in for a RoutingRecorder."""

    num_layers: int
    top_k: int
    story: list[Prompt | Window] = field(default_factory=list)
    layer_experts_s: list[float] = field(default_factory=list)  # from a layer's demand to its end
    experts: list[int] = field(default_factory=list)  # of the same
    demanded_at: list[float] = field(default_factory=list)  # each layer's demand of a step
    copy_s: float = 0.0  # of one copy after the other
    start_s: float = 0.0  # from a demand to its first copy

    def __post_init__(self) -> None:
        self._target: list[list[np.ndarray]] = [[] for _ in range(self.num_layers)]
        self._draft: dict[tuple[int, int], DraftRouted] = {}
        self._demanded = 0.0
        self._in_step = False

    def begin(self) -> None:
        """Another answer."""

    def record(self, layer: int, index: Tensor) -> None:
        """One pass of the target at a layer."""
        self._target[layer].append(index.numpy().astype(np.int32))

    def hear(self, event: Event) -> None:
        """An event, now."""
        now = time.perf_counter()
        match event:
            case PrefillStarted():
                self._end_prompt()
                self._in_step = False
            case StepStarted():
                self._end_prompt()
                self._in_step = True
            case DraftRouted():
                self._draft[event.token, event.layer] = event
            case LayerDemanded() if self._in_step:
                self._demanded = now
                self.experts.append(len(event.experts))
                self.demanded_at.append(now)
            case LayerFinished() if self._in_step:
                self.layer_experts_s.append(now - self._demanded)
            case StepFinished():
                self._end_window(event)
            case _:
                pass

    def _take_target(self) -> np.ndarray:
        target = np.stack([np.concatenate(parts) for parts in self._target], axis=1)
        self._target = [[] for _ in range(self.num_layers)]
        return target

    def _end_prompt(self) -> None:
        if self._target[-1]:
            self.story.append(Prompt(self._take_target()))

    def _end_window(self, event: StepFinished) -> None:
        tokens = 1 + max((token for token, _ in self._draft), default=-1)
        shape = (tokens, self.num_layers, self.top_k)
        draft, confidences = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.float32)
        for (token, layer), routed in self._draft.items():
            draft[token, layer], confidences[token, layer] = routed.experts, routed.confidences
        self._draft = {}
        self.story.append(Window(draft, confidences, self._take_target(), event.accepted))


def record_run(
    engine: Engine, requests: list[GenerationRequest], *, lockstep: bool = False
) -> tuple[StoryRecorder, list[GenerationStats]]:
    """Answer requests one after the other, from empty slots, or empty RAM where experts lie on the disk.
    lockstep: see there; nothing is timed then."""
    footprint, passes = engine.footprint, engine._loaded.passes
    recorder = StoryRecorder(footprint.num_layers, footprint.experts_per_token)
    scheduler: Scheduler = passes.scheduler
    notify = scheduler.notify

    def hear_and_tell(event: Event) -> None:
        recorder.hear(event)
        notify(event)

    engine.reset(ram=True)
    scheduler.notify = hear_and_tell  # type: ignore[method-assign]
    engine.record_routing(recorder)  # type: ignore[arg-type]
    timed: TimedLink | None = None
    try:
        with ExitStack() as stack:
            if not engine.plan.in_place:
                memory = memory_of(engine)
                timed = stack.enter_context(_timed(memory))
                if lockstep:
                    stack.enter_context(in_lockstep(memory))
            stats = [list(engine.stream(request))[-1].stats for request in requests]
    finally:
        engine.record_routing(None)
        del scheduler.notify
    if timed is not None:
        recorder.copy_s = timed.cycle_s() if timed.copies else 0.0
        recorder.start_s = timed.start_s(recorder.demanded_at)
    return recorder, stats


@contextmanager
def _timed(memory: ExpertMemory) -> Iterator[TimedLink]:
    link = memory.link
    timed = memory.link = TimedLink(link)
    yield timed
    memory.link = link


def machine_of(engine: Engine, run: StoryRecorder, stats: list[GenerationStats], num_slots: int) -> Machine:
    """The machine of a run: what it computed for, waiting apart, and what a copy took."""
    footprint, steps = engine.footprint, sum(s.steps for s in stats)
    stall_s, verify_s = sum(s.stall_s or 0.0 for s in stats), sum(s.verify_s for s in stats)
    experts_s = sum(run.layer_experts_s)
    drafted = sum(s.drafted for s in stats)
    decode_s = sum((s.tpot_s or 0.0) * (s.new_tokens - 1) for s in stats)
    draft_s = sum(s.draft_s for s in stats)
    disk = None
    if engine.plan.disk_bytes:
        read_bytes = ram_bytes(footprint, 1)
        reads = sum(s.disk_bytes for s in stats) / read_bytes
        disk = Disk(engine.plan.ram_experts, read_bytes, sum(s.disk_busy_s for s in stats) / reads)
    return Machine(
        num_layers=footprint.num_layers,
        num_experts=footprint.num_experts,
        experts_per_token=footprint.experts_per_token,
        num_slots=num_slots,
        expert_bytes=footprint.expert_bytes,
        copy_s=run.copy_s,
        start_s=run.start_s,
        draft_token_s=draft_s / max(1, drafted),
        layer_s=max(0.0, verify_s - experts_s) / steps / footprint.num_layers,
        expert_s=max(0.0, experts_s - stall_s) / sum(run.experts),
        step_s=max(0.0, decode_s - draft_s - verify_s) / steps,
        whole_passes=False,
        disk=disk,
    )
