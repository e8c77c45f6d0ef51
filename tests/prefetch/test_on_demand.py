"""on-demand: one LRU a layer with a share of the slots, worked by hand; it never prefetches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localmoe.core.events import (
    DraftFinished,
    DraftRouted,
    LayerDemanded,
    LayerFinished,
    PrefillStarted,
    RoomWanted,
    StepFinished,
    StepStarted,
)
from localmoe.core.types import ExpertKey
from localmoe.prefetch.policies.on_demand import OnDemandPolicy
from localmoe.prefetch.policy import CacheShape


class Cache:
    """What the expert memory does with the policy's answers, without threads: one demand after another."""

    def __init__(self, layers: int, slots: int) -> None:
        self.policy = OnDemandPolicy(CacheShape(layers, 8, 2, slots))
        self.slots = slots
        self.order: list[ExpertKey] = []  # least recently used first

    def ask(self, layer: int, expert: int) -> bool:
        """Demand one expert; whether it was there."""
        key = ExpertKey(layer, expert)
        if key in self.order:
            self.order.remove(key)
            self.order.append(key)
            return True
        free = self.slots - len(self.order)
        of_layer = sum(held.layer == layer for held in self.order)
        victim = self.policy.choose_victim(RoomWanted(key, list(self.order), free, of_layer, True))
        if victim is None and not free:
            victim = self.order[0]
        if victim is not None:
            self.order.remove(victim)
        self.order.append(key)
        return False

    def held(self, layer: int) -> list[int]:
        return [key.expert for key in self.order if key.layer == layer]


def test_a_sequence_worked_by_hand() -> None:
    cache = Cache(layers=2, slots=5)  # layer 0 has 3 slots, layer 1 has 2
    asked = [(0, 1), (0, 2), (0, 3), (0, 1), (0, 4), (1, 1), (1, 2), (1, 1), (1, 3), (0, 2), (0, 1)]
    found = [cache.ask(layer, expert) for layer, expert in asked]
    # layer 0: 1 2 3, then 1 is used again, so 4 replaces 2, and 2 replaces 3; layer 1: 1 2, 1 again, 3 for 2
    assert found == [False, False, False, True, False, False, False, True, False, False, True]
    assert cache.held(0) == [4, 2, 1]
    assert cache.held(1) == [1, 3]


def test_a_layer_at_its_share_leaves_free_slots_to_the_others() -> None:
    cache = Cache(layers=2, slots=4)
    for expert in range(5):
        cache.ask(0, expert)
    assert (cache.held(0), cache.held(1)) == ([3, 4], [])


@given(st.integers(1, 6), st.integers(0, 20), st.data())
def test_no_layer_ever_holds_more_than_its_share_and_the_shares_fill_the_slots(
    layers: int, extra: int, data: st.DataObject
) -> None:
    slots = layers + extra
    cache = Cache(layers, slots)
    share, rest = divmod(slots, layers)
    quota = [share + (layer < rest) for layer in range(layers)]
    asked: Sequence[tuple[int, int]] = data.draw(
        st.lists(st.tuples(st.integers(0, layers - 1), st.integers(0, 30)), max_size=60)
    )
    recent: list[list[int]] = [[] for _ in range(layers)]  # an LRU a layer, by the book
    for layer, expert in asked:
        assert cache.ask(layer, expert) == (expert in recent[layer])
        recent[layer] = [*(e for e in recent[layer] if e != expert), expert][-quota[layer] :]
        assert cache.held(layer) == recent[layer]


@given(st.integers(2, 6), st.data())
def test_with_fewer_slots_than_layers_the_layers_share_one_lru(layers: int, data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, layers - 1))
    cache = Cache(layers, slots)
    recent: list[ExpertKey] = []
    for layer, expert in data.draw(
        st.lists(st.tuples(st.integers(0, layers - 1), st.integers(0, 2)), max_size=30)
    ):
        key = ExpertKey(layer, expert)
        assert cache.ask(layer, expert) == (key in recent)
        recent = [*(k for k in recent if k != key), key][-slots:]
        assert cache.order == recent


def test_a_layer_without_a_victim_of_its_own_names_nobody() -> None:
    policy = OnDemandPolicy(CacheShape(2, 8, 2, 4))
    others = [ExpertKey(1, 0), ExpertKey(1, 1)]
    assert policy.choose_victim(RoomWanted(ExpertKey(0, 5), others, 0, 2, True)) is None
    assert policy.choose_victim(RoomWanted(ExpertKey(0, 5), [], 0, 0, True)) is None


@pytest.mark.parametrize(
    "event",
    [
        PrefillStarted(5),
        StepStarted(0, 4),
        DraftRouted(0, 1, (1, 2), (0.6, 0.4)),
        DraftFinished(4),
        LayerDemanded(0, (1, 2), 3),
        LayerFinished(0),
        StepFinished(4, 2),
    ],
    ids=lambda event: type(event).__name__,
)
def test_nothing_that_happens_makes_it_prefetch(event: object) -> None:
    assert list(OnDemandPolicy(CacheShape(2, 8, 2, 4)).observe(event)) == []  # type: ignore[arg-type]
