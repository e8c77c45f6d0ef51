"""What the expert memory does when copies fail, readers leave and owners close it."""

from __future__ import annotations

import linecache
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import pytest
from expert_rig import WAIT_S, Once, in_thread, rig

from localmoe.core.errors import DiskError, TransferError
from localmoe.core.types import ExpertKey
from localmoe.experts import memory

# what gives them up, and where Python leaves a lock behind: no line of ours can help there
_SPARED = ("views.close()", "self._withdraw(pinned, awaited)", "with self._changed:")

LINK_DOWN = RuntimeError("link down")


def key(expert: int, layer: int = 0) -> ExpertKey:
    return ExpertKey(layer, expert)


def test_a_failed_copy_is_an_error_of_its_reader_and_the_memory_stays_usable() -> None:
    with rig(2) as r:
        r.read(0, 0)
        r.link.broken[key(1)] = LINK_DOWN
        with pytest.raises(TransferError, match="expert 1 of layer 0 failed: link down"):
            r.read(0, 0, 1)
        assert r.resident() == {key(0)}
        r.link.broken.clear()
        assert r.read(0, 0, 1) == ({0}, set(), {1})
        assert r.read(1, *range(8))[2] == set(range(8))  # no slot and no pin was lost


@pytest.mark.parametrize("error", [OSError("gone"), MemoryError("full"), RuntimeError("CUDA error")])
def test_a_failed_prefetch_troubles_nobody_who_does_not_wait_for_it(error: Exception) -> None:
    with rig(2) as r:
        r.link.broken[key(1)] = error
        r.memory.prefetch(key(1), 0.0)
        r.link.wait_until_started(key(1))
        r.read(0, 0)
        r.link.broken.clear()
        assert r.read(0, 1) == (set(), set(), {1})
        assert r.memory.counters().prefetched == 0


@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_a_late_expert_whose_copy_fails_is_copied_once_more(again: bool) -> None:
    """The copy began before its reader asked, so its failure says nothing of what that can have."""
    with rig(2) as r:
        r.link.hold()
        r.link.broken = {key(1): LINK_DOWN} if again else Once({key(1): LINK_DOWN})
        r.memory.prefetch(key(1), 0.0)
        r.link.wait_until_started(key(1))
        expected = pytest.raises(TransferError, match="link down") if again else nullcontext()
        with expected, r.memory.demand(0, (1,)) as (report, views):
            assert report.late == {1}
            r.link.let()
            assert [view.expert for view in views] == [1]
        assert not r.memory._older
        r.link.broken.clear()
        r.read(0, 1)


def test_a_failure_that_is_a_sentence_for_users_is_told_as_it_is() -> None:
    with rig(2) as r:
        r.link.broken[key(1)] = DiskError("The experts' file is shorter than it was.")
        with pytest.raises(DiskError, match=r"^The experts' file is shorter than it was\.$"):
            r.read(0, 1)


def test_the_failure_of_a_copy_whose_reader_left_is_not_told_to_the_next_reader() -> None:
    with rig(4) as r:
        r.read(0, 0)
        r.link.broken = {key(1): LINK_DOWN, key(2): LINK_DOWN}
        with pytest.raises(TransferError), r.memory.demand(0, (0, 1, 2)) as (_, views):
            next(views)  # while expert 0 is read, the copies of both others fail
            r.link.wait_until_started(key(1))
            r.link.wait_until_started(key(2))
            time.sleep(0.03)
            list(views)
        r.link.broken.clear()
        assert r.read(0, 1) == (set(), set(), {1})
        assert r.read(0, 2) == (set(), set(), {2})


def test_a_reader_that_leaves_early_gives_up_its_pins_and_its_wishes() -> None:
    with rig(2) as r:
        r.read(0, 0, 1)
        with pytest.raises(KeyError, match="abandoned"), r.memory.demand(0, (0, 1)) as (_, views):
            next(views)
            raise KeyError("abandoned")
        assert r.read(1, *range(8))[2] == set(range(8))  # both slots can be had again
        r.link.hold()
        r.memory.prefetch(key(0), 0.0)
        r.link.wait_until_started(key(0))
        with r.memory.demand(0, (3, 4)):
            pass  # asked, but not read
        r.link.let()
        r.read(0, 5)
        assert key(3) not in r.link.copied
        assert key(4) not in r.link.copied


def test_a_reader_that_is_interrupted_anywhere_leaves_no_pins_and_no_wishes() -> None:
    """At each line until it gives them up, as Ctrl+C would."""
    place = 0
    while True:
        with rig(3) as r:
            r.read(0, 0, 1)
            try:
                with interrupted_at(place), r.memory.demand(0, [0, 1, 4]) as (_, views):
                    list(views)
                break
            except KeyboardInterrupt:
                assert not r.memory._table._pins and not r.memory._wanted, place
                r.read(0, 2, 3, 5)
        place += 1
    assert place > 20


@contextmanager
def interrupted_at(place: int) -> Iterator[None]:
    """KeyboardInterrupt before the line of the memory's code that is the `place`-th to run in this thread."""
    left = place

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != memory.__file__ or frame.f_code.co_name == "_withdraw":
            return None
        spared = linecache.getline(memory.__file__, frame.f_lineno).strip() in _SPARED
        if event == "line" and not spared:
            left -= 1
            if left == -1:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_closing_wakes_a_reader_that_waits_and_finishes_the_copy_that_runs() -> None:
    with rig(2) as r:
        r.link.hold()
        reader, outcome = in_thread(lambda: r.read(0, 0, 1))
        r.link.wait_until_started(key(0))
        closer, _ = in_thread(r.memory.close)
        reader.join(WAIT_S)
        assert isinstance(outcome[0], TransferError)
        assert "closed" in str(outcome[0])
        assert closer.is_alive()  # the running copy still writes into a slot
        r.link.let()
        closer.join(WAIT_S)
        assert not closer.is_alive()
        assert r.link.copied == [key(0)]


def test_a_closed_memory_refuses_what_is_missing_instead_of_waiting_for_ever() -> None:
    with rig(2) as r:
        r.read(0, 0)
        r.memory.close()
        r.memory.close()  # a second time is no error
        r.memory.prefetch(key(3), 0.0)
        reader, outcome = in_thread(lambda: r.read(0, 1))
        reader.join(WAIT_S)
        assert isinstance(outcome[0], TransferError)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_policy_that_names_an_impossible_victim_does_not_leave_the_reader_waiting_for_ever() -> None:
    with rig(1, choose=lambda room: key(7, layer=1)) as r:
        reader, outcome = in_thread(lambda: r.read(0, 0))
        reader.join(5)
        assert not reader.is_alive()
        assert isinstance(outcome[0], Exception)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_copy_that_fails_for_a_reason_nobody_foresaw_does_not_leave_the_reader_waiting_for_ever() -> None:
    with rig(1) as r:
        r.link.broken[key(0)] = ValueError("a fault of the program")
        reader, outcome = in_thread(lambda: r.read(0, 0))
        reader.join(5)
        assert not reader.is_alive()
        assert isinstance(outcome[0], Exception)
