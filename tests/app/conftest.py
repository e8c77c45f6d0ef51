"""Fixtures of the page's tests: a service on the fake engine, and the app as a process of its own."""

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
from typing import TYPE_CHECKING, Any

import pytest
from fake_engine import FakeLoader

from app.gradio_import import import_gradio
from app.service import ChatService

if TYPE_CHECKING:  # it imports what stands here
    from browser import PageDriver

import_gradio()  # before a test does, in half of the time
ROOT = Path(__file__).parent.parent.parent
FAKE = (str(Path(__file__).with_name("serve_fake.py")),)
REAL = ("-m", "app")


def wait_for(condition: Callable[[], object], timeout_s: float = 5.0, what: str = "condition") -> None:
    """Until the condition holds; fails after the time is up."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.005
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain: {what}"
        time.sleep(pause_s)
        pause_s = min(0.08, 1.3 * pause_s)  # looking takes time from what is waited for


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader(step_s=0.005)


@pytest.fixture
def service(tmp_path: Path, loader: FakeLoader) -> Iterator[ChatService]:
    """A service whose model is loaded."""
    made = ChatService(tmp_path, loader, lambda: [("demo", "demo")])
    made.start()
    wait_for(lambda: made.holder.status().phase == "ready", what="the fake model")
    yield made
    made.close()


@dataclass
class Server:
    """A running app."""

    process: subprocess.Popen[str]
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
    command = [sys.executable, *program, "--no-browser", "--port", "0", *options]
    log = home.parent / f"{home.name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output, text=True)
        state = home / "run" / "server.json"
        try:
            wait_for(lambda: state.exists() or process.poll() is not None, 60, "the state file")
            assert process.poll() is None, log.read_text()
            server = Server(process, home, int(json.loads(state.read_text())["port"]))
            wait_for(lambda: _answers(server), 60, "an answer on the port")
            yield server
        finally:
            process.terminate()
            process.wait(timeout=30)


@dataclass(frozen=True)
class AppStart:
    """How a module's app is started: the program, its options and environment, what is put into its home
    before; how long the model may take (0: nobody waits for it); where the browser's other requests go."""

    program: tuple[str, ...] = FAKE
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], None] = lambda home: None
    ready_s: float = 60.0
    proxy: str | None = None


@pytest.fixture(scope="module")
def app_start() -> AppStart:
    """A module that starts its app in another way has a fixture of this name."""
    return AppStart()


@pytest.fixture(scope="module")
def server(app_start: AppStart, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The module's app."""
    home = tmp_path_factory.mktemp("app") / "home"
    app_start.prepare(home)
    with running_app(home, app_start.program, *app_start.options, **app_start.environment) as made:
        if app_start.ready_s:
            made.wait("ready", app_start.ready_s)
        yield made


@pytest.fixture(scope="module")
def playwright() -> Iterator[Any]:
    """One a module: two cannot run side by side, and while one runs, nothing else may run an event loop."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as made:
        yield made


@pytest.fixture(scope="module")
def browser(playwright: Any) -> Iterator[Any]:
    """The module's browser."""
    from browser import open_browser

    with open_browser(playwright) as made:
        yield made


@pytest.fixture(scope="module")
def page(server: Server, browser: Any, app_start: AppStart) -> Iterator[PageDriver]:
    """The module's one open page, as the last test left it."""
    from browser import PageDriver

    made = PageDriver.open(browser, server.url, app_start.proxy)
    yield made
    made.close()


@pytest.fixture
def on_a_new_chat(page: PageDriver) -> None:
    """The page, at its usual size."""
    page.start_again()


def _answers(server: Server) -> bool:
    try:
        server.health()
    except OSError:
        return False
    return True
