"""What the expert memory promises its reader and its policy, one situation at a time."""

from __future__ import annotations

import threading
import time

import pytest
from expert_rig import LAYOUT, WAIT_S, StoppableLink, in_thread, oldest, rig

from localmoe.core.events import RoomWanted
from localmoe.core.types import ExpertKey


def key(expert: int, layer: int = 0) -> ExpertKey:
    return ExpertKey(layer, expert)


def test_a_demand_says_what_was_here_what_was_on_its_way_and_what_was_missing() -> None:
    with rig(4) as r:
        assert r.read(0, 1) == (set(), set(), {1})
        r.link.hold()
        r.memory.prefetch(key(2), 0.0)
        r.memory.prefetch(key(4), 1.0)  # queued behind it: nothing of it is on its way
        r.link.wait_until_started(key(2))
        with r.memory.demand(0, (1, 2, 3, 4)) as (report, views):
            assert (report.hits, report.late, report.misses) == ({1}, {2}, {3, 4})
            first = next(views)
            assert first.expert == 1  # what is here comes first, while nothing else has arrived
            r.check(0, first)
            r.link.let()
            rest = [view.expert for view in views if r.check(0, view) is None]
        assert sorted(rest) == [2, 3, 4]
        assert r.read(0, 1, 2, 3, 4) == ({1, 2, 3, 4}, set(), set())


def test_layers_do_not_share_experts() -> None:
    with rig(4) as r:
        r.read(0, 5)
        assert r.read(1, 5) == (set(), set(), {5})
        assert r.resident() == {key(5), key(5, layer=1)}


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_a_demand_larger_than_the_number_of_slots_completes(num_slots: int) -> None:
    with rig(num_slots) as r:
        for layer in (0, 1, 0):
            hits, late, misses = r.read(layer, *range(8))
            assert (len(hits), late, len(hits) + len(misses)) == (0 if layer else len(hits), set(), 8)
        assert len(r.resident()) == num_slots
        assert r.memory.counters().h2d_bytes == len(r.link.copied) * LAYOUT.elements * 4


def test_a_demand_with_every_slot_a_hit_and_more_missing_completes() -> None:
    with rig(2) as r:
        r.read(0, 0, 1)
        assert r.read(0, 0, 1, 2, 3) == ({0, 1}, set(), {2, 3})


def test_an_empty_demand_reads_nothing() -> None:
    with rig(1) as r:
        assert r.read(0) == (set(), set(), set())
        assert r.link.copied == []


def test_demands_are_copied_before_prefetches_and_prefetches_by_deadline() -> None:
    with rig(8) as r:
        r.link.hold()
        r.memory.prefetch(key(0), 9.0)
        r.link.wait_until_started(key(0))
        for expert, deadline in ((3, 3.0), (1, 1.0), (2, 2.0)):
            r.memory.prefetch(key(expert), deadline)
        with r.memory.demand(0, (7,)) as (_, views):
            r.link.let()
            assert [view.expert for view in views] == [7]
        r.wait_resident(*(key(e) for e in (0, 1, 2, 3, 7)))
        assert r.link.copied == [key(e) for e in (0, 7, 1, 2, 3)]


def test_a_demand_for_what_is_queued_as_a_prefetch_hastens_it_and_copies_it_once() -> None:
    with rig(8) as r:
        r.link.hold()
        for expert in (0, 1, 2):
            r.memory.prefetch(key(expert), float(expert))
        r.link.wait_until_started(key(0))
        with r.memory.demand(0, (2,)) as (report, views):
            assert report.misses == {2}
            r.link.let()
            list(views)
        r.wait_resident(key(0), key(1), key(2))
        assert r.link.copied == [key(0), key(2), key(1)]
        assert r.memory.counters().prefetched == 2  # the demand's copy is no prefetch


def test_dropped_prefetches_are_not_copied_but_the_one_in_flight_is() -> None:
    with rig(8) as r:
        r.link.hold()
        for expert in range(4):
            r.memory.prefetch(key(expert), 0.0)
        r.link.wait_until_started(key(0))
        r.memory.drop_prefetches()
        r.link.let()
        r.read(0, 7)
        assert r.link.copied == [key(0), key(7)]


