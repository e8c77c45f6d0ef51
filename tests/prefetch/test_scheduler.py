"""The scheduler carries wishes to the memory, withdraws the old step's, and keeps the policy locked."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType

import numpy as np
import pytest
from numpy.typing import NDArray

from localmoe.core.events import (
    DraftFinished,
    DraftRouted,
    Event,
    LayerDemanded,
    LayerFinished,
    PassRouted,
    PrefetchRequest,
    PrefillStarted,
    Rates,
    RatesMeasured,
    RoomWanted,
    StepFinished,
    StepStarted,
)
from localmoe.core.types import ExpertKey
from localmoe.prefetch.policy import CacheShape, PolicyBase
from localmoe.prefetch.scheduler import Scheduler

A, B = ExpertKey(0, 1), ExpertKey(1, 2)


class Lock:
    """Reentrant, and knows whether it is held."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.depth -= 1
        self._lock.release()


class Memory:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.calls: list[object] = []

    def residency(self) -> NDArray[np.bool_]:
        return np.zeros((2, 4), dtype=np.bool_)

    def prefetch(self, key: ExpertKey, deadline: float) -> None:
        self.calls.append((key, deadline))

    def drop_prefetches(self, layer: int | None = None) -> None:
        self.calls.append("drop" if layer is None else f"drop {layer}")


class Policy(PolicyBase):
    """Wishes for the same two experts at every event but rates."""

    name = "test"

    def __init__(self, memory: Memory) -> None:
        super().__init__(CacheShape(2, 4, 1, 2))
        self.memory = memory
        self.seen: list[Event] = []
        self.rates: list[Rates] = []

    def observe(self, event: Event) -> Sequence[PrefetchRequest]:
        assert self.memory.lock.depth > 0, "the worker may ask the policy at the same time"
        if isinstance(event, RatesMeasured):
            self.rates.append(event.rates)
            return ()
        self.seen.append(event)
        return [PrefetchRequest(B, 1.0), PrefetchRequest(A, 0.0)]

    def choose_victim(self, room: RoomWanted) -> ExpertKey | None:
        return room.candidates[-1] if room.candidates else None


def made() -> tuple[Scheduler, Policy, Memory]:
    memory = Memory()
    policy = Policy(memory)
    scheduler = Scheduler(policy)
    scheduler.attach(memory)  # type: ignore[arg-type]
    return scheduler, policy, memory


EVENTS = [
    StepStarted(0, 2),
    DraftRouted(0, 0, (1,), (1.0,)),
    DraftFinished(1),
    LayerDemanded(0, (1,), 2),
    StepFinished(1, 1),
]


def test_the_policy_sees_every_event_in_order_under_the_lock() -> None:
    scheduler, policy, memory = made()
    for event in EVENTS:
        scheduler.notify(event)
    assert policy.seen == EVENTS
    assert memory.lock.depth == 0


def test_wishes_reach_the_memory_with_their_deadlines() -> None:
    scheduler, _, memory = made()
    scheduler.notify(DraftFinished(1))
    assert memory.calls == [(B, 1.0), (A, 0.0)]


def test_a_new_step_withdraws_the_old_wishes_before_it_makes_its_own() -> None:
    scheduler, _, memory = made()
    for event in EVENTS[1:-1]:
        scheduler.notify(event)
    assert "drop" not in memory.calls
    memory.calls.clear()
    scheduler.notify(StepStarted(1, 2))
    assert memory.calls == ["drop", (B, 1.0), (A, 0.0)]


def test_what_was_not_copied_in_time_is_withdrawn() -> None:
    scheduler, _, memory = made()
    scheduler.notify(LayerFinished(3))
    scheduler.notify(StepFinished(1, 1))
    assert [call for call in memory.calls if isinstance(call, str)] == ["drop 3", "drop"]


def test_the_victim_is_the_policys_choice() -> None:
    scheduler, _, _ = made()
    assert scheduler.choose_victim(RoomWanted(A, [A, B], 0, 0, True)) == B
    assert scheduler.choose_victim(RoomWanted(A, [], 0, 0, True)) is None


