"""Fixtures of the page's tests: a service on the fake engine, and the app as a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from app_process import AppStart, Server, running_app, wait_for
from fake_engine import FakeLoader

from app.gradio_import import import_gradio
from app.service import ChatService

if TYPE_CHECKING:  # a page is opened by few tests
    from browser import PageDriver

import_gradio()  # before a test does, in half of the time


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
