"""One app at a time on a home: who is refused, what it is told, and when the home is free again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from app_process import ROOT, wait_for

from app.address import running_page, state_file
from app.home_lock import HomeInUseError, home_lock
from app.main import main

HOLDER = """
import sys, time
from contextlib import ExitStack
from pathlib import Path
from app.address import state_file
from app.home_lock import home_lock
home = Path(sys.argv[1])
with home_lock(home), ExitStack() as held:
    if sys.argv[2] != "0":
        held.enter_context(state_file(home, "127.0.0.1", int(sys.argv[2])))
    print("held", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def holder(home: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """A process that has the home; port 0: it does not say yet where its page will be. Killed at the end."""
    command = [sys.executable, "-c", HOLDER, str(home), str(port)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()
            process.wait()


def test_a_second_app_names_the_page_of_the_first_and_leaves_its_files_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("LOCALMOE_HOME", str(home))
    with holder(home, 7861):
        (home / "settings.json").write_text("{")  # which whoever reads it would put aside
        before = sorted(path.name for path in home.rglob("*"))
        assert main(["--no-browser", "--port", "0"]) == 1
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        assert "already running at http://127.0.0.1:7861/" in printed.err
        assert str(home) in printed.err and "LOCALMOE_HOME" in printed.err
        assert sorted(path.name for path in home.rglob("*")) == before


def test_a_killed_app_leaves_its_home_free_and_is_named_no_more(tmp_path: Path) -> None:
    with holder(tmp_path, 7861) as process:
        assert running_page(tmp_path) == "http://127.0.0.1:7861/"
        process.send_signal(signal.SIGKILL if os.name != "nt" else signal.SIGTERM)
        process.wait()
        assert (tmp_path / "run" / "server.json").exists() and running_page(tmp_path) is None
        with home_lock(tmp_path):
            pass
    with holder(tmp_path, 0), pytest.raises(HomeInUseError, match=r"already starting .* wait for its page"):
        home_lock(tmp_path).__enter__()


def test_two_that_start_at_once_are_one(tmp_path: Path) -> None:
    """In this process, where a lock of its own is in the way of a second one too."""
    held, refused, go = [], [], threading.Event()
    done = threading.Event()

    def start() -> None:
        go.wait()
        try:
            with home_lock(tmp_path):
                held.append(1)
                done.wait(5)
        except HomeInUseError:
            refused.append(1)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    go.set()
    wait_for(lambda: len(held) + len(refused) == 4)
    done.set()
    for thread in threads:
        thread.join()
    assert (len(held), len(refused)) == (1, 3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "state",
    ["", "[]", "{", "[" * 100_000, '{"pid": 1, "host": "127.0.0.1", "port": 7860}',
     '{"mark": "1", "host": "x", "port": 1}',
     '{"mark": "a-b", "host": "x", "port": 1}', '{"mark": 7, "host": "x", "port": 1}'],
)  # fmt: skip
def test_a_note_of_a_running_app_that_makes_no_sense_is_ignored(tmp_path: Path, state: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "server.json").write_text(state)
    assert running_page(tmp_path) is None


def test_the_note_of_a_process_that_had_our_number_before_us_is_ignored(tmp_path: Path) -> None:
    with state_file(tmp_path, "::1", 7862):
        path = tmp_path / "run" / "server.json"
        assert running_page(tmp_path) == "http://[::1]:7862/"
        state = json.loads(path.read_text())
        path.write_text(json.dumps({**state, "port": float("inf")}))
        assert running_page(tmp_path) is None
        path.write_text(json.dumps({**state, "mark": f"{os.getpid()}-1"}))
        assert running_page(tmp_path) is None


def test_a_full_disk_refuses_the_start_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path))

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["--no-browser", "--port", "0"]) == 1
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and "make room there, or set LOCALMOE_HOME" in printed.err
    monkeypatch.undo()
    with home_lock(tmp_path):  # it let go of it
        pass
