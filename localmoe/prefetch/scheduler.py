"""The one place where prefetch happens: tell the policy what happened, hand its requests to the expert
memory, and answer the memory's question for a victim. Decides nothing itself (the policy does) and copies
nothing (the memory does).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localmoe.core.demands import DemandRecorder
from localmoe.core.events import Event, LayerFinished, RatesMeasured, RoomWanted, StepFinished, StepStarted
from localmoe.core.types import ExpertKey
from localmoe.prefetch.policy import Policy
from localmoe.prefetch.rates import RateMeter


class PrefetchTarget(Protocol):
    """An expert memory, as far as prefetching goes."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Guards the policy's state."""

    def residency(self) -> NDArray[np.bool_]:
        """(L, E): in a slot, or on its way there."""

    def prefetch(self, key: ExpertKey, deadline: float) -> None:
        """Ask for a copy ahead of need."""

    def drop_prefetches(self, layer: int | None = None) -> None:
        """Withdraw what has not started."""


class Scheduler:
    """Between one policy and one expert memory. The memory's lock guards the policy, since the worker asks
    it too."""

    def __init__(self, policy: Policy, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: seconds, by which passes and copies are timed for the policy."""
        self.policy = policy
        self._memory: PrefetchTarget | None = None
        self._meter = RateMeter(clock)
        self.settle: Callable[[], None] | None = None  # waits for what was asked for; None: nobody waits
        self.demands: DemandRecorder | None = None  # told of every event too

    def attach(
        self,
        memory: PrefetchTarget,
        *,
        copy_s: Callable[[], float | None] | None = None,
        copies: Callable[[], float] | None = None,
        stall_s: Callable[[], float | None] | None = None,
        issue_s: Callable[[], float | None] | None = None,
    ) -> None:
        """Name the memory that requests go to (it needs `choose_victim` before it exists).

        Args:
            copy_s: seconds that it takes for one copy, where it measures that (None until it has).
            copies: how many it has made, where the host hears of whole passes only.
            stall_s: seconds that these waited for experts, where that is measured (None where it is not).
            issue_s: seconds that it takes the thread which answers to ask for one (None until it has).
        """
        self._memory = memory
        self._meter.copy_s, self._meter.copies, self._meter.issue_s = copy_s, copies, issue_s
        self._meter.stall_s = stall_s
        self.policy.watch(memory.residency)

    def watch_cpu(self, busy_s: Callable[[], float]) -> None:
        """Name what tells the seconds in which the CPU computed experts so far."""
        self._meter.cpu_busy_s = busy_s

    def use(self, policy: Policy) -> None:
        """Change the policy between answers."""
        assert self._memory is not None, "attach() comes first"
        with self._memory.lock:
            self.policy = policy
            policy.watch(self._memory.residency)
            self._meter.tell_again()

    @property
    def wants_next_gate(self) -> bool:
        """Whether the policy asks for NextGateGuessed."""
        return self.policy.wants_next_gate

    @property
    def asks_after_drafts(self) -> bool:
        """Whether the policy may ask for copies once it has heard of the last draft."""
        return self.policy.asks_after_drafts

    def notify(self, event: Event) -> None:
        """Pass an event on, and queue the prefetches that the policy wants. What was not copied in
        time is withdrawn: a layer's prefetches when the layer is done, all when the step is."""
        assert self._memory is not None, "attach() comes first"
        rates = self._meter.note(event)
        if self.demands is not None:
            self.demands.note(event)
        with self._memory.lock:
            match event:
                case StepStarted() | StepFinished():
                    self._memory.drop_prefetches()
                case LayerFinished():
                    self._memory.drop_prefetches(event.layer)
                case _:
                    pass
            if rates is not None:
                self.policy.observe(RatesMeasured(rates))
            requests = self.policy.observe(event)
            for request in requests:
                self._memory.prefetch(request.key, request.deadline)
        if requests and self.settle is not None:
            self.settle()

    def choose_victim(self, room: RoomWanted) -> ExpertKey | None:
        """The policy's choice; the memory calls this under its lock."""
        return self.policy.choose_victim(room)

    def keep_scores(self, last_use: NDArray[np.int64]) -> tuple[NDArray[np.float32], bool]:
        """The policy's scores (L, E), and whether room is made within a layer only; for a memory whose passes
        the host does not see."""
        kept = self.policy.keep_scores(last_use)
        return kept.scores, kept.per_layer
