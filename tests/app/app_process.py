"""The app in a process of its own, for the page's tests."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from app_forks import ForkedApp, start_fork

ROOT = Path(__file__).parent.parent.parent
FAKE = (str(Path(__file__).with_name("serve_fake.py")),)
REAL = ("-m", "app")
# the fake one too, started in a hundredth of the time: for tests of the page, not of the process
FORKED = ("forked",) if sys.platform == "linux" else FAKE
# of the fake one: what fits is known, and a page that shows it asks no more
LOOKING = {"LOOK_AT_MACHINE": "1"}


def wait_for(condition: Callable[[], object], timeout_s: float = 15.0, what: str = "condition") -> None:
    """Until the condition holds; fails after the time is up."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.005
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain: {what}"
        time.sleep(pause_s)
        pause_s = min(0.08, 1.3 * pause_s)  # looking takes time from what is waited for


@dataclass
class Server:
    """A running app."""

    process: subprocess.Popen[str] | subprocess.Popen[bytes] | ForkedApp
    home: Path
    port: int

    def said(self) -> str:
        """What it has printed and logged."""
        files = [self.home.parent / f"{self.home.name}.log", *sorted((self.home / "logs").glob("*.log*"))]
        return "\n".join(path.read_text(errors="replace") for path in files)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def health(self) -> dict[str, str]:
        with urllib.request.urlopen(self.url + "health", timeout=5) as answer:
            found: dict[str, str] = json.load(answer)
            return found

    def wait(self, phase: str, timeout_s: float = 60.0) -> None:
        """Until the model is in this phase; says what the app has logged if it does not come."""
        try:
            wait_for(lambda: self.health()["status"] == phase, timeout_s, f"model {phase}")
        except AssertionError as error:
            raise AssertionError(f"{error}\nnow {self.health()}\n{self.said()}") from None


@contextlib.contextmanager
def running_app(home: Path, program: tuple[str, ...], *options: str, **environment: str) -> Iterator[Server]:
    """The app in a process of its own, on a free port; ended, not killed, afterwards."""
    env = {
        **os.environ,
        "LOCALMOE_HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "2",
        **environment,
    }
    arguments = ["--no-browser", "--port", "0", *options]
    log = home.parent / f"{home.name}.log"
    state = home / "run" / "server.json"
    process = _start(program, arguments, env, log)
    try:
        wait_for(lambda: state.exists() or process.poll() is not None, 60, "the state file")
        assert process.poll() is None, log.read_text()
        server = Server(process, home, int(json.loads(state.read_text())["port"]))
        wait_for(lambda: answers(server), 60, "an answer on the port")
        yield server
    finally:
        process.terminate()
        process.wait(timeout=30)


def _start(
    program: tuple[str, ...], arguments: list[str], env: dict[str, str], log: Path
) -> subprocess.Popen[str] | ForkedApp:
    if program == FORKED != FAKE:
        return start_fork(arguments, env, ROOT, log)
    with log.open("w") as output:
        command = [sys.executable, *program, *arguments]
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output, text=True)


@dataclass(frozen=True)
class AppStart:
    """How a module's app is started: the program, its options and environment, what is put into its home
    before; how long the model may take (0: nobody waits for it); where the browser's other requests go."""

    program: tuple[str, ...] = FORKED
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], None] = lambda home: None
    ready_s: float = 60.0
    proxy: str | None = None


def answers(server: Server) -> bool:
    try:
        server.health()
    except OSError:
        return False
    return True
