"""The residency table against a naive model of slots, in any order of legal operations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from localmoe.core.types import ExpertKey
from localmoe.experts.residency import ResidencyTable

KEYS = [ExpertKey(layer, expert) for layer in range(3) for expert in range(3)]


class TableAgainstModel(RuleBasedStateMachine):
    """The model: a list of slots with (key, state), a use order, pin counts, and who was prefetched."""

    @initialize(num_slots=st.integers(1, 5))
    def start(self, num_slots: int) -> None:
        self.table = ResidencyTable(num_slots)
        self.slots: list[tuple[ExpertKey, str] | None] = [None] * num_slots
        self.use_order: list[ExpertKey] = []
        self.pins: list[ExpertKey] = []
        self.unused: set[ExpertKey] = set()

    def keys_in(self, state: str) -> list[ExpertKey]:
        return [held[0] for held in self.slots if held is not None and held[1] == state]

    def slot_of(self, key: ExpertKey) -> int:
        return next(i for i, held in enumerate(self.slots) if held is not None and held[0] == key)

    @precondition(lambda self: None in self.slots)
    @rule(data=st.data())
    def begin_copy(self, data: st.DataObject) -> None:
        held = {entry[0] for entry in self.slots if entry is not None}
        key = data.draw(st.sampled_from([key for key in KEYS if key not in held]))
        slot = self.table.begin_copy(key)
        assert self.slots[slot] is None, "a slot in use was handed out"
        self.slots[slot] = (key, "loading")

    @precondition(lambda self: self.keys_in("loading"))
    @rule(data=st.data(), prefetch=st.booleans())
    def finish_copy(self, data: st.DataObject, prefetch: bool) -> None:
        key = data.draw(st.sampled_from(self.keys_in("loading")))
        self.table.finish_copy(key, prefetch=prefetch)
        self.slots[self.slot_of(key)] = (key, "resident")
        self.use_order.append(key)
        if prefetch:
            self.unused.add(key)

    @precondition(lambda self: self.keys_in("loading"))
    @rule(data=st.data())
    def abort_copy(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.keys_in("loading")))
        self.table.abort_copy(key)
        self.slots[self.slot_of(key)] = None

    @precondition(lambda self: self.keys_in("resident"))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.keys_in("resident")))
        self.table.pin(key)
        self.pins.append(key)
        self.use_order.remove(key)
        self.use_order.append(key)
        self.unused.discard(key)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.pins))
        self.table.unpin(key)
        self.pins.remove(key)

    @precondition(lambda self: set(self.keys_in("resident")) - set(self.pins))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([k for k in self.keys_in("resident") if k not in self.pins]))
        assert self.table.evict(key) == (key in self.unused)
        self.slots[self.slot_of(key)] = None
        self.use_order.remove(key)
        self.unused.discard(key)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def a_pinned_expert_cannot_be_evicted(self, data: st.DataObject) -> None:
        with pytest.raises(AssertionError):
            self.table.evict(data.draw(st.sampled_from(self.pins)))

    @precondition(lambda self: any(self.slots))
    @rule(data=st.data())
    def an_expert_that_is_here_cannot_be_copied_again(self, data: st.DataObject) -> None:
        with pytest.raises(AssertionError):
            self.table.begin_copy(data.draw(st.sampled_from([held[0] for held in self.slots if held])))

    @invariant()
    def agrees_with_the_model(self) -> None:
        table = self.table
        assert table.num_free == self.slots.count(None)
        assert table.resident_keys() == self.use_order
        for key in KEYS:
            assert table.is_resident(key) == (key in self.keys_in("resident"))
            assert table.is_loading(key) == (key in self.keys_in("loading"))
            if table.is_resident(key):
                assert table.slot(key) == self.slot_of(key)
        for layer in range(3):
            held = [entry for entry in self.slots if entry is not None and entry[0].layer == layer]
            assert table.slots_of_layer(layer) == len(held)
        free_to_go = [key for key in self.use_order if key not in self.pins]
        assert table.evictable(spare_unused_prefetches=False) == free_to_go
        spared = [key for key in free_to_go if key not in self.unused]
        assert table.evictable(spare_unused_prefetches=True) == spared


TableAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestTableAgainstModel = TableAgainstModel.TestCase


def test_a_prefetch_that_was_used_is_no_waste_when_evicted() -> None:
    table = ResidencyTable(2)
    for key, used in ((KEYS[0], True), (KEYS[1], False)):
        table.begin_copy(key)
        table.finish_copy(key, prefetch=True)
        if used:
            table.pin(key)
            table.unpin(key)
    assert table.evict(KEYS[0]) is False
    assert table.evict(KEYS[1]) is True