def test_another_policy_takes_over_at_once() -> None:
    scheduler, old, memory = made()
    new = Policy(memory)
    scheduler.use(new)
    scheduler.notify(DraftFinished(1))
    assert (old.seen, new.seen) == ([], [DraftFinished(1)])
    assert scheduler.policy is new


def test_using_it_before_it_has_a_memory_is_a_programming_error() -> None:
    with pytest.raises(AssertionError):
        Scheduler(Policy(Memory())).notify(StepStarted(0, 0))


def test_a_policy_looks_at_the_slots_of_the_memory_that_is_attached_now() -> None:
    scheduler, policy, memory = made()
    assert policy._residency == memory.residency
    newer = Memory()
    scheduler.attach(newer)
    assert policy._residency == newer.residency
    late = Policy(newer)
    scheduler.use(late)
    assert late._residency == newer.residency


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def timed(*, copies: list[float] | None = None) -> tuple[Scheduler, Policy, Clock]:
    """A scheduler by that clock; `copies` holds how many were made."""
    memory, clock = Memory(), Clock()
    policy = Policy(memory)
    scheduler = Scheduler(policy, clock)
    if copies is None:
        scheduler.attach(memory, copy_s=lambda: 0.25)
    else:
        scheduler.attach(memory, copies=lambda: copies[0])
    return scheduler, policy, clock


def test_rates_of_layers_are_measured_by_their_events_and_told_when_they_change() -> None:
    """Draft tokens take 3 s, layers 1 s and longer where they wait; a fifth more or less is not told
    again."""
    scheduler, policy, clock = timed()

    def step(token_s: float, gaps: tuple[float, ...]) -> None:
        scheduler.notify(StepStarted(0, 2))
        clock.now += 2 * token_s
        scheduler.notify(DraftFinished(2))
        for layer, gap in enumerate((0.0, *gaps)):
            clock.now += gap
            scheduler.notify(LayerDemanded(layer, (0,), 3))
        scheduler.notify(StepFinished(2, 0))
        clock.now += 100.0

    step(3.0, (1.0, 5.0))
    assert policy.rates == [Rates(0.25, None, None)]
    step(3.3, (1.0, 1.0))
    assert policy.rates[1:] == [Rates(0.25, 3.0, 1.0)], "of the step before"
    step(3.3, (1.0, 1.0))
    assert len(policy.rates) == 2
    scheduler.use(policy)
    step(1.0, (1.0, 1.0))
    step(1.0, (1.0, 1.0))
    assert policy.rates[-1] == Rates(0.25, 1.0, 1.0) and policy.rates[2].draft_token_s == 3.0


def test_the_devices_clock_tells_better_what_drafts_take_than_when_they_are_heard_of() -> None:
    scheduler, policy, clock = timed()
    for clocked in (None, 1.5, None, 1.4):
        scheduler.notify(StepStarted(0, 2))
        clock.now += 2 * 0.7  # the first one ran before the step was begun
        scheduler.notify(DraftFinished(2))
        scheduler.notify(StepFinished(2, 0, clocked))
    scheduler.notify(StepStarted(0, 2))
    assert [rates.draft_token_s for rates in policy.rates] == [None, 0.7, 1.5], "1.4 is about the same"


def test_what_asking_for_a_copy_takes_is_told_once_it_is_known_and_when_it_changes() -> None:
    scheduler, policy, _ = timed(copies=[0.0])
    issue_s: list[float | None] = [None]
    scheduler.attach(policy.memory, copy_s=lambda: 0.25, issue_s=lambda: issue_s[0])
    scheduler.notify(StepStarted(0, 2))
    assert policy.rates[-1] == Rates(0.25) and policy.rates[-1].copies_pay
    for found in (0.2, 0.23, 0.25):
        issue_s[0] = found
        scheduler.notify(StepStarted(1, 2))
    assert [rates.issue_s for rates in policy.rates] == [None, 0.2, 0.25], "0.23 is about the same"
    assert [rates.copies_pay for rates in policy.rates] == [True, True, False]


