"""The copy queue against a list that is sorted whenever somebody looks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localmoe.core.types import ExpertKey
from localmoe.experts.queue import DEMAND_DEADLINE, CopyQueue

KEYS = [ExpertKey(layer, expert) for layer in range(2) for expert in range(3)]
A, B, C = KEYS[:3]


class SortedList:
    """key -> (deadline, when it was given that deadline)."""

    def __init__(self) -> None:
        self.waiting: dict[ExpertKey, tuple[float, int]] = {}
        self.clock = 0

    def push(self, key: ExpertKey, deadline: float) -> None:
        if key not in self.waiting or deadline < self.waiting[key][0]:
            self.waiting[key] = (deadline, self.clock)
            self.clock += 1

    def remove(self, key: ExpertKey) -> None:
        self.waiting.pop(key, None)

    def drop_prefetches(self, layer: int | None = None) -> None:
        for key, (deadline, _) in list(self.waiting.items()):
            if deadline != DEMAND_DEADLINE and layer in (None, key.layer):
                del self.waiting[key]

    def in_order(self) -> list[tuple[ExpertKey, bool]]:
        ordered = sorted(self.waiting, key=lambda key: self.waiting[key])
        return [(key, self.waiting[key][0] == DEMAND_DEADLINE) for key in ordered]


Operation = Callable[[CopyQueue | SortedList], None]
operations = st.one_of(
    st.builds(
        lambda key, deadline: ("push", key, deadline),
        st.sampled_from(KEYS),
        st.sampled_from([DEMAND_DEADLINE, 0.0, 1.0, 2.0, 7.5]),
    ),
    st.builds(lambda key: ("remove", key), st.sampled_from(KEYS)),
    st.just(("drop_prefetches",)),
    st.builds(lambda layer: ("drop_prefetches", layer), st.integers(0, 2)),
    st.just(("take",)),
)


@given(st.lists(operations, max_size=40))
@example([("push", A, 1.0), ("remove", A), ("push", B, 1.0), ("push", A, 1.0)])
@example([("push", A, 1.0), ("push", A, DEMAND_DEADLINE), ("take",), ("push", A, 1.0)])
@settings(max_examples=300)
def test_any_history_leaves_each_waiting_key_once_and_in_order(history: list[tuple]) -> None:  # type: ignore[type-arg]
    queue, model = CopyQueue(), SortedList()
    for name, *arguments in history:
        if name == "take":  # as the worker does: the most urgent one leaves
            taken = next(iter(queue.in_order()), None)
            assert taken == next(iter(model.in_order()), None)
            if taken is not None:
                queue.remove(taken[0])
                model.remove(taken[0])
            continue
        for target in (queue, model):
            getattr(target, name)(*arguments)
        assert len(queue) == len(model.waiting)
        assert list(queue.in_order()) == model.in_order()


def test_a_pass_that_takes_each_key_it_is_handed_sees_every_key_once() -> None:
    queue = CopyQueue()
    for key in KEYS:
        queue.push(key, 1.0)
    seen = []
    for key, _ in queue.in_order():
        seen.append(key)
        queue.remove(key)
    assert seen == KEYS
    assert len(queue) == 0


def test_a_demand_overtakes_prefetches_and_survives_their_withdrawal() -> None:
    queue = CopyQueue()
    queue.push(A, 0.0)
    queue.push(B, 5.0)
    queue.push(B, DEMAND_DEADLINE)
    queue.push(B, 0.0)  # a later wish does not set it back
    assert list(queue.in_order()) == [(B, True), (A, False)]
    queue.drop_prefetches()
    assert list(queue.in_order()) == [(B, True)]


def test_removing_what_does_not_wait_is_no_error() -> None:
    queue = CopyQueue()
    queue.remove(A)
    assert list(queue.in_order()) == []


@pytest.mark.parametrize("deadline", [1e300, math.inf])
def test_the_least_urgent_wish_is_still_a_wish(deadline: float) -> None:
    queue = CopyQueue()
    queue.push(A, deadline)
    queue.push(B, 3.0)
    assert list(queue.in_order()) == [(B, False), (A, False)]
