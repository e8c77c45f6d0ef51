"""A better draft that is built behind the page, in a real browser on the fake engine: the line appears,
moves, waits for answers, obeys its switch, and gives way to the new draft's name."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from app_process import AppStart, Server, wait_for
from browser import PageDriver

pytestmark = pytest.mark.browser
LINE = "#lm-live [data-key='improvement']"
NEWS = "#lm-news [role=status]"


@pytest.fixture(scope="module")
def hurry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While there is no such file, a build takes longer than these tests."""
    return tmp_path_factory.mktemp("hurry") / "now"


@pytest.fixture(scope="module")
def app_start(hurry: Path) -> AppStart:
    return AppStart(
        options=("--better-draft", "off"),
        environment={"FAKE_IMPROVE_S": "74", "FAKE_STEP_S": "0.02", "FAKE_IMPROVE_HURRY": str(hurry)},
    )


def finished(page: PageDriver) -> int:
    """Experts that the line speaks of."""
    found = re.search(r": ([\d,]+) of 1,184 experts", page.text(LINE))
    return int(found.group(1).replace(",", "")) if found else 0


def switch(page: PageDriver, on: bool, expected: str) -> None:
    page.settings()
    page.page.set_checked("#lm-better-draft input", on)
    page.apply(expected)


def kept(server: Server) -> str:
    return str(json.loads((server.home / "settings.json").read_text())["load"]["better_draft"])


@pytest.mark.slow
def test_without_a_build_nothing_is_shown(page: PageDriver) -> None:
    page.settings()
    wait_for(lambda: not page.page.is_checked("#lm-better-draft input"), 5, "the switch as the option said")
    assert page.text(LINE) == page.text(NEWS) == "" and "Better draft" not in page.text("#lm-share")
    assert page.unlabelled() == []


@pytest.mark.slow
def test_the_line_appears_moves_and_is_read_out_now_and_then(page: PageDriver, server: Server) -> None:
    switch(page, True, "pauses between answers")
    assert kept(server) == "on"
    page.wait_text(LINE, "output error 62 % of rounding to nearest")
    assert page.visible(LINE) and "pauses while an answer is written" in page.text(LINE)
    first = finished(page)
    wait_for(lambda: finished(page) > first, 5, "a later report")
    assert "Building the 4-bit GPTQ draft" in page.text("#lm-share")
    wait_for(
        lambda: (
            "A better draft is being built" in page.evaluate(f"document.querySelector({NEWS!r}).textContent")
        )
    )


@pytest.mark.slow
def test_it_waits_for_an_answer_and_goes_on(page: PageDriver) -> None:
    page.chat()
    page.send("tell me a long story")
    page.wait_text(LINE, "Paused while the answer is written.")
    time.sleep(1.5)  # the piece under way ends
    before = finished(page)
    time.sleep(1.5)
    assert finished(page) == before > 0
    page.stop()
    wait_for(lambda: finished(page) > before, 5, "the build going on")


@pytest.mark.slow
def test_the_switch_takes_the_line_away_at_once(page: PageDriver, server: Server) -> None:
    switch(page, False, "no better draft is built")
    wait_for(lambda: page.text(LINE) == "", 3, "no line")
    page.wait_text("#lm-share", "INT4 RTN")
    assert kept(server) == "off"


@pytest.mark.slow
def test_the_line_gives_way_to_the_new_drafts_name(page: PageDriver, hurry: Path) -> None:
    switch(page, True, "pauses between answers")
    page.wait_text(LINE, "Better draft")
    hurry.touch()
    page.wait_text("#lm-share", "INT4 GPTQ, group 128")
    wait_for(lambda: page.text(LINE) == "", 3, "no line")
    assert "Better draft" not in page.text("#lm-share") and "ready" in page.text("#lm-header")
    switch(page, False, "no better draft is built")
    switch(page, True, "nothing to build for this model now: the draft is INT4 GPTQ, group 128")
