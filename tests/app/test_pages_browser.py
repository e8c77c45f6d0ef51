"""The page's Benchmark tab in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from browser import PageDriver, chromium_path, open_browser
from conftest import FAKE, Server, running_app, wait_for

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium_path() is None, reason="no Chromium or Chrome is installed"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_app(tmp_path_factory.mktemp("app") / "home", FAKE) as made:
        made.wait("ready")
        yield made


@pytest.fixture(scope="module")
def driver(server: Server, playwright: Any) -> Iterator[PageDriver]:
    with open_browser(playwright) as browser:
        made = PageDriver.open(browser, server.url)
        yield made
        made.close()


def test_a_benchmark_runs_survives_a_reload_and_is_shared(driver: PageDriver, server: Server) -> None:
    driver.open_tab("benchmark")
    driver.page.click("#lm-bench-run")
    driver.wait_text("#lm-bench-progress", "Measuring")
    driver.chat()
    driver.type("hello")
    driver.wait_text("#lm-notice", "A benchmark is running")
    driver.reload()
    driver.open_tab("benchmark")
    driver.page.click("#lm-bench-stop")
    driver.wait_text("#lm-bench-progress", "Stopped")
    driver.page.locator("#lm-bench-prompts input[type=number]").fill("1")
    driver.page.locator("#lm-bench-tokens input[type=number]").fill("6")
    driver.page.click("#lm-bench-run")
    driver.wait_text("#lm-bench-result", "All settings gave the same tokens.")
    assert "moe-speq, auto" in driver.text("#lm-bench-result table")
    with driver.page.expect_download() as download:
        driver.page.click("#lm-bench-result a[download$='.json']")
    with open(download.value.path(), encoding="utf-8") as file:
        saved = json.load(file)
    (kept,) = (server.home / "benchmarks").glob("*.json")
    assert saved == json.loads(kept.read_text()) and len(saved["rows"]) == 6
    driver.page.click("#lm-bench-predict")
    driver.wait_text("#lm-bench-result", "Predicted, not measured")
    driver.reload()
    driver.open_tab("benchmark")
    driver.wait_text("#lm-bench-result", "Predicted, not measured")
    driver.page.click("#lm-bench-delete")
    driver.wait_text("#lm-bench-result", "All settings gave the same tokens.")
    driver.page.click("#lm-bench-delete")
    wait_for(lambda: driver.text("#lm-bench-result") == "", 10, "no result")
