"""Ctrl+C in the middle of work that must not end there."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from localmoe.core.uninterrupted import Monitor, ended_at_once, uninterrupted


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["default", "ignored"])
def handler(request: pytest.FixtureRequest) -> Any:
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


def test_it_is_heeded_when_the_block_has_ended(handler: Any) -> None:
    done = []
    expected: type[BaseException] = KeyboardInterrupt if callable(handler) else RuntimeError
    with pytest.raises(expected):
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")
        done.append("what follows")
        raise RuntimeError("nobody was interrupted")
    assert done == (["all of it"] if callable(handler) else ["all of it", "what follows"])
    assert signal.getsignal(signal.SIGINT) == handler


def test_whoever_handles_it_is_asked_once_with_what_python_gives() -> None:
    asked: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda *given: asked.append(given))
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert not asked
        assert len(asked) == 1 and asked[0][0] == signal.SIGINT
        signal.raise_signal(signal.SIGINT)
        assert len(asked) == 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_within_comes_out_where_nobody_interrupts() -> None:
    with pytest.raises(ZeroDivisionError), uninterrupted():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_may_use_it() -> None:
    """Only the main thread may say who handles signals."""
    failures: list[BaseException] = []

    def run(body: Callable[[], object]) -> None:
        try:
            with uninterrupted():
                body()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, args=(lambda: None,))
    thread.start()
    thread.join()
    assert not failures


SWALLOWS = """
import signal, sys

class Library:
    def find_spec(self, name, *_):
        if name == {module!r}:
            try:
                signal.raise_signal(signal.SIGINT)
            except BaseException:
                pass
            print("the import goes on", flush=True)

sys.meta_path.insert(0, Library())
from {where} import {start}
sys.exit({start}(sys.argv[1:]))
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("where", "start", "module", "arguments", "code"),
    [
        (
            "localmoe.cli.main",
            "main",
            "torch",
            ("generate", "demo", "--prompt", "a", "--max-new-tokens", "1"),
            130,
        ),
        ("localmoe.cli.main", "main", "transformers", ("pull", "org/moe"), 130),
        ("app.__main__", "start", "app.main", ("--help",), 0),
    ],
)
def test_while_libraries_are_imported_it_ends_the_program_whatever_they_swallow(
    where: str, start: str, module: str, arguments: tuple[str, ...], code: int
) -> None:
    script = SWALLOWS.format(where=where, start=start, module=module)
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.parametrize("before", [signal.SIG_IGN, lambda number, frame: None], ids=["ignored", "handled"])
def test_who_handles_it_otherwise_goes_on_to(before: Any) -> None:
    usual = signal.signal(signal.SIGINT, before)
    try:
        with ended_at_once():
            assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, usual)


def test_afterwards_it_is_pythons_exception_again() -> None:
    with ended_at_once():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_leaves_no_monitor_locked() -> None:
    """Python calls the handler where it begins to run one of its own functions; of threading.Condition's
    these are `__enter__` and `__exit__`."""
    monitor, left = Monitor(), 0

    def interrupt(_frame: FrameType, event: str, _given: object) -> None:
        if event == "call" and left == 0:
            raise KeyboardInterrupt

    for left in (0, 1):
        sys.setprofile(interrupt)
        try:
            with monitor:
                left -= 1
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        with ThreadPoolExecutor(1) as other:
            assert other.submit(monitor.acquire, blocking=False).result(), "it is locked for ever"
            other.submit(monitor.release).result()


def test_whoever_waits_for_a_monitor_is_woken() -> None:
    monitor, done = Monitor(), list[int]()

    def work() -> None:
        with monitor:
            done.append(1)
            monitor.notify_all()

    with ThreadPoolExecutor(1) as other, monitor, monitor:
        assert not monitor.wait(0.01)
        other.submit(work)
        assert monitor.wait_for(lambda: bool(done), 10)