def test_what_is_here_or_on_its_way_is_not_copied_again() -> None:
    with rig(4) as r:
        r.read(0, 1)
        r.memory.prefetch(key(1), 0.0)
        r.link.hold()
        r.memory.prefetch(key(2), 0.0)
        r.link.wait_until_started(key(2))
        r.memory.prefetch(key(2), -5.0)
        r.link.let()
        r.read(0, 1, 2)
        assert r.link.copied == [key(1), key(2)]


def test_a_prefetch_never_evicts_an_unused_prefetch_but_waits_until_it_is_used() -> None:
    asked: list[RoomWanted] = []

    def greedy_victim(room: RoomWanted) -> ExpertKey | None:
        asked.append(room)
        return room.candidates[0] if room.candidates and not room.num_free else None

    with rig(2, choose=greedy_victim) as r:
        r.memory.prefetch(key(0), 0.0)
        r.memory.prefetch(key(1), 1.0)
        r.wait_resident(key(0), key(1))
        r.memory.prefetch(key(2), 2.0)
        time.sleep(0.05)
        assert r.resident() == {key(0), key(1)}
        assert all(not room.candidates for room in asked if room.key == key(2))
        r.read(0, 0)  # used, and so it may go
        r.wait_resident(key(2))
        assert r.resident() == {key(1), key(2)}
        counters = r.memory.counters()
        assert (counters.prefetched, counters.wasted) == (3, 0)


def test_a_demand_may_evict_an_unused_prefetch_and_that_counts_as_waste() -> None:
    with rig(1) as r:
        r.memory.prefetch(key(0), 0.0)
        r.wait_resident(key(0))
        r.read(0, 1)
        counters = r.memory.counters()
        assert (counters.prefetched, counters.wasted) == (1, 1)
        r.read(0, 2)  # a demanded expert that goes is no waste
        assert r.memory.counters().wasted == 1


def test_what_an_earlier_answer_prefetched_is_no_waste_of_the_next() -> None:
    with rig(1) as r:
        r.memory.prefetch(key(0), 0.0)
        r.wait_resident(key(0))
        r.memory.begin_answer()
        r.memory.prefetch(key(1), 0.0)  # may take its slot: nobody waits for it any more
        r.wait_resident(key(1))
        assert (r.memory.counters().prefetched, r.memory.counters().wasted) == (2, 0)
        r.read(0, 2)
        assert r.memory.counters().wasted == 1


def test_an_expert_is_neither_offered_nor_overwritten_while_it_is_read() -> None:
    asked: list[RoomWanted] = []

    def watch(room: RoomWanted) -> ExpertKey | None:
        asked.append(room)
        return oldest(room)

    with rig(2, choose=watch) as r:
        r.read(0, 0, 1)
        with r.memory.demand(0, (0, 1)) as (_, views):
            for view in views:
                before = len(asked)
                r.memory.prefetch(key(5, layer=1), 0.0)
                r.memory.prefetch(key(6, layer=1), 0.0)
                time.sleep(0.03)
                r.check(0, view)
                assert all(key(view.expert) not in room.candidates for room in asked[before:])
        assert asked


def test_an_expert_that_waits_for_its_reader_is_not_evicted_before_it_was_read() -> None:
    with rig(2) as r, r.memory.demand(0, (0, 1, 2, 3)) as (_, views):
        first = next(views)
        r.wait_resident(key(0), key(1))
        time.sleep(0.03)  # both slots are taken: one is being read, one waits to be
        assert r.resident() == {key(0), key(1)}
        r.check(0, first)
        assert sorted([first.expert, *(view.expert for view in views)]) == [0, 1, 2, 3]


