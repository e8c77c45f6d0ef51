"""What a loaded engine lets others see while it answers: experts in slots and their heat, copies, the last
steps' timeline, and the bound of what its slots could have reused. Any thread may ask; the answer waits for
none of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from localmoe.core.demands import DemandRecorder
from localmoe.core.live_state import LiveState, PromptState, ReuseBound
from localmoe.core.timeline import DEFAULT_STEPS, StepSpans, Timeline
from localmoe.engine.lane_counts import count_transfers
from localmoe.engine.loading import EngineParts
from localmoe.experts.copy_times import CopyTimes
from localmoe.experts.device_memory import DeviceExpertMemory
from localmoe.prefetch.optimum import optimal_hits

MAX_STEPS = 100_000  # of a timeline


class LiveView:
    """Beside one engine."""

    def __init__(self, parts: Callable[[], EngineParts]) -> None:
        """parts: the engine's; raises EngineClosedError once it is closed."""
        self._parts = parts
        footprint = parts().prepared.footprint
        self._demands = DemandRecorder(footprint.num_layers, footprint.num_experts)
        parts().passes.scheduler.demands = self._demands
        self._timeline: Timeline | None = None
        self._read_before = 0  # bytes, from the disk, when the answer began

    def begin_answer(self) -> None:
        """The next events are of a new answer. From the thread that answers."""
        self._demands.begin_answer(self.resident())
        self._read_before = self._parts().store.read_bytes

    def prompt(self) -> PromptState | None:
        """Of the answer that is being written; None once it has a token, or has ended. Waits for no lock.

        Raises:
            EngineClosedError: the engine is closed.
        """
        parts = self._parts()
        counters = parts.passes.counters
        tokens = counters.prompt_tokens - counters.reused_tokens
        if counters.ended or counters.new_tokens or tokens <= 0:
            return None
        from_disk = parts.store.read_bytes - self._read_before
        return PromptState(tokens, counters.read_tokens, from_disk, counters.unread_images)

    def resident(self) -> NDArray[np.bool_]:
        """(L, E): in a slot now."""
        parts = self._parts()
        footprint = parts.prepared.footprint
        table = np.zeros((footprint.num_layers, footprint.num_experts), np.bool_)
        keys = parts.passes.memory.resident_keys()
        if keys:
            table[tuple(np.array(keys).T)] = True
        return table

    def state(self) -> LiveState:
        """A snapshot.

        Raises:
            EngineClosedError: the engine is closed.
        """
        totals, memory = count_transfers(self._parts()), self._parts().passes.memory
        copy_s = memory.copy_s if isinstance(memory, DeviceExpertMemory) else memory.copy_s()
        return LiveState(
            resident=self.resident(),
            heat=self._demands.heat(),
            h2d_bytes=totals.h2d_bytes,
            at_s=time.perf_counter(),
            link_bytes_per_s=self._record_bytes() / copy_s if copy_s else None,
        )

    def reuse_bound(self) -> ReuseBound | None:
        """Of the answer at hand, or the last one; None if nothing was asked for. Takes up to a second for a
        long answer of a large model: call it when the answer is over.

        Raises:
            EngineClosedError: the engine is closed.
        """
        parts = self._parts()
        story, counters = self._demands.answer(), parts.passes.counters
        demands = story.num_counted
        if not demands:
            return None
        reusable = optimal_hits(
            [story.resident, *story.passes],
            parts.passes.memory.slots.num_slots,
            whole_steps=parts.prepared.compute.whole_passes,
            counted=[False, *story.counted],
        )
        fetched = counters.decode_h2d_bytes / self._record_bytes() + counters.computed
        return ReuseBound(demands, reusable, fetched if story.complete else None)

    def capture_s(self) -> float:
        """Seconds since the load in which answers waited while passes were captured; see model.step_graphs.

        Raises:
            EngineClosedError: the engine is closed.
        """
        return self._parts().runner.capture_s

    def record_timeline(self, steps: int | None = DEFAULT_STEPS) -> None:
        """Keep when things ran in the last `steps` steps; None ends that and forgets them. While it is off
        nothing is timed for it.

        Raises:
            EngineClosedError: the engine is closed.
        """
        assert steps is None or 1 <= steps <= MAX_STEPS
        self._timeline = None if steps is None else Timeline(steps)
        self.attach()

    def attach(self) -> None:
        """Tell the passes, and the memory that they have now, whom to tell."""
        passes = self._parts().passes
        passes.timeline = self._timeline
        memory = passes.memory
        if isinstance(memory, DeviceExpertMemory):
            memory.times = None if self._timeline is None else CopyTimes(memory.transfers)
        else:
            memory.timeline = self._timeline

    @property
    def recording(self) -> bool:
        """Whether steps are kept."""
        return self._timeline is not None

    def timeline(self) -> tuple[StepSpans, ...]:
        """The last steps that have ended, oldest first; none while it is off."""
        timeline = self._timeline
        return () if timeline is None else timeline.steps()

    def _record_bytes(self) -> int:
        store = self._parts().store
        return store.layouts[0].num_bytes(store.dtype)
