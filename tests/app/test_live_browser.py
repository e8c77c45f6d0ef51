"""The live map, the step timeline and the Logs tab in a real browser on the fake engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from app_process import wait_for
from browser import PageDriver
from fake_engine import EXPERTS, LAYERS

pytestmark = [pytest.mark.browser, pytest.mark.slow]
PIXEL = """([layer, expert]) => [...document.querySelector('[data-map]').getContext('2d')
    .getImageData(expert, layer, 1, 1).data]"""
CELL = "[data-map-cell]"


def asked(page: PageDriver) -> int:
    page.evaluate("0")  # so that what was answered meanwhile is counted
    return sum("/live?" in url for url in page.answered)


def test_the_map_shows_every_expert_to_the_eye_the_pointer_and_the_screen_reader(page: PageDriver) -> None:
    canvas = page.page.locator("[data-map]")
    wait_for(lambda: canvas.get_attribute("width") == str(EXPERTS), 10, "the map")
    assert canvas.get_attribute("height") == str(LAYERS)
    hot, warm, cold, away = (page.page.evaluate(PIXEL, [3, e]) for e in (0, 1, 2, 3))
    assert hot[3] == 255 and 170 < warm[3] < 200 and 40 < cold[3] < 70 and away[3] == 0
    assert max(abs(a - b) for a, b in zip(hot[:3], cold[:3], strict=True)) < 8 and hot[0] != warm[0]
    told = canvas.get_attribute("aria-label")
    assert told.startswith("592 of 1,184 experts are in slots. Asked for most: layer 0 expert 0 (100 %)")
    box = canvas.bounding_box()
    page.page.mouse.move(
        box["x"] + box["width"] * 1.5 / EXPERTS, box["y"] + box["height"] * (LAYERS - 0.5) / LAYERS
    )
    page.wait_text(CELL, "layer 7, expert 1: in RAM only, asked for in 50 % of the recent passes")
    canvas.focus()
    page.page.keyboard.press("ArrowLeft")
    page.page.keyboard.press("ArrowDown")
    page.wait_text(CELL, "layer 7, expert 0: in a slot, asked for in 100 % of the recent passes")


def test_a_step_is_recorded_while_its_drawing_is_open_and_can_be_saved(page: PageDriver) -> None:
    page.page.click("[data-timeline] summary")
    page.wait_text("[data-step-words]", "Recording")
    page.send("tell me a long story")
    page.wait_text("[data-step-words]", "1 copies, 39.1 KiB")
    lanes = page.evaluate("() => [...document.querySelectorAll('.lm-timeline text')].map(e => e.textContent)")
    assert lanes == ["draft", "16-bit model", "copies", "host"][: len(lanes)] and len(lanes) >= 3
    assert "token 1: " in page.evaluate("document.querySelector('rect.tl-draft title').textContent")
    wait_for(lambda: "of 2.0 GB/s" in page.figure("link_now"), 10, "the link's use")
    with page.page.expect_download() as saved:
        page.page.click("[data-card=timeline] a")
    events = json.loads(Path(saved.value.path()).read_text())["traceEvents"]
    assert any(event["name"] == "expert 1/2" for event in events)
    page.stop()
    page.page.click("[data-timeline] summary")
    assert page.figure("reuse") == "" or "at best 75 %" in page.figure("reuse")
    wait_for(lambda: page.figure("reuse") == "60 %, at best 75 %", 10, "what could be reused")


def test_nothing_is_asked_while_the_panel_is_out_of_sight(page: PageDriver) -> None:
    page.page.click("[data-timeline] summary")  # with it, the page asks every second
    page.page.set_viewport_size({"width": 600, "height": 800})
    page.page.wait_for_timeout(600)
    before = asked(page)
    page.page.wait_for_timeout(1700)
    assert asked(page) == before
    page.toggle("live")
    wait_for(lambda: asked(page) > before, 5, "a question once it is in sight")
    page.page.set_viewport_size({"width": 1400, "height": 900})
    page.page.click("[data-timeline] summary")


def test_the_panel_of_a_wide_screen_can_be_put_away(page: PageDriver) -> None:
    def panel_told() -> int:
        page.evaluate("0")
        return sum("/now?" in url and "panel=hidden" not in url for url in page.answered)

    def shown() -> bool:
        return bool(page.page.locator("#lm-live").is_visible())

    button = page.page.locator("[data-toggle=live]")
    width = page.page.locator("#lm-main").bounding_box()["width"]
    assert shown() and button.get_attribute("aria-expanded") == "true"
    page.toggle("live")
    assert not shown() and button.get_attribute("aria-expanded") == "false"
    assert page.page.locator("#lm-main").bounding_box()["width"] > width + 300
    page.page.wait_for_timeout(300)
    maps, panels = asked(page), panel_told()
    page.send("what a panel shows is not asked for while it is away")
    page.wait_idle()
    page.page.wait_for_timeout(1000)
    assert (asked(page), panel_told()) == (maps, panels)
    page.reload()
    wait_for(lambda: button.get_attribute("aria-expanded") == "false", 10, "the page")
    assert not shown()
    page.toggle("live")
    assert shown()
    wait_for(lambda: asked(page) > maps and page.figure("new_tokens") not in ("", "—"), 5, "what it shows")


def test_questions_stay_in_one_row_however_often_one_is_wanted_at_once(page: PageDriver) -> None:
    page.evaluate("""() => {
        const usual = window.fetch;
        window.askedLive = 0;
        window.fetch = async (...given) => {
            if (String(given[0]).startsWith('/live?')) {
                window.askedLive += 1;
                await new Promise((done) => setTimeout(done, 300));
            }
            return usual(...given);
        };
    }""")
    for _ in range(8):  # some while an answer is on its way
        page.evaluate("() => document.dispatchEvent(new Event('localmoe-drawers'))")
        page.page.wait_for_timeout(130)
    wait_for(lambda: page.evaluate("() => window.askedLive") > 0, 5, "a question")
    page.page.wait_for_timeout(500)
    page.evaluate("() => { window.askedLive = 0; }")
    page.page.wait_for_timeout(4000)
    assert 0 < page.evaluate("() => window.askedLive") <= 2, "one every three seconds"


def test_every_number_of_the_panel_says_what_it_means(page: PageDriver) -> None:
    script = """() => [...document.querySelectorAll('#lm-live [data-key]')].filter((e) => {
        const group = e.closest('[role=group]');
        return e.dataset.key !== 'improvement' && !(group && group.title && group.ariaLabel);
    }).map((e) => e.dataset.key)"""
    assert page.evaluate(script) == []
    assert page.unlabelled() == []
    titles = page.evaluate("() => [...document.querySelectorAll('#lm-live .lm-legend li')].map(e => e.title)")
    assert sum(bool(title) for title in titles) >= 7


def test_the_log_is_shown_filtered_copied_and_saved_and_says_nothing_of_the_chat(page: PageDriver) -> None:
    page.page.click("#lm-tab-logs-button")
    page.wait_text("#lm-logs", "loading demo")
    assert page.unlabelled() == []
    page.page.select_option("[data-log-level]", "error")
    assert page.text("[data-log-lines]") == ""
    page.page.select_option("[data-log-level]", "info")
    page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.page.click("[data-log-copy]")
    page.wait_text("[data-log-copy]", "Copied")
    assert "loading demo" in page.evaluate("navigator.clipboard.readText()")
    with page.page.expect_download() as saved:
        page.page.click("#lm-logs a")
    text = Path(saved.value.path()).read_text()
    assert "loading demo" in text and "fox" not in text and "story" not in text
    page.page.click("#lm-tab-chat-button")


def test_the_map_is_empty_where_no_model_is_loaded(page: PageDriver) -> None:
    page.settings()
    wait_for(lambda: page.page.evaluate(PIXEL, [3, 0])[3] == 255, 20, "the map")
    page.choose_model("missing")
    page.apply("")
    page.wait_text("#lm-header", "There is no model 'missing'")
    wait_for(lambda: page.page.evaluate(PIXEL, [3, 0])[3] == 0, 20, "an empty map")
