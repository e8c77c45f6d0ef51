"""Fake apps as forks of one process that has imported Gradio and the engine, which costs each that does it
seconds. That process is this file as a program: asked through `start_fork`, it starts apps and says how they
ended. Knows nothing of what the apps are asked."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO


class ForkedApp:
    """As much of `subprocess.Popen` as the tests use."""

    def __init__(self, parent: _Parent, pid: int) -> None:
        self._parent, self.pid = parent, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._parent.ask({"ended": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class _Parent:
    """The process whose forks they are, seen from the tests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        root = str(Path(__file__).parents[2])
        env = {**os.environ, "PYTHONPATH": root, "GRADIO_ANALYTICS_ENABLED": "False"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self._end)

    def ask(self, request: dict[str, Any]) -> Any:
        asked, answered = self._process.stdin, self._process.stdout
        assert asked is not None and answered is not None
        with self._lock:
            asked.write(json.dumps(request) + "\n")
            asked.flush()
            answer = answered.readline()
        assert answer, f"the parent of the apps has ended: {self._process.wait(10)}"
        return json.loads(answer)

    def _end(self) -> None:
        with self._process:  # closes its input
            pass


_PARENTS: list[_Parent] = []


def start_fork(options: list[str], environment: dict[str, str], folder: Path, log: Path) -> ForkedApp:
    """`python serve_fake.py options` in this folder; what it prints goes into the log."""
    if not _PARENTS:
        _PARENTS.append(_Parent())
    request = {"options": options, "environment": environment, "folder": str(folder), "log": str(log)}
    return ForkedApp(_PARENTS[0], _PARENTS[0].ask(request))


# --- in the process of its own


def _import_all() -> None:
    from app.gradio_import import import_gradio

    import_gradio()
    import serve_fake  # noqa: F401
    import uvicorn.lifespan.on
    import uvicorn.protocols.http.h11_impl  # noqa: F401

    import app.server  # noqa: F401
    from localmoe.engine import import_all

    import_all()
    threads = threading.active_count()
    assert threads == 1, f"{threads} threads run: a fork has none of the others, and their locks"


def _exit_code(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _next_app(requests: TextIO, answers: int) -> list[str] | None:
    """Serves the tests; returns the options in each fork, and None where no test is left."""
    running: set[int] = set()
    while line := requests.readline():
        request = json.loads(line)
        if "ended" in request:
            answer = _exit_code(request["ended"])
            running -= {request["ended"]} if answer is not None else set()
        elif (answer := os.fork()) == 0:
            requests.close()
            os.close(answers)
            _become(request)
            return list(request["options"])
        else:
            running.add(answer)
        os.write(answers, f"{json.dumps(answer)}\n".encode())
    for pid in running:  # of tests that were killed
        os.kill(pid, signal.SIGTERM)
    return None


def _become(request: dict[str, Any]) -> None:
    """Such a process as one of its own would be."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for opened, place in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(opened, place)
    os.close(nothing)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])


if __name__ == "__main__":
    asked, replies = os.fdopen(os.dup(0)), os.dup(1)  # not 0 and 1 themselves, which are those of the apps
    os.dup2(2, 1)
    _import_all()
    if (chosen := _next_app(asked, replies)) is not None:
        from serve_fake import serve_fake

        sys.exit(serve_fake(chosen))
