"""A prompt's experts pass through the slots: right when they are read, copied once, and no slot lost."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from device_rig import RECORD_BYTES, DeviceRig
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from localmoe.core.types import ExpertKey
from localmoe.experts.prefill_stream import RING_SLOTS, ExpertGroup, PrefillStream
from localmoe.experts.slots import DeviceSlots

K = ExpertKey
LAYERS, EXPERTS = 3, 6
ALL = LAYERS * EXPERTS


class Watch:
    """Counts copies by expert, and notes in which order copies, readers and waits were issued."""

    def __init__(self, rig: DeviceRig) -> None:
        self.copies: Counter[ExpertKey] = Counter()
        self.order: list[tuple[str, object]] = []
        self.marks = 0
        self._copy = rig.transfers.copy
        rig.transfers.copy = self.copy  # type: ignore[method-assign]
        rig.transfers.mark_compute = self.mark  # type: ignore[method-assign]
        rig.transfers.copies_wait_for = lambda mark: self.order.append(("wait", mark))  # type: ignore[method-assign]
        rig.transfers.compute_waits_for_copies = lambda: self.order.append(("join", None))  # type: ignore[method-assign]

    def copy(self, record: Tensor, slots: DeviceSlots, slot: int) -> int:
        self.copies[K(int(record[0]), int(record[1]))] += 1
        self.order.append(("copy", slot))
        return self._copy(record, slots, slot)

    def mark(self) -> int:
        self.marks += 1
        self.order.append(("mark", self.marks))
        return self.marks


def warm(rig: DeviceRig, count: int, seed: int) -> None:
    """Some experts are here already."""
    for key in random.Random(seed).sample(rig.keys, count):
        rig.memory.prefetch(key, 0.0)
    rig.memory.pump()
    rig.memory.drop_prefetches()


def read(rig: DeviceRig, layer: int, group: ExpertGroup) -> None:
    """Compute with a group: every address must hold the record now."""
    assert len(group.experts) == len(group.addresses) > 0
    for expert, address in zip(group.experts, group.addresses, strict=True):
        assert rig.is_right(K(layer, expert), address)
        assert rig.arrived(K(layer, expert))


def whole_pass(rig: DeviceRig, lent: int = 0) -> None:
    """lent: slots whose memory the pass takes for itself."""
    num_bytes = max(0, lent * rig.slots.slot_bytes - 3)
    stream = PrefillStream(rig.memory, num_bytes)
    assert (stream.lent is None and not lent) or (stream.lent is not None and len(stream.lent) >= num_bytes)
    for layer in range(rig.store.num_layers):
        seen: list[int] = []
        for group in stream.bring(layer, stream.plan(layer)):
            if stream.lent is not None:
                stream.lent.fill_(255)  # of NaN
            read(rig, layer, group)
            seen += group.experts
        assert sorted(seen) == list(range(rig.store.num_experts))
    stream.close()


@settings(max_examples=40)
@given(
    st.integers(1, ALL + 3), st.integers(0, ALL), st.integers(0, 99), st.booleans(), st.floats(0, 0.5)
)  # fmt: skip
@example(2, 2, 0, True, 0.0)
@example(3, 0, 0, False, 0.0)
@example(5, 5, 1, True, 0.4)
@example(ALL, ALL, 0, False, 0.25)
def test_every_expert_is_there_when_it_is_read_and_what_was_not_is_copied_once(
    num_slots: int, num_warm: int, seed: int, needed: bool, lent_share: float
) -> None:
    """A quarter of the slots is lent at most; here half of them."""
    lent = int(num_slots * lent_share)
    rig = DeviceRig(num_slots, layers=LAYERS, experts=EXPERTS)
    warm(rig, min(num_warm, num_slots), seed)
    rig.scores[:] = np.random.default_rng(seed).random(rig.scores.shape)
    if needed:  # a window that is over wanted some of them: they may be displaced all the same
        rig.scores[rig.scores < 0.5] = np.inf
    for _ in range(2):
        before, copied = rig.memory.counters().h2d_bytes, rig.transfers.issued
        watch = Watch(rig)
        whole_pass(rig, lent)
        assert all(count == 1 for count in watch.copies.values())
        assert rig.memory.counters().h2d_bytes - before == RECORD_BYTES * watch.copies.total()
        assert rig.transfers.issued - copied == watch.copies.total() >= len(rig.keys) - num_slots
        rig.check()
    ring = min(RING_SLOTS, max(2, num_slots // 4))
    assert len(rig.resident) >= min(num_slots, ALL) - ring - LAYERS - lent
    assert sorted(rig.memory.reserve(num_slots)) == list(range(num_slots))


def test_nothing_is_displaced_where_nothing_is_missing() -> None:
    rig = DeviceRig(ALL, layers=LAYERS, experts=EXPERTS)
    warm(rig, ALL, 0)
    watch = Watch(rig)
    whole_pass(rig)
    assert watch.copies.total() == 0 and len(rig.resident) == ALL


def test_what_has_room_stays_and_is_not_copied_for_the_next_prompt() -> None:
    rig = DeviceRig(11, layers=LAYERS, experts=EXPERTS)
    whole_pass(rig)
    staying = Counter(key.layer for key in rig.resident)
    assert all(staying[layer] >= 3 for layer in range(LAYERS))  # (11 slots - 2 of the ring) / 3 layers
    watch = Watch(rig)
    whole_pass(rig)
    assert watch.copies.total() <= ALL - 9 + 2  # the ring may displace two of those
    assert set(watch.copies.values()) == {1}


@pytest.mark.parametrize("num_slots", [2, 3, 5, 9])
def test_a_slot_is_overwritten_only_behind_the_group_that_read_it(num_slots: int) -> None:
    rig = DeviceRig(num_slots, layers=LAYERS, experts=EXPERTS)
    watch = Watch(rig)
    stream = PrefillStream(rig.memory)
    assert watch.order[:3] == [("mark", 1), ("wait", 1), ("join", None)]  # what ran before may still read
    in_use: dict[int, int] = {}  # slot -> number of groups issued when it was read
    groups = 0
    for layer in range(LAYERS):
        for group in stream.bring(layer, stream.plan(layer)):
            events, watch.order = watch.order, []
            waited = max((mark for what, mark in events if what == "wait"), default=0)
            for what, slot in events:
                if what == "copy" and slot in in_use:
                    # each group's readers are marked right after it: mark 1 was before the first one
                    assert isinstance(waited, int) and waited > 1
                    assert in_use.pop(slot) < groups or num_slots < 4, "computing and copying take turns"
            if any(what == "copy" for what, _ in events):
                assert events[-1] == ("join", None)
            read(rig, layer, group)
            groups += 1
            for slot in range(num_slots):
                if rig.slots.address(slot) in group.addresses:
                    in_use[slot] = groups
    stream.close()


@settings(max_examples=30)
@given(st.integers(1, ALL), st.integers(0, 12), st.integers(0, 99))
def test_a_pass_that_ends_early_loses_no_slot(num_slots: int, groups: int, seed: int) -> None:
    rig = DeviceRig(num_slots, layers=LAYERS, experts=EXPERTS)
    warm(rig, num_slots // 2, seed)
    stream = PrefillStream(rig.memory)
    left = groups
    for layer in range(LAYERS):
        for group in stream.bring(layer, stream.plan(layer)):
            if left == 0:
                break
            left -= 1
            read(rig, layer, group)
        if left == 0:
            break
    stream.close()
    rig.check()
    whole_pass(rig)
    rig.check()


@settings(max_examples=30)
@given(st.integers(1, 3 * ALL), st.integers(0, 3 * ALL))
@example(12, 3 * ALL - 2)
def test_a_copy_that_fails_loses_no_slot(num_slots: int, copies: int) -> None:
    rig = DeviceRig(num_slots, layers=LAYERS, experts=3 * EXPERTS)
    copy = rig.transfers.copy

    def failing(record: Tensor, slots: DeviceSlots, slot: int) -> int:
        if rig.transfers.issued >= copies:
            raise RuntimeError("the link is gone")
        return copy(record, slots, slot)

    rig.transfers.copy = failing  # type: ignore[method-assign]
    stream = PrefillStream(rig.memory)
    with pytest.raises(RuntimeError) if copies < 3 * ALL else nullcontext():
        for layer in range(LAYERS):
            for group in stream.bring(layer, stream.plan(layer)):
                read(rig, layer, group)
    stream.close()
    rig.check()
    rig.transfers.copy = copy  # type: ignore[method-assign]
    whole_pass(rig)
    rig.check()


def test_a_prompt_after_late_prefetches_reads_them_only_when_they_are_there() -> None:
    rig = DeviceRig(6, layers=LAYERS, experts=EXPERTS)
    with rig.transfers.paused():
        rig.memory.prefetch(K(0, 3), 0.0)
        rig.memory.prefetch(K(2, 1), 0.0)
        rig.memory.pump()
    assert torch.isfinite(rig.content(rig.memory.slot_address(K(0, 3)))).all()
    whole_pass(rig)
    rig.check()


@settings(max_examples=60)
@given(st.integers(2, ALL + 3), st.integers(0, ALL), st.integers(0, 99), st.integers(1, 8))
def test_neighbours_that_are_lent_are_those_that_are_worth_least(
    num_slots: int, num_warm: int, seed: int, count: int
) -> None:
    count = min(count, num_slots)
    rig = DeviceRig(num_slots, layers=LAYERS, experts=EXPERTS)
    warm(rig, min(num_warm, num_slots), seed)
    chance = np.random.default_rng(seed)
    rig.scores[:] = chance.permutation(ALL).reshape(rig.scores.shape)
    rig.scores[chance.random(rig.scores.shape) < 0.2] = np.inf
    kept = rig.memory.reserve(int(chance.integers(0, num_slots - count + 1)) // 2)  # in somebody's hands
    resident = rig.resident
    ranked = sorted(resident, key=lambda key: rig.scores[key])
    place = {key: int(rig.memory._slot_of[key]) for key in resident}
    worth = dict.fromkeys(range(num_slots), 0.0) | {place[key]: 1.0 + ranked.index(key) for key in resident}
    worth |= dict.fromkeys(kept, np.inf)
    sums = [sum(worth[slot] for slot in range(at, at + count)) for at in range(num_slots - count + 1)]
    if not np.isfinite(min(sums)):
        return
    run = rig.memory.reserve_neighbours(count)
    finite = [key for key in resident if np.isfinite(rig.scores[key])]
    if len(finite) == len(resident):  # those without a score are in no order
        assert sum(worth[slot] for slot in run) == min(sums)
    assert rig.resident == {key for key in resident if place[key] not in run}
    rig.check([*kept, *run])
    rig.memory.give_back([*kept, *run])
    rig.check()
