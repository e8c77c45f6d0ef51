"""The memory of whole passes: whatever happens in whatever order, slots hold what the table says."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from device_rig import RECORD_BYTES, DeviceRig, Index, PlainMemory
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localmoe.core.errors import TransferError
from localmoe.core.types import ExpertKey
from localmoe.experts import device_memory
from localmoe.kernels.residency import HIT, LATE, MISS, MISS_KEPT, MISS_REPLACED

K = ExpertKey
NOBODY: Index = [[[-1]], [[-1]]]
seeds = st.integers(0, 2**32 - 1)


class Story:
    """A random history of one memory, and of the plain model beside it."""

    def __init__(self, seed: int, num_slots: int, layers: int, experts: int) -> None:
        self.chance = random.Random(seed)
        self.rig = DeviceRig(num_slots, layers=layers, experts=experts)
        self.plain = PlainMemory(num_slots, layers, experts)
        self.layers, self.experts = layers, experts
        self.ring: list[int] = []

    def key(self) -> ExpertKey:
        return self.chance.choice(self.rig.keys)

    def check(self) -> None:
        self.rig.check(self.ring)
        assert self.rig.resident == self.plain.here
        assert self.rig.memory.may_copy == (len(self.plain.here) < len(self.rig.keys))
        counters = self.rig.memory.counters()
        found = (counters.h2d_bytes, counters.prefetched, counters.wasted)
        assert found == (self.plain.bytes, self.plain.prefetched, self.plain.wasted)

    def new_scores(self) -> None:
        choices = [0.0, 1.0, 1.0, 2.0, 3.0, np.inf]
        drawn = [self.chance.choice(choices) for _ in self.rig.keys]
        self.rig.scores = np.array(drawn, dtype=np.float32).reshape(self.layers, self.experts)
        self.rig.per_layer = self.chance.random() < 0.4

    def prefetch(self) -> None:
        for _ in range(self.chance.randrange(1, 5)):
            key, deadline = self.key(), float(self.chance.randrange(4))
            self.rig.memory.prefetch(key, deadline)
            self.plain.prefetch(key, deadline)

    def pump(self) -> None:
        self.rig.memory.pump()
        self.plain.pump(self.rig.scores, self.rig.per_layer)

    def prepare(self) -> None:
        self.rig.memory.prepare_pass()
        self.plain.pump(self.rig.scores, self.rig.per_layer)

    def drop(self) -> None:
        layer = self.chance.choice([None, self.chance.randrange(self.layers)])
        self.rig.memory.drop_prefetches(layer)
        self.plain.drop(layer)

    def index(self) -> tuple[Index, int]:
        tokens = self.chance.randrange(1, 4)
        experts = range(-1, self.experts + 1)
        draw = self.chance.sample
        return [[draw(experts, 2) for _ in range(tokens)] for _ in range(self.layers)], tokens

    def run_pass(self, *, late: bool = False, finish: bool = True) -> None:
        index, tokens = self.index()
        memory = self.rig.memory
        if late:
            with self.rig.transfers.paused():
                memory.open_pass()
                log, _ = self.rig.play(index, tokens)
        else:
            memory.open_pass()
            log, _ = self.rig.play(index, tokens)
        self.plain.pump(self.rig.scores, self.rig.per_layer)
        if finish:
            report = memory.close_pass(log)
            asked = self.plain.close_pass(log)
            assert {K(*pair) for pair in np.argwhere(report.demanded).tolist()} == asked
            assert not (report.hits & report.late).any() and not (report.hits & report.misses).any()
            assert late or not report.late.any()
        else:
            memory.abandon_pass()
            self.plain.clear()  # what is emptied is not called wasted

    def run_passes_behind_each_other(self) -> None:
        """Each is opened before the host has heard of the one before."""
        memory = self.rig.memory
        memory.open_pass()
        self.plain.pump(self.rig.scores, self.rig.per_layer)
        logs = [self.rig.play(*self.index())[0]]
        for _ in range(self.chance.randrange(1, 5)):
            self.new_scores()
            memory.open_behind()
            logs.append(self.rig.play(*self.index())[0])
            log = logs.pop(0)
            memory.close_pass(log)
            self.plain.close_pass(log)
        memory.close_pass(logs[0])
        self.plain.close_pass(logs[0])

    def reserve_and_fill(self) -> None:
        memory, plain = self.rig.memory, self.plain
        count = self.chance.randrange(self.rig.slots.num_slots + 2)
        expected = plain.reserve(count, self.rig.scores)
        self.ring = memory.reserve(count)
        assert len(set(self.ring)) == len(self.ring) == expected
        self.check()
        while (
            self.ring and (absent := sorted(set(self.rig.keys) - plain.here)) and self.chance.random() < 0.7
        ):
            key = self.chance.choice(absent)
            memory.load(key, self.ring.pop())
            plain.reserved -= 1
            plain.enter(key)
            if self.chance.random() < 0.3:
                slot = memory._slot_of[key]
                memory.leave(key)
                plain.leave(key)
                plain.reserved += 1
                self.ring.append(int(slot))
        self.check()
        memory.give_back(self.ring)
        self.ring, plain.reserved = [], 0

    def note_use(self) -> None:
        keys = {self.key() for _ in range(3)}
        demanded = np.zeros((self.layers, self.experts), dtype=np.bool_)
        for key in keys:
            demanded[key] = True
        self.rig.memory.note_use(demanded)
        self.plain.use(keys)

    def forget(self) -> None:
        self.rig.memory.forget()
        self.plain = PlainMemory(self.rig.slots.num_slots, self.layers, self.experts)

    def step(self) -> None:
        often = [self.prefetch, self.prefetch, self.pump, self.new_scores, self.run_pass, self.run_pass]
        often.append(self.run_passes_behind_each_other)
        late = [lambda: self.run_pass(late=True)] * 2
        seldom = [self.drop, self.reserve_and_fill, self.note_use, self.prepare]
        rare = [self.forget, lambda: self.run_pass(finish=False)] if self.chance.random() < 0.2 else []
        self.chance.choice([*often, *late, *seldom, *rare])()
        self.check()


@settings(max_examples=100)
@given(seeds, st.integers(1, 14), st.integers(1, 3), st.integers(2, 6))
@example(0, 1, 1, 2)
def test_any_history_leaves_every_slot_with_one_owner_and_the_right_weights(
    seed: int, num_slots: int, layers: int, experts: int
) -> None:
    story = Story(seed, num_slots, layers, experts)
    for _ in range(60):
        story.step()
    everything = story.rig.memory.reserve(num_slots)
    assert sorted(everything) == list(range(num_slots))


def rig_with(*keys: ExpertKey, slots: int = 3) -> DeviceRig:
    """A memory in which these experts were prefetched for a window that is over."""
    rig = DeviceRig(slots)
    for key in keys:
        rig.memory.prefetch(key, 0.0)
    rig.memory.pump()
    rig.memory.drop_prefetches()
    return rig


def test_prefetches_are_copied_by_deadline_and_those_without_room_wait_their_turn() -> None:
    rig = DeviceRig(2)
    for expert, deadline in ((3, 3.0), (1, 1.0), (2, 2.0)):
        rig.memory.prefetch(K(0, expert), deadline)
    rig.memory.pump()
    assert rig.resident == {K(0, 1), K(0, 2)}
    rig.memory.drop_prefetches(1)  # of another layer
    rig.memory._guarded[:] = False
    rig.memory.pump()
    assert K(0, 3) in rig.resident


def test_what_issuing_a_copy_takes_is_the_least_of_several_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is slow, since it sets things up; nothing is said before others were seen."""
    rig, now = DeviceRig(12), [0.0]
    memory, copy = rig.memory, rig.transfers.copy
    seconds = iter([9.0, 9.0, *[1.0] * 3, 0.25, 0.75, *[1.0] * 5])

    def slow_copy(*arguments: Any) -> int:
        now[0] += next(seconds)
        return copy(*arguments)

    monkeypatch.setattr(rig.transfers, "copy", slow_copy)
    monkeypatch.setattr(device_memory, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    told = []
    for first, last in ((0, 2), (2, 3), (3, 4), (4, 5), (5, 7), (7, 8), (8, 9), (9, 10), (10, 11), (11, 12)):
        for key in rig.keys[first:last]:
            memory.prefetch(key, 0.0)
        memory.pump()
        memory.pump()  # nothing waits: not a stretch
        now[0] += 100.0
        told.append(memory.issue_s)
    assert told == [None] * 7 + [0.5] * 3


def test_a_prefetch_never_takes_the_place_of_another_one_of_its_window() -> None:
    rig = DeviceRig(2)
    for expert in range(4):
        rig.memory.prefetch(K(0, expert), float(expert))
        rig.memory.pump()
    assert rig.resident == {K(0, 0), K(0, 1)}
    rig.memory.open_pass()
    log, _ = rig.play([[[0]], [[-1]]], 1)
    rig.memory.close_pass(log)  # used, and so it may go
    rig.memory.pump()
    assert rig.resident == {K(0, 2), K(0, 1)}


def test_a_prefetch_never_takes_the_place_of_what_the_policy_wants_to_keep() -> None:
    rig = rig_with(K(0, 0), K(1, 0), slots=2)
    rig.scores[:, 0] = np.inf
    rig.memory.prefetch(K(0, 5), 0.0)
    rig.memory.pump()
    assert rig.resident == {K(0, 0), K(1, 0)}
    rig.scores[1, 0] = 5.0
    rig.memory.pump()
    assert rig.resident == {K(0, 0), K(0, 5)}


def test_with_shares_room_is_made_within_the_layer_and_other_layers_do_not_wait_for_it() -> None:
    rig = rig_with(K(0, 0), K(1, 0), slots=2)
    rig.per_layer, rig.scores[0, 0] = True, np.inf
    rig.memory.prefetch(K(0, 5), 0.0)
    rig.memory.prefetch(K(1, 5), 1.0)
    rig.memory.pump()
    assert rig.resident == {K(0, 0), K(1, 5)}


def test_of_the_evictable_the_lowest_score_goes() -> None:
    rig = rig_with(K(0, 0), K(0, 1), K(1, 1))
    rig.scores[0, :2], rig.scores[1, 1] = (3.0, 1.0), 2.0
    for expert in (4, 5):
        rig.memory.prefetch(K(1, expert), 0.0)
    rig.memory.pump()
    assert rig.resident == {K(0, 0), K(1, 4), K(1, 5)}


def test_a_copy_that_is_not_complete_is_late_and_is_not_given_away() -> None:
    rig = DeviceRig(1)
    with rig.transfers.paused():
        rig.memory.prefetch(K(0, 2), 0.0)
        rig.memory.open_pass()
        assert int(rig.block.view(0).ticket[2]) > int(rig.block.done)
        log, tiles = rig.play([[[2, 3]], [[-1, -1]]], 1)
    assert [(tile.expert, tile.landing) for tile in tiles[0]] == [(3, 0), (2, 0)]
    assert (log[0, 2], log[0, 3]) == (LATE, MISS)
    report = rig.memory.close_pass(log)
    assert report.late[0, 2] and report.misses[0, 3] and report.demanded.sum() == 2
    assert int(rig.block.view(0).ticket[2]) <= int(rig.block.done)
    rig.check()


def test_what_was_prefetched_for_an_earlier_answer_is_no_waste_of_the_next() -> None:
    rig = rig_with(K(0, 5), K(1, 0), slots=3)
    rig.memory.begin_answer()
    rig.memory.open_pass()
    log, _ = rig.play([[[0, 1, 2]], [[-1, -1, -1]]], 1)
    rig.memory.close_pass(log)
    assert (rig.memory.counters().prefetched, rig.memory.counters().wasted) == (2, 0)


def test_what_a_pass_misses_fills_free_slots_and_then_replaces() -> None:
    rig = rig_with(K(0, 5), K(1, 0), slots=3)
    rig.memory.open_pass()
    log, _ = rig.play([[[0, 1, 2]], [[-1, -1, -1]]], 1)
    assert log[0].tolist() == [MISS_KEPT, MISS_REPLACED | 5 << 8, MISS, 0, 0, 0]
    rig.memory.close_pass(log)
    rig.check()
    assert rig.resident == {K(0, 0), K(0, 1), K(1, 0)}
    counters = rig.memory.counters()
    assert (counters.h2d_bytes, counters.prefetched, counters.wasted) == (5 * RECORD_BYTES, 2, 1)
    rig.memory.open_pass()
    log, _ = rig.play([[[0, 1, 2]], [[-1, -1, -1]]], 1)
    assert log[0].tolist()[:3] == [HIT, HIT, MISS]


def test_free_slots_are_offered_to_all_layers_in_turn_and_each_only_once() -> None:
    rig = DeviceRig(5)
    rig.memory.open_pass()
    offered = [[a for a in rig.block.view(layer).landing.tolist() if a] for layer in (0, 1)]
    assert [len(part) for part in offered] == [3, 2]
    assert len({*offered[0], *offered[1]}) == 5
    on_device = rig.block.view(0).landing
    assert (on_device[:3] != 0).all() and (on_device[3:] == 0).all()
    rig = rig_with(K(0, 0), K(0, 3), slots=5)
    rig.memory.open_pass()
    offered = [[a for a in rig.block.view(layer).landing.tolist() if a] for layer in (0, 1)]
    assert [len(part) for part in offered] == [1, 2], "to those that have fewest"


def test_a_pass_that_was_prepared_goes_by_what_was_known_then_and_by_what_changed_in_slots_since() -> None:
    rig = rig_with(K(0, 0), slots=3)
    rig.scores[0, 0] = 5.0
    rig.memory.prepare_pass()
    rig.scores[0, 0] = 6.0
    rig.memory.open_pass()
    view = rig.block.view(0)
    assert float(view.score[0]) == 5.0
    rig.memory.close_pass(rig.play([[[0, 0]], [[-1, -1]]], 1)[0])

    rig.memory.prepare_pass()
    rig.memory.prefetch(K(0, 4), 0.0)
    rig.memory.open_pass()  # whoever asks for nothing after preparing uploads nothing; this one does
    assert int(view.address[4]) == rig.memory.slot_address(K(0, 4)) and float(view.score[0]) == 6.0
    log, _ = rig.play([[[4, 4]], [[-1, -1]]], 1)
    assert log[0, 4] & 0xFF == HIT
    rig.memory.close_pass(log)

    rig.memory.prepare_pass()
    rig.scores[0, 0] = 7.0
    rig.memory.abandon_pass()  # another one comes, some time
    rig.memory.open_pass()
    assert float(view.score[0]) == 7.0


@pytest.mark.parametrize("take", ["reserve", "reserve_neighbours", "take_free"])
def test_slots_that_are_taken_since_a_pass_was_prepared_are_not_offered_to_it(take: str) -> None:
    rig = rig_with(K(0, 0), slots=4)
    rig.memory.prepare_pass()
    taken = {
        "reserve": lambda: rig.memory.reserve(3),
        "reserve_neighbours": lambda: list(rig.memory.reserve_neighbours(2)),
        "take_free": lambda: rig.memory.take_free(1, 6, 3),
    }[take]()
    assert len(taken) >= 2
    rig.memory.open_pass()
    offered = [a for layer in (0, 1) for a in rig.block.view(layer).landing.tolist() if a]
    assert not {rig.slots.address(slot) for slot in taken}.intersection(offered)
    rig.memory.abandon_pass()


def test_a_pass_behind_another_is_told_nothing_but_scores_and_none_can_be_opened_after_the_end() -> None:
    rig = rig_with(K(0, 0), K(0, 1), slots=2)
    rig.memory.open_pass()
    first, _ = rig.play([[[2, 2]], [[-1, -1]]], 1)
    assert [first[0, 2] & 0xFF, first[0, 2] >> 8] == [MISS_REPLACED, 0]
    before = rig.block.view(0)
    table = [tensor.clone() for tensor in (before.address, before.ticket, before.landing)]
    rig.scores[:] = 3.0
    rig.scores[0, 1] = np.inf
    rig.memory.open_behind()
    after = rig.block.view(0)
    for tensor, then in zip((after.address, after.ticket, after.landing), table, strict=True):
        assert torch.equal(tensor, then)
    # as the host knows it; 0 has gone in the meantime, and what has come goes last
    assert after.score.tolist() == [3.0, np.inf] + [4.0] * 4
    second, _ = rig.play([[[2, 0]], [[-1, -1]]], 1)
    assert [second[0, 0] & 0xFF, second[0, 2] & 0xFF] == [MISS, HIT]  # nothing may go for 0
    rig.memory.close_pass(first)
    rig.memory.close_pass(second)
    assert rig.resident == {K(0, 1), K(0, 2)}
    rig.check()
    rig.memory.close()
    with pytest.raises(TransferError):
        rig.memory.open_behind()


def test_what_one_pass_brought_makes_room_in_the_next_one_behind_it() -> None:
    rig = rig_with(K(0, 0), slots=1)
    rig.memory.open_pass()
    first, _ = rig.play([[[2, 2]], [[-1, -1]]], 1)
    rig.memory.open_behind()
    second, _ = rig.play([[[4, 4]], [[-1, -1]]], 1)
    assert [second[0, 4] & 0xFF, second[0, 4] >> 8] == [MISS_REPLACED, 2]
    rig.memory.close_pass(first)
    rig.memory.close_pass(second)
    assert rig.resident == {K(0, 4)}
    rig.check()


def test_reserving_takes_free_slots_then_the_lowest_scores_then_even_what_should_stay() -> None:
    rig = rig_with(K(0, 0), K(0, 1), K(1, 0), K(1, 1), slots=5)
    rig.scores[0, 0], rig.scores[0, 1], rig.scores[1, 0], rig.scores[1, 1] = np.inf, 2.0, 1.0, np.inf
    memory = rig.memory
    addresses = {key: memory.slot_address(key) for key in rig.resident}
    address_of = rig.slots.address
    taken = memory.reserve(3)
    assert len(set(taken)) == 3 and rig.resident == {K(0, 0), K(1, 1)}
    assert [address_of(slot) for slot in taken[1:]] == [addresses[K(1, 0)], addresses[K(0, 1)]]
    rest = memory.reserve(9)
    assert sorted([*taken, *rest]) == list(range(5)) and rig.resident == set()


def test_an_abandoned_pass_leaves_no_expert_of_which_it_is_not_known_what_its_slot_holds() -> None:
    rig = rig_with(K(0, 0), K(1, 4))
    rig.memory.open_pass()
    rig.play([[[2, 3]], [[0, 1]]], 1)  # it may have got this far
    rig.memory.abandon_pass()
    rig.check()
    assert rig.resident == set()
    before = rig.memory.counters()
    rig.memory.open_pass()
    log, _ = rig.play([[[0]], [[4]]], 1)
    rig.memory.close_pass(log)
    assert rig.memory.counters().h2d_bytes == before.h2d_bytes + 2 * RECORD_BYTES
    rig.memory.abandon_pass()  # nothing is open: nothing happens
    assert rig.resident == {K(0, 0), K(1, 4)}


def test_what_was_used_counts_as_used_by_its_number_of_pass() -> None:
    rig, seen = DeviceRig(4), []
    rig.memory._scores = lambda last_use: (seen.append(last_use.copy()), (rig.scores, False))[1]
    for index in ([[[0]], [[1]]], [[[0]], [[2]]], NOBODY):
        rig.memory.open_pass()
        rig.memory.close_pass(rig.play(index, 1)[0])
    demanded = np.zeros((2, 6), dtype=np.bool_)
    demanded[1, 1] = True
    rig.memory.note_use(demanded)
    rig.memory.open_pass()
    expected = np.zeros((2, 6), dtype=np.int64)
    expected[0, 0], expected[1, 2], expected[1, 1] = 2, 2, 4
    assert np.array_equal(seen[-1], expected)


def test_counters_are_a_copy_and_forgetting_starts_anew() -> None:
    rig = rig_with(K(0, 0))
    rig.memory.counters().h2d_bytes = 10**9
    assert rig.memory.counters().h2d_bytes == RECORD_BYTES
    rig.memory.forget()
    assert rig.memory.counters().h2d_bytes == 0 and rig.resident == set()
    rig.check()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_copies_that_were_held_back_are_made_even_if_the_test_fails_meanwhile(
    error: type[BaseException],
) -> None:
    rig = DeviceRig(2)
    with pytest.raises(error), rig.transfers.paused():
        rig.memory.prefetch(K(0, 1), 0.0)
        rig.memory.pump()
        raise error
    assert rig.arrived(K(0, 1))
    rig.check()
    rig.memory.prefetch(K(0, 2), 0.0)
    rig.memory.pump()
    assert rig.arrived(K(0, 2))


def test_a_closed_memory_opens_no_pass() -> None:
    rig = DeviceRig(3)
    rig.memory.close()
    with pytest.raises(TransferError, match="closed"):
        rig.memory.open_pass()


def test_a_copy_that_fails_leaves_its_slot_free(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = DeviceRig(3)

    def broken(*args: object) -> int:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(rig.transfers, "copy", broken)
    rig.memory.prefetch(K(0, 1), 0.0)
    with pytest.raises(RuntimeError, match="driver"):
        rig.memory.pump()
    monkeypatch.undo()
    assert rig.memory.resident_keys() == []
    for expert in range(3):
        rig.memory.prefetch(K(1, expert), 0.0)
    rig.memory.pump()
    assert len(rig.resident) == 3, "no slot was lost"


def test_copies_that_may_not_run_beside_the_computation_wait_for_it_and_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, order = DeviceRig(3, layers=2, experts=3), []
    transfers, copy = rig.memory.transfers, rig.memory.transfers.copy
    monkeypatch.setattr(transfers, "wait_for_compute", lambda: order.append("computed"))
    monkeypatch.setattr(transfers, "drain", lambda: order.append("copied"))
    monkeypatch.setattr(transfers, "copy", lambda *to: (order.append("copy"), copy(*to))[1])
    for beside in (True, False):
        order.clear()
        rig.memory.copies_beside = beside
        rig.memory.pump()
        assert order == []
        rig.memory.prefetch(K(int(beside), 0), 0.0)
        rig.memory.pump()
        assert order == (["copy"] if beside else ["computed", "copy", "copied"])
