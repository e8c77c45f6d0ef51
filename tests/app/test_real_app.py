"""`python -m app` with the real engine and the embedded model, in a real browser, from start to end.

LOCALMOE_BROWSER_TEST=fake runs the same on the fake engine, to tell the page's faults from the engine's.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from app_process import FORKED, REAL, AppStart, Server, running_app, wait_for
from browser import PageDriver
from fake_engine import answer_to

from localmoe.core.units import parse_bytes

ON_FAKE = os.environ.get("LOCALMOE_BROWSER_TEST") == "fake"
LONG = "a long story about a fox" if ON_FAKE else "Tell me a story about a fox."
pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def app_start() -> AppStart:
    # A slow link: answers take long enough to be watched and stopped. It is labelled on the page.
    options = ("--model", "demo", "--emulated-link", "40MB/s")
    return AppStart(FORKED if ON_FAKE else REAL, options, ready_s=0)


def budget_of(page: PageDriver) -> int:
    return parse_bytes(page.figure("memory").split(" of ")[1])


def test_the_model_loads_while_the_page_is_there(page: PageDriver, server: Server) -> None:
    server.wait("ready", 120)
    page.wait_text("#lm-header", "ready")
    page.wait_text("#lm-header", "tiny demo model")
    assert page.figure("tokens_per_s") == "—"


def test_hello_is_answered_and_measured(page: PageDriver) -> None:
    page.send("hello")
    page.wait_idle()
    wait_for(lambda: "tok/s" in page.line(), 10)
    assert len(page.answer()) > 5
    assert "emulated link" in page.line() and "emulated link" in page.figure("link")
    assert float(page.figure("tokens_per_s").replace(",", "")) > 0
    for key in ("hit_rate", "acceptance", "expert_match"):
        assert page.figure(key).endswith(" %")


@pytest.mark.slow
def test_a_smaller_budget_keeps_fewer_experts(page: PageDriver) -> None:
    page.settings()
    page.wait_text("#lm-share", "% of the experts stay in emulated device memory")
    before = page.text("#lm-share").splitlines()[0]
    smaller = "24MiB" if ON_FAKE else f"{int(budget_of(page) * 0.75)}"
    page.fill("lm-budget", smaller)
    page.apply("the engine now uses")
    wait_for(lambda: page.text("#lm-share").splitlines()[0] != before, 10)
    wait_for(lambda: budget_of(page) == pytest.approx(parse_bytes(smaller), rel=0.01), 5, "the panel")
    page.fill("lm-budget", "1MiB")
    page.apply("too small")
    page.chat()


@pytest.mark.slow
def test_a_story_streams_moves_the_panel_and_stops(page: PageDriver) -> None:
    page.send(LONG)
    lengths, tokens = page.watch(lambda: (len(page.answer()), page.figure("new_tokens")), 4)
    assert lengths == sorted(lengths) and len(set(lengths)) >= 2 and len(set(tokens)) >= 2
    seconds = page.stop()
    print(f"stopped in {seconds:.2f} s")
    assert seconds < 1.5  # with the browser's own share, on a busy machine
    kept = page.answer()
    assert len(kept) >= lengths[-1] and "stopped" in page.line()


@pytest.mark.slow
def test_a_reload_finds_the_chat_again(page: PageDriver) -> None:
    questions, answer, titles = page.questions(), page.answer(), page.titles()
    assert questions and titles
    page.reload()
    page.wait_questions(questions)
    wait_for(lambda: page.answer() == answer, 10, "the same answer")
    assert page.titles() == titles


@pytest.mark.slow
def test_real_answers_have_versions_go_on_and_show_what_the_draft_wrote(
    page: PageDriver, server: Server
) -> None:
    server.wait("ready", 120)
    page.page.click("#lm-new")
    page.wait_questions([])
    page.send("who are you?")
    page.wait_idle()
    first = page.answer()
    page.retry()
    page.wait_idle()
    page.wait_text("#lm-turn .lm-branch", "2 / 2")
    page.press("Previous version", "#lm-turn .lm-branch[data-role=assistant]")
    page.wait_answer_is(first)
    page.edit_last("hello")
    page.wait_questions(["hello"])
    wait_for(lambda: page.answer() not in ("", first) and page.line() != "", 15, "an answer to it")
    page.send(LONG)
    page.wait_answer(60)
    page.stop()
    kept = page.answer()
    page.page.click("#lm-continue")
    page.wait_answer(len(kept) + 20)
    page.stop()
    assert page.answer().startswith(kept) and page.questions() == ["hello", LONG]
    page.settings()
    page.page.locator("#lm-tab-settings button:has-text('Advanced')").last.click()
    page.page.check("#lm-show-drafted input")
    page.wait_text("#lm-saved", "Saved")
    page.chat()
    wait_for(lambda: page.page.locator("#lm-turn .lm-tokens mark").count() > 1, 10, "drafted parts")
    page.settings()
    page.page.uncheck("#lm-show-drafted input")
    page.chat()


@pytest.mark.slow
def test_the_real_engine_is_looked_into_and_measured(page: PageDriver, tmp_path: Path) -> None:
    if not ON_FAKE:
        canvas = page.page.locator("[data-map]")
        assert (canvas.get_attribute("width"), canvas.get_attribute("height")) == ("16", "6")
    page.page.click("[data-timeline] summary")
    page.send("hello")
    page.wait_text("[data-step-words]", "16-bit model")
    page.wait_idle()
    with page.page.expect_download() as saved:
        page.page.click("[data-card=timeline] a")
    events = json.loads(Path(saved.value.path()).read_text())["traceEvents"]
    assert {"X"} <= {event["ph"] for event in events}
    page.page.click("[data-timeline] summary")
    page.open_tab("benchmark")
    for name, number in (("prompts", "1"), ("tokens", "6")):
        page.page.locator(f"#lm-bench-{name} input[type=number]").fill(number)
    page.page.click("#lm-bench-run")
    wait_for(lambda: "All settings gave the same tokens." in page.text("#lm-bench-result"), 90, "a result")
    with page.page.expect_download() as saved:
        page.page.click("#lm-bench-result a[download$='.json']")
    rows = json.loads(Path(saved.value.path()).read_text())["rows"]
    assert len(rows) == 6 and all(row["tokens_per_s"] > 0 for row in rows)
    page.chat()
    with page.page.expect_download() as saved:
        page.page.click("#lm-files a:has-text('JSON')")
    assert "who are you?" in Path(saved.value.path()).read_text()


def test_it_ends_in_order_with_the_page_open_and_an_answer_running(page: PageDriver, server: Server) -> None:
    page.page.click("#lm-new")
    page.wait_questions([])
    known = set((server.home / "chats").glob("*.json"))
    page.send(LONG)
    page.wait_answer(10)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=20) == 0
    assert not (server.home / "run" / "server.json").exists()
    log = Path(f"{server.home}.log").read_text()
    assert "Traceback" not in log and "ERROR" not in log
    (new,) = set((server.home / "chats").glob("*.json")) - known
    assert '"cancelled"' in new.read_text()


@pytest.mark.slow
def test_a_kill_costs_two_seconds_of_text_at_most(browser: Any, tmp_path: Path) -> None:
    """On the fake engine, whose text is known and long."""
    home, question = tmp_path / "home", "tell me a long story"
    with running_app(home, FORKED) as app:
        page = PageDriver.open(browser, app.url)
        page.send(question)
        page.wait_answer(100)
        seen = page.answer()
        page.page.wait_for_timeout(2000)
        assert len(page.answer()) > len(seen) and page.page.query_selector("#lm-stop") is not None
        app.process.send_signal(signal.SIGKILL)
        app.process.wait()
        page.page.context.close()
    (home / "run" / "server.json").unlink()  # it says where the killed one was
    with running_app(home, FORKED) as app:
        page = PageDriver.open(browser, app.url)
        page.wait_questions([question])
        wait_for(lambda: page.answer() != "", 10, "what was kept")
        assert page.answer().startswith(seen) and answer_to("long").startswith(page.answer())
        page.page.context.close()
