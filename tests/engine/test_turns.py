"""Answers and background work exclude each other, and answers go first."""

from __future__ import annotations

import signal
import sys
import threading
import time

import pytest

from localmoe.engine.turns import Turns


def start(run: object) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_an_answer_waits_for_the_piece_of_work_and_the_work_for_the_answer() -> None:
    turns, cancel, order = Turns(), threading.Event(), []
    working, asked, answered = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        with turns.work(cancel):
            order.append("first piece")
            working.set()
            asked.wait(5)
            time.sleep(0.05)  # the answer wants its turn now
            order.append("end of the first piece")
            turns.pause(cancel)
            order.append("second piece")

    def answer() -> None:
        asked.set()
        with turns.answer():
            order.append("answer")
            time.sleep(0.05)
            order.append("end of the answer")
        answered.set()

    worker = start(work)
    assert working.wait(5)
    start(answer)
    worker.join(5)
    assert answered.wait(5)
    assert order == ["first piece", "end of the first piece", "answer", "end of the answer", "second piece"]


def test_without_answers_a_pause_is_none() -> None:
    turns, cancel = Turns(), threading.Event()
    with turns.work(cancel):
        for _ in range(100):
            turns.pause(cancel)
    with turns.answer():
        pass


def test_work_begins_after_all_answers_and_cancelling_ends_the_wait() -> None:
    turns, cancel, begun = Turns(), threading.Event(), threading.Event()

    def work() -> None:
        with turns.work(cancel):
            begun.set()

    with turns.answer(), turns.answer():
        worker = start(work)
        assert not begun.wait(0.1)
        cancel.set()
        turns.wake()
        assert begun.wait(5)
        worker.join(5)
        with turns.answer():  # work that was cancelled holds up nobody
            pass


def test_an_answer_that_breaks_gives_its_turn_back() -> None:
    turns, cancel = Turns(), threading.Event()
    try:
        with turns.answer():
            raise RuntimeError
    except RuntimeError:
        pass
    done = threading.Event()

    def work() -> None:
        with turns.work(cancel):
            done.set()

    start(work)
    assert done.wait(5)


@pytest.mark.skipif(sys.platform == "win32", reason="a signal goes to no thread of one's choice there")
def test_work_goes_on_after_an_answer_that_was_interrupted_while_it_waited() -> None:
    turns, cancel, working, interrupted = Turns(), threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        with turns.work(cancel):
            working.set()
            time.sleep(0.05)  # the answer waits by now
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert interrupted.wait(5)
            turns.pause(cancel)

    worker = start(work)
    with pytest.raises(KeyboardInterrupt):
        assert working.wait(5)
        with turns.answer():
            pass
    interrupted.set()
    worker.join(5)
    assert not worker.is_alive()
    with turns.answer():
        pass
