"""Presses in a real browser while the answer to an earlier one is still on its way: each counts, a double
click and Enter that is held down are one press, and what is typed meanwhile stays."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from app_process import FORKED, AppStart, Server, wait_for
from browser import PageDriver
from fake_engine import answer_to
from support.hub_server import HubServer, files_of, hub_server

pytestmark = [pytest.mark.browser, pytest.mark.slow]
MOE = "org/tiny-moe"
QUEUED = f"#lm-queue [data-model='{MOE}']"


@pytest.fixture(scope="module")
def hub(tiny16: Any) -> Iterator[HubServer]:
    with hub_server() as server:
        server.commit(MOE, files_of(tiny16("qwen2_moe")))
        server.rate = 1e4  # far from its end, whatever presses take
        yield server


@pytest.fixture(scope="module")
def app_start(hub: HubServer) -> AppStart:
    return AppStart(
        FORKED, environment={"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    )


@contextlib.contextmanager
def answer_held(page: PageDriver, part: str, event: str = "pointerup") -> Iterator[None]:
    """The server's answer to the first press of a button, or Enter, in a part of the page waits, and with it
    Gradio, until the block ends."""
    page.page.evaluate(
        """([part, event]) => {
        const real = window.fetch, held = new Promise((done) => { window.letGo = done; });
        let next = false;
        window.heldAnswers = 0;
        window.fetch = async (...asked) => {
            const mine = next && asked[1]?.method === 'POST';
            if (mine) next = false;
            const answer = await real(...asked);
            if (mine) {
                window.heldAnswers += 1;
                await held;
            }
            return answer;
        };
        window.restore = () => { window.fetch = real; };
        const here = document.querySelector(part);
        const begin = ({ key, target }) => { next = key === 'Enter' || Boolean(target.closest('button')); };
        here.addEventListener(event, begin, { capture: true, once: true });
    }""",
        [part, event],
    )
    try:
        yield
        assert page.evaluate("window.heldAnswers") == 1
    finally:
        page.evaluate("() => { window.restore(); window.letGo(); }")


def get_model(page: PageDriver) -> None:
    """Until something has arrived."""
    page.open_tab("models")
    page.fill("lm-query", "org/")
    page.page.click("#lm-search-button")
    page.page.click(f"#lm-results [data-model='{MOE}'] [data-act=get]")
    page.page.wait_for_selector(f"{QUEUED}[data-state=running]")
    page.page.wait_for_function(
        "(amount) => /[1-9][0-9.]* \\S+ of /.test(document.querySelector(amount)?.textContent ?? '')",
        arg=f"{QUEUED} .lm-amount",
    )


def cancel_model(page: PageDriver) -> None:
    """A press asks, and one within four seconds answers: on a busy machine it may take several."""

    def gone() -> bool:
        page.page.evaluate(
            "(cancel) => document.querySelector(cancel)?.click()", f"{QUEUED} [data-act=cancel]"
        )
        return page.page.locator(QUEUED).count() == 0

    wait_for(gone, 30, "the row to go")


def test_a_download_that_was_just_paused_is_resumed(page: PageDriver) -> None:
    get_model(page)
    with answer_held(page, "#lm-queue"):
        page.page.click(f"{QUEUED} [data-act=pause]")
        page.page.wait_for_selector(f"{QUEUED}[data-state=paused]")  # the timer shows it
        page.page.click(f"{QUEUED} [data-act=resume]")
        page.page.wait_for_selector(f"{QUEUED}[data-state=running]")
    cancel_model(page)


def test_a_double_click_is_one_press(page: PageDriver) -> None:
    get_model(page)
    page.page.dblclick(f"{QUEUED} [data-act=pause]")
    page.page.wait_for_selector(f"{QUEUED}[data-state=paused]")
    page.page.dblclick(f"{QUEUED} [data-act=cancel]")
    page.wait_text(QUEUED, "Delete what has arrived?")
    page.page.wait_for_timeout(1000)  # for several rounds of the timer
    assert page.page.locator(f"{QUEUED}[data-state=paused]").count() == 1
    cancel_model(page)


def amount(page: PageDriver) -> str:
    return page.text(f"{QUEUED} .lm-amount")


def test_a_question_stays_while_its_download_makes_progress(page: PageDriver) -> None:
    get_model(page)
    name = page.page.evaluate(
        """async (card) => {
        const part = (name) => document.querySelector(`${card} ${name}`);
        const before = part('.lm-amount').textContent, until = performance.now() + 20000;
        const waits = () => part('.lm-amount').textContent === before && performance.now() < until;
        part('[data-act=cancel]').click();
        while (waits()) await new Promise((done) => setTimeout(done, 5));
        return [part('[data-act=cancel]').innerText, part('[data-act=cancel]').ariaLabel];
    }""",
        QUEUED,
    )
    assert name == ["Delete what has arrived?", f"Delete what has arrived? {MOE}"]
    cancel_model(page)


def ask_and_turn_away(page: PageDriver, asks: str, other: str) -> list[str]:
    """What a button says once it has asked, another one was pressed, it has asked again, and the time of its
    first question is over; and when that of the second one is, too."""
    return list(
        page.page.evaluate(
            """([asks, other]) => {
            const timers = [], [set, clear] = [window.setTimeout, window.clearTimeout];
            window.setTimeout = (done, ms, ...rest) =>
                ms < 1000 ? set(done, ms, ...rest) : timers.push(() => done(...rest)) - 1e9;
            window.clearTimeout = (id) => { if (id < 0) delete timers[id + 1e9 - 1]; else clear(id); };
            const now = () => document.querySelector(asks).innerText;
            for (const button of [asks, other, asks]) document.querySelector(button).click();
            const last = timers.pop();
            timers.forEach((end) => end());
            const before = now();
            last();
            [window.setTimeout, window.clearTimeout] = [set, clear];
            return [before, now()];
        }""",
            [asks, other],
        )
    )


def test_a_question_that_is_asked_again_stands_as_long_as_the_first_time(page: PageDriver) -> None:
    get_model(page)
    cancel, pause = (f"{QUEUED} [data-act={act}]" for act in ("cancel", "pause"))
    assert ask_and_turn_away(page, cancel, pause) == ["Delete what has arrived?", "Cancel"]
    cancel_model(page)
    page.chat()
    for title in ("turned away from", "turned to"):
        page.page.click("#lm-new")
        page.wait_questions([])
        page.send(title)
        page.wait_idle()
    delete = "li:has([title='turned {}']) [data-act=delete]"
    assert ask_and_turn_away(page, delete.format("away from"), delete.format("to")) == ["Delete?", "✕"]


def test_a_question_in_other_words_is_asked_anew(page: PageDriver) -> None:
    """As of a model of which more lies on the disk than when its question was read."""
    get_model(page)
    asked = page.page.evaluate(
        """(cancel) => {
        const button = document.querySelector(cancel);
        button.click();
        button.dataset.sure = 'Delete all of it?'; // as Gradio draws it anew
        button.firstChild.data = 'Cancel';
        delete button.dataset.text;
        button.click();
        return button.innerText;
    }""",
        f"{QUEUED} [data-act=cancel]",
    )
    assert asked == "Delete all of it?"
    page.page.wait_for_timeout(500)
    assert page.page.locator(f"{QUEUED}[data-state=running]").count() == 1
    cancel_model(page)


def test_who_clicks_beside_a_list_is_not_brought_back_into_it(page: PageDriver) -> None:
    get_model(page)
    page.page.click(f"{QUEUED} [data-act=cancel]")
    page.page.click(f"{QUEUED} .lm-amount")
    before = amount(page)
    wait_for(lambda: amount(page) != before, 10, "progress")
    assert page.evaluate("document.activeElement === document.body")
    cancel_model(page)


def test_the_chat_that_was_pressed_last_is_open(page: PageDriver) -> None:
    page.chat()
    for title in ("the first chat", "the second chat"):
        page.page.click("#lm-new")
        page.wait_questions([])
        page.send(title)
        page.wait_idle()
    page.page.click("#lm-new")
    page.wait_questions([])
    with answer_held(page, "#lm-chats"):
        page.page.click(".lm-open[title='the first chat']")
        page.page.click(".lm-open[title='the second chat']")
        page.wait_questions(["the second chat"])
    page.page.wait_for_timeout(1000)  # the held answer is of a chat that is not wanted any more
    page.wait_questions(["the second chat"])
    page.page.dblclick("li[aria-current=true] [data-act=delete]")
    page.page.wait_for_timeout(1000)
    assert page.titles().count("the second chat") == 1


def double_click(page: PageDriver, selector: str, until: str) -> None:
    """As a hand does it: the page has taken the first click when the second one comes."""
    box = page.page.locator(selector).bounding_box()
    mouse = page.page.mouse
    mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.page.wait_for_selector(until)
    page.page.wait_for_timeout(150)  # for the layout
    mouse.down(click_count=2)
    mouse.up(click_count=2)


def hold_enter(page: PageDriver, selector: str) -> None:
    page.page.focus(selector)
    for _ in range(10):
        page.page.keyboard.down("Enter")  # again: as a keyboard repeats it
        page.page.wait_for_timeout(50)
    page.page.keyboard.up("Enter")


def test_a_double_click_on_send_does_not_stop_the_answer(page: PageDriver) -> None:
    page.start_again()
    page.page.fill("#lm-message textarea", "clicked twice")
    double_click(page, "#lm-send", "#lm-stop")
    page.wait_answer_is(answer_to("clicked twice"))


def test_a_double_click_on_a_delete_is_one(page: PageDriver, server: Server) -> None:
    page.settings()
    for name in ("one", "two"):
        page.fill("lm-preset-prompt", name)
        page.page.click("#lm-save-prompt")
        page.wait_text("#lm-said-prompt", "saved")
        wait_for(lambda name=name: f'"{name}"' in (server.home / "presets.json").read_text(), 30, name)
    page.page.wait_for_timeout(500)  # for the answer to the second one, which says the same
    double_click(page, "#lm-delete-prompt", "#lm-said-prompt:has-text('deleted')")
    page.page.wait_for_timeout(500)
    assert page.text("#lm-said-prompt") == "The preset is deleted."


def test_enter_that_is_held_down_sends_once_and_answers_no_question(page: PageDriver) -> None:
    page.start_again()
    page.page.fill("#lm-message textarea", "held down")
    hold_enter(page, "#lm-message textarea")
    page.wait_answer_is(answer_to("held down"))
    assert page.text("#lm-notice") == "" and page.value("lm-message") == ""
    hold_enter(page, "li[aria-current=true] [data-act=delete]")
    page.page.wait_for_timeout(500)
    assert "held down" in page.titles()


def test_what_is_typed_while_a_message_is_on_its_way_stays(page: PageDriver) -> None:
    page.start_again()
    with answer_held(page, "#lm-composer"):
        page.page.fill("#lm-message textarea", "the first one")
        page.page.click("#lm-send")
        page.page.wait_for_function("window.heldAnswers === 1")
        page.page.focus("#lm-message textarea")
        page.page.keyboard.press("End")
        page.page.keyboard.type(" and the next")
        page.page.keyboard.press("Enter")  # there is one on its way
    page.wait_answer_is(answer_to("the first one"))
    assert page.questions() == ["the first one"]
    wait_for(lambda: page.value("lm-message") == "and the next", what="what was typed meanwhile")
    page.type("and the next")
    page.wait_answer_is(answer_to("and the next"))
    assert page.value("lm-message") == ""


def test_a_form_shows_what_holds_whichever_answer_comes_first(page: PageDriver, server: Server) -> None:
    def kept() -> str:
        path = server.home / "settings.json"
        return str(json.loads(path.read_text())["answers"]["temperature"]) if path.exists() else ""

    page.settings()
    page.fill("lm-temperature", "0.2")
    wait_for(lambda: kept() == "0.2", what="the first temperature")
    page.fill("lm-preset-sampling", "cold")
    page.page.click("#lm-save-sampling")
    page.wait_text("#lm-said-sampling", "saved")
    page.fill("lm-temperature", "0.8")
    wait_for(lambda: kept() == "0.8", what="the second temperature")
    with answer_held(page, "#lm-preset-sampling", "keydown"):
        page.page.fill("#lm-preset-sampling input", "cold")
        page.page.press("#lm-preset-sampling input", "Enter")
        page.page.wait_for_function("window.heldAnswers === 1")
        page.fill("lm-temperature", "0.5")
        wait_for(lambda: kept() == "0.5", what="the third temperature")
    page.page.wait_for_timeout(1500)
    assert page.value("lm-temperature") == kept()


def press_slowly(page: PageDriver, selector: str, meanwhile: str) -> None:
    """A press of the mouse, in the middle of which a script changes the page."""
    page.page.locator(selector).scroll_into_view_if_needed()
    box = page.page.locator(selector).bounding_box()
    page.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.page.mouse.down()
    page.evaluate(meanwhile)
    page.page.wait_for_timeout(50)  # for the layout
    page.page.mouse.up()


def test_a_press_counts_for_the_button_that_moves_from_under_the_pointer(page: PageDriver) -> None:
    page.settings()
    page.page.fill("#lm-budget textarea", "rubbish")
    taller = "document.querySelector('#lm-preview').style.paddingTop = '90px'"
    press_slowly(page, "#lm-apply", taller)  # as the lines do that say what the typed budget buys
    page.wait_text("#lm-applied", "rubbish")
    page.page.fill("#lm-budget textarea", "auto")
    page.page.click("#lm-apply")
    page.wait_text("#lm-applied", "Applied")


def test_a_press_counts_for_the_row_that_is_drawn_anew(page: PageDriver, hub: HubServer) -> None:
    page.start_again()
    page.send("drawn anew")
    page.wait_idle()
    page.page.click("#lm-new")
    page.wait_questions([])
    again = """document.querySelectorAll('#lm-chats ul, #lm-queue ul').forEach((list) => {
        list.outerHTML = `<p style="height: 70px"></p>${list.outerHTML}`;
    })"""
    press_slowly(page, ".lm-open[title='drawn anew']", again)
    page.wait_questions(["drawn anew"])
    get_model(page)
    press_slowly(page, f"{QUEUED} [data-act=pause]", again)
    page.page.wait_for_selector(f"{QUEUED}[data-state=paused]")
    cancel_model(page)


def test_a_press_counts_for_the_row_on_which_it_began(page: PageDriver) -> None:
    """Gradio draws the new list into the rows that are there, so that each becomes another one's."""
    page.start_again()
    for title in ("pressed", "beside it"):
        page.send(title)
        page.wait_idle()
        page.page.click("#lm-new")
        page.wait_questions([])
    page.page.hover(".lm-open[title='pressed']")
    page.page.mouse.down()
    page.send("a newer one")
    page.page.wait_for_selector("li:first-child .lm-open[title='a newer one']")
    page.page.mouse.up()
    page.wait_questions(["pressed"])
    get_model(page)
    became = f"document.querySelector(\"{QUEUED} [data-act=pause]\").dataset.key = 'another'"
    press_slowly(page, f"{QUEUED} [data-act=pause]", became)
    page.page.wait_for_timeout(500)
    assert page.text("#lm-models-notice") == ""
    cancel_model(page)


def test_a_second_preset_is_saved_while_the_answer_to_the_first_is_on_its_way(
    page: PageDriver, server: Server
) -> None:
    kept = server.home / "presets.json"
    page.settings()
    with answer_held(page, ".lm-presets", "click"):
        for name in ("an earlier one", "a later one"):
            page.fill("lm-preset-prompt", name)
            page.page.click("#lm-save-prompt")
            wait_for(lambda name=name: kept.exists() and f'"{name}"' in kept.read_text(), 10, name)
    page.page.wait_for_timeout(300)
    assert page.value("lm-preset-prompt") == "a later one"
