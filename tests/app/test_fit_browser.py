"""Long and foreign texts, many chats and small windows, in a real browser on the fake engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from app_process import AppStart, wait_for
from browser import PageDriver

pytestmark = [pytest.mark.browser, pytest.mark.slow]
HEAD = "| expectations | satisfaction | communication | documentation |"
TABLE = f"{HEAD}\n|---|---|---|---|\n{HEAD}"
FORMULA = "$$" + " + ".join(f"x_{{{n}}}^{{{n}}}" for n in range(60)) + "$$"
ARABIC = "مرحبا بالعالم (مثال)."
LINES = """() => [...document.querySelectorAll('#lm-turn [data-testid=user] th')].map((cell) => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    return range.getClientRects().length;
})"""
CUT = """(selector) => [...document.querySelectorAll(`#lm-turn .user-row ${selector}`)].filter((part) =>
    part.scrollWidth > part.clientWidth && getComputedStyle(part).overflowX === 'auto').length"""
STOP = """() => {
    const paragraph = document.querySelector('#lm-turn [data-testid=user] p'), range = document.createRange();
    const text = document.createTreeWalker(paragraph, NodeFilter.SHOW_TEXT).nextNode();
    return [0, text.length - 1].map((place) => {
        range.setStart(text, place);
        range.setEnd(text, place + 1);
        return range.getBoundingClientRect().left;
    });
}"""
BOX = "(selector) => document.querySelector(selector).getBoundingClientRect().toJSON()"


def many_chats(home: Path) -> None:
    (home / "chats").mkdir(parents=True)
    for number in range(60):
        chat = {
            "schema": 2, "id": f"{number:032x}", "title": f"topic-{number}x", "created": 1.0, "updated": 1.0,
            "shown": -1, "messages": [],
        }  # fmt: skip
        (home / "chats" / f"{number:032x}.json").write_text(json.dumps(chat))


@pytest.fixture(scope="module")
def app_start() -> AppStart:
    return AppStart(prepare=many_chats)


@pytest.fixture(autouse=True)
def on_a_new_chat(page: PageDriver) -> None:
    page.start_again()


def box(page: PageDriver, selector: str) -> dict[str, float]:
    found: dict[str, float] = page.page.evaluate(BOX, selector)
    return found


def resize(page: PageDriver, width: int, height: int) -> None:
    page.page.set_viewport_size({"width": width, "height": height})
    page.page.wait_for_timeout(300)


def test_tables_and_formulas_that_are_too_wide_are_scrolled(page: PageDriver) -> None:
    page.send(f"{TABLE}\n\n{FORMULA}")
    page.wait_idle()
    resize(page, 390, 800)
    assert page.page.evaluate(LINES) == [1, 1, 1, 1]  # no word is broken
    assert page.page.evaluate(CUT, "table") == page.page.evaluate(CUT, ".katex-display") == 1


def test_arabic_runs_from_the_right(page: PageDriver) -> None:
    page.send(f"{ARABIC}\n\n{'a line in English ' * 10}")
    page.wait_idle()
    first, stop = page.page.evaluate(STOP)
    assert stop < first  # the full stop is left of all
    assert page.evaluate("getComputedStyle(document.querySelector('#lm-turn p')).textAlign") == "start"
    assert page.evaluate("getComputedStyle(document.querySelector('#lm-message textarea')).unicodeBidi") == (
        "plaintext"
    )


def test_a_short_question_is_edited_in_a_box_of_some_size(page: PageDriver) -> None:
    page.send("hi")
    page.wait_idle()
    page.page.click("#lm-turn button[aria-label='Edit']")
    page.page.wait_for_selector("#lm-turn textarea")
    assert box(page, "#lm-turn textarea")["width"] > 400 and box(page, "#lm-turn textarea")["height"] > 60
    page.press("Cancel", "#lm-turn")


@pytest.mark.parametrize(("width", "height"), [(1400, 900), (1100, 600)])
def test_many_chats_leave_export_and_import_in_sight(page: PageDriver, width: int, height: int) -> None:
    resize(page, width, height)
    files, chats = box(page, "#lm-files"), box(page, "#lm-chats")
    assert files["bottom"] <= height and chats["bottom"] <= files["top"]
    page.page.locator(".lm-open").last.scroll_into_view_if_needed()
    assert box(page, "#lm-files") == files and box(page, "#lm-new")["top"] > 0


def test_the_lines_above_the_tabs_fit_small_windows(page: PageDriver) -> None:
    resize(page, 1100, 600)
    assert box(page, ".lm-head")["height"] < 120
    assert box(page, ".lm-head .lm-muted")["right"] < box(page, ".lm-top")["left"]
    resize(page, 320, 560)
    assert box(page, "[data-toggle=live]")["right"] < 320


@pytest.mark.parametrize(("name", "first"), [("nav", "#lm-new"), ("live", ".lm-map")])
def test_a_drawer_takes_the_focus_and_gives_it_back(page: PageDriver, name: str, first: str) -> None:
    def focused(selector: str) -> Any:
        return page.page.evaluate("selector => document.activeElement.matches(selector)", selector)

    resize(page, 390, 800)
    page.page.focus(f"[data-toggle={name}]")
    page.page.keyboard.press("Enter")
    wait_for(lambda: focused(f"#lm-{name}"), 5, "the focus in the drawer")
    assert page.visible(f"#lm-{name}")  # by now it does not move any more
    page.page.keyboard.press("Tab")
    assert focused(first)
    page.page.keyboard.press("Escape")
    wait_for(lambda: focused(f"[data-toggle={name}]"), 5, "the focus on its button")


def test_ctrl_k_looks_for_a_chat_on_a_narrow_screen(page: PageDriver) -> None:
    resize(page, 390, 800)
    page.page.keyboard.press("Control+k")
    looking = "document.activeElement.closest('#lm-find') !== null"
    wait_for(lambda: page.evaluate(looking), 5, "the cursor in the box to search in")
    page.page.keyboard.type("topic-42")
    wait_for(lambda: page.titles() == ["topic-42x"], 10, "the chat")
    page.page.keyboard.press("Escape")
    wait_for(lambda: len(page.titles()) > 10, 10, "all chats")
    assert not page.visible("#lm-nav")


def test_a_benchmark_tab_without_results_shows_no_empty_box(page: PageDriver) -> None:
    page.open_tab("benchmark")
    page.page.wait_for_selector("#lm-bench-run")
    group = "document.querySelector('#lm-bench-result').closest('.lm-group')"
    assert page.evaluate(f"{group}.offsetHeight") == 0
