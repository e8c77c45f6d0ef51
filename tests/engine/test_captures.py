"""Passes are captured ahead while nobody is answered, and nobody is refused or held up for long by that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from localmoe.core import threads
from localmoe.core.config import SamplingConfig
from localmoe.core.errors import DiskError
from localmoe.engine.captures import Captures
from localmoe.engine.improver import _Stop
from localmoe.engine.turns import Turns


class Passes:
    """Of which so many can be captured, each in `seconds`."""

    def __init__(self, left: int, seconds: float = 0.0) -> None:
        self.left, self.seconds = left, seconds
        self.asked: list[SamplingConfig | None] = []
        self.under_way = threading.Event()
        self.error: Exception | None = None

    def capture_ahead(self, sampling: SamplingConfig | None) -> bool:
        self.asked.append(sampling)
        if self.error is not None:
            raise self.error
        if not self.left:
            return False
        self.under_way.set()
        time.sleep(self.seconds)
        self.under_way.clear()
        self.left -= 1
        return True


def made(passes: Passes) -> tuple[Captures, threading.Lock]:
    busy = threading.Lock()
    return Captures(passes, busy, Turns()), busy  # type: ignore[arg-type]


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.002)


def test_all_passes_are_captured_for_the_newest_sampling_and_once_only() -> None:
    passes = Passes(3, seconds=0.01)
    captures, _ = made(passes)
    first, newest = SamplingConfig(), SamplingConfig(temperature=0.7)
    captures.begin(first)
    captures.begin(newest)
    wait_for(lambda: passes.asked and passes.asked[-1] == newest and not passes.left)
    asked = len(passes.asked)
    assert asked <= 6  # three, and a look by each call that found nothing
    passes.left = 1
    captures.begin(newest)
    wait_for(lambda: not passes.left)


def test_nothing_is_captured_while_the_engine_is_in_use_and_who_uses_it_waits_for_one_pass() -> None:
    passes = Passes(100, seconds=0.05)
    captures, busy = made(passes)
    captures.begin()
    assert passes.under_way.wait(10)
    with busy:
        captures.wait()
        left = passes.left
        assert not passes.under_way.is_set() and left >= 98
        assert not captures.ahead()
        time.sleep(0.15)
        assert passes.left == left, "a pass was captured beside an answer"
    assert captures.ahead() and passes.left == left - 1


def test_ram_is_filled_once_no_answer_is_written_and_not_of_a_closed_engine() -> None:
    filled: list[int] = []
    busy = threading.Lock()
    captures = Captures(Passes(0), busy, Turns(), lambda: filled.append(1))  # type: ignore[arg-type]
    captures.begin()
    with busy:
        captures.begin()
    captures.begin()
    captures.close()
    captures.begin()
    assert len(filled) == 2


def test_a_closed_engine_captures_nothing_more() -> None:
    passes = Passes(100, seconds=0.05)
    captures, _ = made(passes)
    captures.begin()
    assert passes.under_way.wait(10)
    captures.close()
    left = passes.left
    assert not passes.under_way.is_set() and left >= 98 and not captures.ahead()
    captures.begin()
    time.sleep(0.1)
    assert passes.left == left


def test_background_work_gives_way_to_a_capture() -> None:
    passes, turns, cancel = Passes(1), Turns(), threading.Event()
    captures = Captures(passes, threading.Lock(), turns)  # type: ignore[arg-type]
    pieces = 0
    with turns.work(cancel):
        captures.begin()
        while passes.left:
            time.sleep(0.002)
            assert not passes.under_way.is_set()
            turns.pause(cancel)
            pieces += 1
            assert pieces < 5000
    assert pieces > 0


def test_who_uses_the_engine_does_not_wait_for_background_work_that_a_capture_waits_for() -> None:
    passes, turns, cancel, busy = Passes(1), Turns(), threading.Event(), threading.Lock()
    captures = Captures(passes, busy, turns)  # type: ignore[arg-type]
    with turns.work(cancel):
        captures.begin()
        wait_for(lambda: turns._answers)
        with busy:
            captures.wait()  # memory is divided anew, say
        captures.close()
        assert passes.left == 1 and not passes.asked
    wait_for(lambda: not turns._answers)
    assert not passes.asked, "it was closed before it had its turn"


def test_a_build_that_is_cancelled_while_a_pass_is_captured_ends_after_that_pass() -> None:
    """It gives memory back then, under the pass's feet."""
    passes, turns, busy, cancel = Passes(1, seconds=0.2), Turns(), threading.Lock(), threading.Event()
    captures = Captures(passes, busy, turns)  # type: ignore[arg-type]
    stop = _Stop(threading.Event(), cancel, captures.in_use)
    with turns.work(stop):
        captures.begin()
        wait_for(lambda: turns._answers)
        cancel.set()
        assert not stop.is_set()
        turns.pause(stop)
        assert not passes.under_way.is_set() and not passes.left, "the capture came first"
        assert turns._working, "and the build has its turn again"
    wait_for(lambda: not captures.in_use())
    assert stop.is_set()


