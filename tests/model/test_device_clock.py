"""Times of the computation, from events that behave as a GPU's do."""

from __future__ import annotations

import pytest
import torch

from localmoe.model.device_clock import Clock

MADE: list[Event] = []


class Event:
    """Reached only once somebody has waited for it, or for a later one; a millisecond after the one
    before."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.reached = False

    def record(self) -> None:
        self.at = len(MADE)
        MADE.append(self)

    def synchronize(self) -> None:
        for event in MADE[: self.at + 1]:
            event.reached = True

    def elapsed_time(self, other: Event) -> float:
        if not (self.reached and other.reached):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return float(other.at - self.at)


def test_a_point_that_is_not_reached_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = Clock(on_gpu=True)
    clock.tick()
    Event(enable_timing=True).record()  # of the step that runs behind it
    later = Event(enable_timing=True)
    later.record()
    clock.tick()
    assert clock.seconds() == [1e-3, 3e-3]
    assert clock.began is MADE[0]


def test_without_a_gpu_the_host_is_timed() -> None:
    clock = Clock(on_gpu=False)
    clock.tick()
    (seconds,) = clock.seconds()
    assert 0 <= seconds < 1