def test_rates_of_whole_passes_leave_out_what_their_copies_take() -> None:
    """A prompt of 40 copies in 10 s tells the rate of the link; a pass of 5 s with 8 copies leaves 3 s for
    its 2 layers."""
    copies = [0.0]
    scheduler, policy, clock = timed(copies=copies)
    demanded = np.zeros((2, 4), dtype=np.bool_)

    def run(event: Event, seconds: float, made: float) -> None:
        scheduler.notify(event)
        clock.now += seconds
        copies[0] += made

    run(PrefillStarted(99), 10.0, 40.0)
    run(PassRouted(demanded), 50.0, 0.0)  # time that passes before the next step is nobody's
    run(StepStarted(0, 2), 4.0, 0.0)
    assert policy.rates[-1] == Rates(0.25, None, None)
    run(DraftFinished(2), 5.0, 8.0)
    scheduler.notify(PassRouted(demanded))
    run(StepStarted(1, 2), 1.0, 0.0)
    assert policy.rates[-1] == Rates(0.25, 2.0, 1.5)
    scheduler.attach(
        policy.memory, copy_s=lambda: 0.125, copies=lambda: copies[0]
    )  # what is measured comes first
    for _ in range(9):
        run(StepStarted(1, 2), 4.0, 0.0)
        run(DraftFinished(2), 5.0, 8.0)
        run(PassRouted(demanded), 0.0, 0.0)
    scheduler.notify(StepStarted(1, 2))
    assert policy.rates[-1] == Rates(0.125, 2.0, 2.0)
    scheduler.attach(policy.memory, copies=lambda: copies[0])
    for _ in range(9):  # steps that were given up; a prompt's passes say nothing of a step's
        run(PrefillStarted(99), 900.0, 40.0)
        run(PassRouted(demanded), 0.0, 0.0)
        run(StepStarted(2, 2), 1.0, 0.0)
    assert policy.rates[-1] == Rates(0.25, 2.0, 2.0)


def test_rates_of_whole_passes_leave_out_what_these_waited_where_that_is_measured() -> None:
    """Passes of 5 s with 16 copies of 0.25 s, of which the layers waited for 2 s: the others ran beside."""
    copies, stall_s = [0.0], [0.0]
    scheduler, policy, clock = timed(copies=copies)
    scheduler.attach(
        policy.memory, copy_s=lambda: 0.25, copies=lambda: copies[0], stall_s=lambda: stall_s[0]
    )  # fmt: skip
    for _ in range(2):
        scheduler.notify(StepStarted(0, 0))
        clock.now += 5.0
        copies[0] += 16.0
        stall_s[0] += 2.0
        scheduler.notify(PassRouted(np.zeros((2, 4), dtype=np.bool_)))
    assert policy.rates[-1].target_layer_s == 1.5


def test_rates_of_whole_passes_leave_out_what_the_cpu_computes_meanwhile() -> None:
    """Passes of 5 s with 8 copies of 0.25 s, during which the CPU computes for 4: a layer takes 0.5 s."""
    copies, busy_s = [0.0], [0.0]
    scheduler, policy, clock = timed(copies=copies)
    scheduler.attach(policy.memory, copy_s=lambda: 0.25, copies=lambda: copies[0])
    scheduler.watch_cpu(lambda: busy_s[0])
    demanded = np.zeros((2, 4), dtype=np.bool_)

    def step(cpu_s: float) -> None:
        scheduler.notify(StepStarted(0, 2))
        clock.now += 4.0
        busy_s[0] += 1.0  # of a job before the pass
        scheduler.notify(DraftFinished(2))
        clock.now += 5.0
        copies[0] += 8.0
        busy_s[0] += cpu_s
        scheduler.notify(PassRouted(demanded))
        scheduler.notify(StepStarted(1, 2))

    step(4.0)
    assert policy.rates[-1] == Rates(0.25, 2.0, 0.5, cpu_helps=True)
    for _ in range(9):
        step(0.0)
    assert policy.rates[-1] == Rates(0.25, 2.0, 1.5), "without the CPU the copies count"