def test_memory_that_others_took_is_told_and_the_next_time_it_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    passes = Passes(1)
    passes.error = torch.OutOfMemoryError("none left")
    captures, _ = made(passes)
    with caplog.at_level("WARNING"):
        captures.begin()
        wait_for(lambda: caplog.records)
    assert "memory" in caplog.records[0].message and passes.left == 1
    passes.error = None
    captures.begin()
    wait_for(lambda: not passes.left)


def test_any_other_error_is_told_as_of_any_thread_and_ends_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    passes = Passes(1)
    passes.error = RuntimeError("broken")
    captures, _ = made(passes)
    captures.begin()
    wait_for(lambda: told)
    assert told[0].exc_value is passes.error
    passes.error = None
    captures.begin()
    time.sleep(0.05)
    assert passes.left == 1


def _no_thread(*_: object, **__: object) -> int:
    raise RuntimeError("can't start new thread")


def _thread_that_never_begins(*_: object, **__: object) -> int:
    return 0


@pytest.mark.parametrize("start", [_no_thread, _thread_that_never_begins])
def test_where_no_thread_can_begin_nobody_is_held_up_and_the_next_time_it_is_tried_again(
    start: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, go = Passes(2), threading.Event()
    captures, _ = made(passes)
    asked: list[Exception | None] = []

    def ask() -> None:
        go.wait(10)
        try:
            captures.begin()
        except Exception as error:
            asked.append(error)
        else:
            asked.append(None)

    caller = threading.Thread(target=ask, daemon=True)
    caller.start()
    with monkeypatch.context() as patch:
        for module in (threading, threads):  # by whatever way it would begin
            for name in ("_start_new_thread", "_start_joinable_thread", "start_new_thread"):
                patch.setattr(module, name, start, raising=False)
        go.set()
        caller.join(1)
    assert asked == [None] and passes.left == 2
    captures.begin()
    wait_for(lambda: not passes.left)


def test_slots_are_filled_once_all_passes_are_captured(caplog: pytest.LogCaptureFixture) -> None:
    passes, busy = Passes(2), threading.Lock()
    filled: list[int] = []

    def fill() -> bool:
        filled.append(passes.left)
        if len(filled) == 4:
            raise DiskError("The disk is gone.")
        return len(filled) < 3

    captures = Captures(passes, busy, Turns(), fill_slots=fill)  # type: ignore[arg-type]
    captures.begin()
    wait_for(lambda: len(filled) == 3)
    assert filled == [0, 0, 0]
    wait_for(lambda: not captures._runs)
    captures.begin()
    wait_for(lambda: "The disk is gone." in caplog.text)
    wait_for(lambda: not captures._runs)
    captures.begin()  # and it goes on
    wait_for(lambda: len(filled) == 5)
