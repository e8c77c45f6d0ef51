"""The scheduler carries wishes to the memory, withdraws the old step's, and keeps the policy locked."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType

import pytest

from localmoe.core.events import (
    DraftFinished,
    DraftRouted,
    Event,
    LayerDemanded,
    LayerFinished,
    PrefetchRequest,
    RoomWanted,
    StepFinished,
    StepStarted,
)
from localmoe.core.types import ExpertKey
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

    def prefetch(self, key: ExpertKey, deadline: float) -> None:
        self.calls.append((key, deadline))

    def drop_prefetches(self, layer: int | None = None) -> None:
        self.calls.append("drop" if layer is None else f"drop {layer}")


class Policy:
    """Wishes for the same two experts at every event."""

    name = "test"

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.seen: list[Event] = []

    def observe(self, event: Event) -> Sequence[PrefetchRequest]:
        assert self.memory.lock.depth > 0, "the worker may ask the policy at the same time"
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