def test_the_policy_is_told_the_truth_about_the_room() -> None:
    asked: list[RoomWanted] = []

    def watch(room: RoomWanted) -> ExpertKey | None:
        asked.append(room)
        return oldest(room)

    with rig(3, choose=watch) as r:
        r.read(0, 0)
        r.read(0, 1)
        r.read(0, 0)
        r.read(1, 4)
        r.read(1, 5)
        assert asked == [
            RoomWanted(key(0), [], 3, 0, True),
            RoomWanted(key(1), [key(0)], 2, 1, True),
            RoomWanted(key(4, 1), [key(1), key(0)], 1, 0, True),  # least recently used first
            RoomWanted(key(5, 1), [key(1), key(0), key(4, 1)], 0, 1, True),
        ]
        assert r.resident() == {key(0), key(4, 1), key(5, 1)}


def test_a_demand_goes_on_when_the_policy_names_no_victim_and_a_prefetch_waits() -> None:
    with rig(1, choose=lambda room: None) as r:
        r.read(0, 0)
        r.memory.prefetch(key(1), 0.0)
        time.sleep(0.03)
        assert r.resident() == {key(0)}
        r.read(0, 2)
        assert r.resident() == {key(2)}


def test_a_backlog_that_cannot_start_is_not_asked_about_key_by_key_at_every_turn() -> None:
    asked: list[RoomWanted] = []

    def keep_all_for_demands(room: RoomWanted) -> ExpertKey | None:
        asked.append(room)
        return oldest(room) if room.is_demand else None

    with rig(2, layers=2, experts=64, choose=keep_all_for_demands) as r:
        r.read(0, 0, 1)
        with r.memory.lock:
            for expert in range(64):
                r.memory.prefetch(key(expert, layer=1), float(expert))
        time.sleep(0.1)
        asked.clear()
        r.read(0, 0, 1)
        time.sleep(0.05)
        assert len(asked) <= 10  # the reader waits for the lock while the worker looks for something to do


def test_a_policy_may_evict_although_a_slot_is_free() -> None:
    with rig(3, choose=lambda room: room.candidates[0] if room.candidates else None) as r:
        for expert in range(4):
            r.read(0, expert)
        assert r.resident() == {key(3)}


def test_after_read_is_told_the_slot_of_every_view_that_was_read() -> None:
    with rig(3) as r:
        r.read(0, 0, 1, 2)
        r.read(0, 1)
        assert sorted(r.link.reads[:3]) == [0, 1, 2]
        assert len(r.link.reads) == 4


def test_waiting_for_a_copy_is_counted_as_stall_and_reading_is_not() -> None:
    with rig(2) as r:
        r.read(0, 0)
        before = r.memory.counters().stall_s
        with r.memory.demand(0, (0,)) as (_, views):
            next(views)
            time.sleep(0.05)
        assert r.memory.counters().stall_s == before
        r.link.hold()
        threading.Timer(0.1, r.link.let).start()
        r.read(0, 1)
        assert 0.09 <= r.memory.counters().stall_s - before < 5


def test_counters_are_a_copy() -> None:
    with rig(2) as r:
        r.memory.counters().h2d_bytes = 10**9
        assert r.memory.counters().h2d_bytes == 0


def test_two_readers_at_once_both_get_what_they_asked_for() -> None:
    with rig(2) as r:
        r.read(0, 0)
        r.link.hold()
        asked = threading.Event()

        def read_quickly() -> list[int]:
            with r.memory.demand(0, (1, 2)) as (report, views):
                assert report.late == {1}
                asked.set()
                return [view.expert for view in views]

        with r.memory.demand(0, (0, 1)) as (_, slow_views):
            next(slow_views)  # reads 0; 1 is on its way, and the other reader will have evicted it for 2
            r.link.wait_until_started(key(1))
            quick, quickly_read = in_thread(read_quickly)
            assert asked.wait(WAIT_S)
            r.link.let()
            quick.join(WAIT_S)
            assert quickly_read == [[1, 2]]
            slow, slowly_read = in_thread(lambda: [view.expert for view in slow_views])
            slow.join(5)
            if slow.is_alive():
                r.memory.close()  # wakes it up
                slow.join(WAIT_S)
        assert slowly_read == [[1]]


def test_the_lock_can_be_taken_again_by_its_holder() -> None:
    with rig(2) as r, r.memory.lock:
        r.memory.prefetch(key(0), 0.0)
        r.memory.drop_prefetches()
        assert isinstance(r.link, StoppableLink)
