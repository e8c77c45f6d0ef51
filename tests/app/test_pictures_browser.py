"""Pictures that go with a message, in a real browser."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from app_process import AppStart, Server, wait_for
from browser import PageDriver, attach, given
from fake_engine import SEEING
from picture_files import picture

from app.pictures import picture_id

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("on_a_new_chat")]
RED, BLUE = picture("red"), picture("blue")
PASTE = """(bytes) => {
    const data = new DataTransfer(), box = document.querySelector('#lm-message textarea');
    data.setData('text/html', '<img src="x">');
    data.items.add(new File([new Uint8Array(bytes)], 'image.png', { type: 'image/png' }));
    box.dispatchEvent(new ClipboardEvent('paste', { bubbles: true, cancelable: true, clipboardData: data }));
}"""
DROP = """([bytes, selector]) => {
    const data = new DataTransfer();
    data.items.add(new File([new Uint8Array(bytes)], 'dropped.png'));
    const drop = { bubbles: true, cancelable: true, dataTransfer: data };
    document.querySelector(selector).dispatchEvent(new DragEvent('drop', drop));
}"""
LOADED = """(selector) => [...document.querySelectorAll(selector + ' img')].map((one) => one.naturalWidth)"""


@pytest.fixture(scope="module")
def app_start() -> AppStart:
    return AppStart(options=("--model", SEEING))


@pytest.fixture(autouse=True)
def empty_composer(page: PageDriver) -> Iterator[None]:
    yield
    while page.page.locator("#lm-held button").count():
        page.page.locator("#lm-held button").first.click()


def held(page: PageDriver) -> list[str]:
    """Names of the pictures above the box."""
    script = "() => [...document.querySelectorAll('#lm-held img')].map((one) => one.alt)"
    return list(page.page.evaluate(script))


def wait_held(page: PageDriver, *names: str) -> None:
    wait_for(lambda: held(page) == list(names), 10, f"the thumbnails {names}")


def wait_shown(page: PageDriver, widths: list[int], selector: str = "#lm-turn .lm-pictures.placed") -> None:
    """The pictures of the last question, by the widths in which they came."""
    wait_for(lambda: page.page.evaluate(LOADED, selector) == widths, 10, f"pictures of {widths}")


def test_a_picture_is_attached_sent_and_shown_also_when_the_page_is_loaded_again(
    page: PageDriver, server: Server
) -> None:
    attach(page, given("red.png", RED), given("blue", BLUE))
    wait_held(page, "red.png", "blue")
    wait_shown(page, [60, 60], "#lm-held")
    page.send("What is it?")
    page.wait_idle()
    wait_shown(page, [60, 60])
    wait_held(page)
    page.wait_text("#lm-turn", "I see 2 of them.")
    assert page.value("lm-message") == ""
    link = page.page.locator("#lm-turn .lm-pictures.placed a").first
    assert link.get_attribute("target") == "_blank"
    assert link.locator("img").get_attribute("alt") == "Picture 1 of 2"
    with page.page.context.expect_page() as opened:
        link.click()
    opened.value.wait_for_load_state()
    assert opened.value.url == f"{server.url}images/{picture_id(RED)}"
    opened.value.close()
    page.reload()
    wait_shown(page, [60, 60])
    assert (
        page.page.evaluate("document.querySelector('#lm-turn .user-row').innerText").strip() == "What is it?"
    )


def test_a_screenshot_is_pasted_and_sent_without_a_word(page: PageDriver, server: Server) -> None:
    page.page.evaluate(PASTE, [*RED])
    wait_held(page, "image.png")
    page.page.press("#lm-message textarea", "Enter")
    wait_shown(page, [60])
    page.wait_text("#lm-turn", "I see 1 of them.")
    page.wait_idle()
    assert not page.visible("#lm-turn .user-row [data-testid=user]"), "there is no text to be shown"
    page.edit_last("And now?")
    page.wait_questions(["And now?"])
    wait_shown(page, [60])
    page.wait_text("#lm-turn", "I see 1 of them. Hello! You wrote: And now?")
    newest = max((server.home / "chats").glob("*.json"), key=os.path.getmtime)
    messages = json.loads(newest.read_text())["messages"]
    assert [one.get("images") for one in messages if one["role"] == "user"] == [[picture_id(RED)]] * 2


def test_a_picture_is_removed_by_the_keyboard(page: PageDriver) -> None:
    attach(page, given("red.png", RED), given("blue.png", BLUE))
    wait_held(page, "red.png", "blue.png")
    page.page.focus("#lm-held button[aria-label='Remove red.png']")
    page.page.keyboard.press("Enter")
    wait_held(page, "blue.png")
    assert page.evaluate("document.activeElement.ariaLabel") == "Remove blue.png"
    page.page.keyboard.press("Enter")
    wait_held(page)
    assert page.evaluate("document.activeElement === document.querySelector('#lm-message textarea')")


def kind_and_size(path: Path) -> tuple[str | None, tuple[int, int]]:
    with PIL.Image.open(path) as image:
        return image.format, image.size


@pytest.mark.slow
def test_what_is_large_is_made_smaller_before_it_is_sent(page: PageDriver, server: Server) -> None:
    clear = io.BytesIO()
    PIL.Image.new("RGBA", (4200, 2100), (255, 0, 0, 100)).save(clear, "PNG")
    noise = io.BytesIO()
    PIL.Image.frombytes("RGB", (1200, 1200), os.urandom(3 * 1200 * 1200)).save(noise, "BMP")
    assert len(noise.getvalue()) > 4 << 20
    before = set((server.home / "images").glob("*")) if (server.home / "images").exists() else set()
    files = [given("wide.png", picture("green", (5000, 1000))), given("clear.png", clear.getvalue())]
    attach(page, *files, given("noise.bmp", noise.getvalue()), given("small.webp", picture(kind="WEBP")))
    wait_held(page, "wide.png", "clear.png", "noise.bmp", "small.webp")
    made = {kind_and_size(one) for one in (server.home / "images").glob("*") if one not in before}
    small = ("WEBP", (60, 40))
    assert made == {("JPEG", (4579, 916)), ("PNG", (2896, 1448)), ("JPEG", (1200, 1200)), small}


@pytest.mark.slow
def test_eight_are_taken_once_each_and_what_is_none_is_named(page: PageDriver) -> None:
    many = [given(f"{i}.png", picture((i, 0, 0))) for i in range(7)]
    attach(page, *many, given("again.png", picture((0, 0, 0))))
    wait_held(page, *(f"{i}.png" for i in range(7)))
    other = {**given("photo.heic", b"\0\0\0 ftypheic"), "mimeType": "image/heic"}
    attach(page, other, given("broken.png", RED[:50]), given("8.png", RED), given("9.png", BLUE))
    wait_held(page, *(f"{i}.png" for i in range(7)), "8.png")
    said = page.text("#lm-attached")
    assert "broken.png is no picture that can be read" in said
    assert "photo.heic is no picture that can be read: use PNG, JPEG, WebP, GIF or BMP." in said
    assert "9.png was left out: a message takes 8 pictures." in said
    page.page.set_viewport_size({"width": 390, "height": 800})
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
    page.page.set_viewport_size({"width": 1400, "height": 900})


@pytest.mark.slow
def test_of_many_that_come_at_once_eight_are_taken(page: PageDriver) -> None:
    page.page.evaluate(HELD)
    for i in range(9):
        page.page.evaluate(PASTE, [*picture((i, 0, 0))])
    page.wait_text("#lm-attached", "Reading image.png")
    page.evaluate("window.letSend()")
    page.wait_text("#lm-attached", "image.png was left out: a message takes 8 pictures.")
    wait_for(lambda: len(held(page)) == 8, 10, "eight of them")
    page.evaluate("window.sendAtOnce()")


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_where_there_are_pictures(
    page: PageDriver, server: Server, theme: str
) -> None:
    green = picture("green", (30, 300))
    attach(page, given("red.png", RED), given("green.png", green))
    wait_held(page, "red.png", "green.png")
    page.send("look")
    page.wait_idle()
    (server.home / "images" / picture_id(green)).unlink()
    page.reload()
    wait_shown(page, [60])
    attach(page, given("blue.png", BLUE))
    wait_held(page, "blue.png")
    page.theme(theme)
    page.background()  # it fades
    assert page.violations(theme) == [] and page.unlabelled() == []
    page.theme("auto")


def question_of(server: Server) -> dict[str, Any]:
    """The one that was asked last, as the disk has it."""
    newest = max((server.home / "chats").glob("*.json"), key=os.path.getmtime)
    return [one for one in json.loads(newest.read_text())["messages"] if one["role"] == "user"][-1]


EDITED = "#lm-turn .lm-held.placed"


def wait_edited(page: PageDriver, *names: str) -> None:
    """The pictures of the open edit."""
    script = f"() => [...document.querySelectorAll('{EDITED} img')].map((one) => one.alt)"
    wait_for(lambda: page.page.evaluate(script) == list(names), 10, f"the pictures {names} of the edit")


def test_pictures_of_a_message_that_is_edited_are_removed_and_added(page: PageDriver, server: Server) -> None:
    page.page.evaluate(DROP, [[*RED], "#lm-scroll"])
    wait_held(page, "dropped.png")
    page.send("one")
    page.wait_idle()
    attach(page, given("unsent.png", RED))
    page.page.click("#lm-turn button[aria-label=Edit]")
    wait_edited(page, "Picture 1 of 1")
    page.page.evaluate(DROP, [[*BLUE], "#lm-turn textarea"])
    wait_edited(page, "Picture 1 of 1", "dropped.png")
    page.page.click(f"{EDITED} button[aria-label='Remove Picture 1 of 1']")
    wait_edited(page, "dropped.png")
    assert page.evaluate("document.activeElement.ariaLabel") == "Remove dropped.png"
    page.press("Submit", "#lm-turn")
    page.wait_text("#lm-turn", "I see 1 of them. Hello! You wrote: one")
    page.wait_idle()
    wait_shown(page, [60])
    assert question_of(server)["images"] == [picture_id(BLUE)] and held(page) == ["unsent.png"]
    page.press("Previous version", "#lm-turn .lm-branch[data-role=user]")
    wait_for(lambda: picture_id(RED) in page.page.inner_html("#lm-turn"), 10, "the picture that was there")


@pytest.mark.slow
def test_an_edit_is_left_as_it_was_or_refused_and_loses_no_picture(page: PageDriver, server: Server) -> None:
    page.send("one")
    page.wait_idle()
    page.page.click("#lm-turn button[aria-label=Edit]")
    with page.page.expect_file_chooser() as chooser:
        page.page.click(f"{EDITED} button[aria-label=Attach]")
    chooser.value.set_files([given("red.png", RED)])
    wait_edited(page, "red.png")
    page.page.press(f"{EDITED} button[aria-label=Attach]", "Escape")
    page.page.wait_for_selector(EDITED, state="detached")
    assert page.page.locator("#lm-turn .placed img").count() == 0
    page.send("a long story")
    page.wait_answer(20)
    page.page.locator("#lm-history button[aria-label=Edit]").last.click()
    page.page.wait_for_selector("#lm-history textarea")
    page.page.evaluate(PASTE.replace("#lm-message", "#lm-history"), [*RED])
    page.page.wait_for_selector("#lm-history .lm-held img")
    page.press("Submit", "#lm-history")
    page.wait_text("#lm-notice", "An answer is still being written")
    page.stop()
    page.page.locator("#lm-history button[aria-label=Edit]").last.click()
    page.page.wait_for_selector("#lm-history .lm-held img[alt='image.png']")
    page.press("Submit", "#lm-history")
    page.wait_text("#lm-turn", "I see 1 of them.")
    page.wait_idle()
    assert question_of(server)["images"] == [picture_id(RED)]


HELD = """() => {
    const ask = window.fetch;
    const may = new Promise((go) => { window.letSend = go; });
    window.fetch = async (...given) => {
        if (String(given[0]).startsWith('/images')) await may;
        return ask(...given);
    };
    window.sendAtOnce = () => { window.fetch = ask; };
}"""


@pytest.mark.slow
def test_who_sends_before_a_picture_has_arrived_sends_it_too(page: PageDriver) -> None:
    page.page.evaluate(HELD)
    attach(page, given("red.png", RED))
    page.wait_text("#lm-attached", "Reading red.png")
    page.type("What is it?")
    page.page.press("#lm-message textarea", "Enter")  # nothing seems to happen
    page.page.click("#lm-send")
    page.evaluate("window.letSend()")
    wait_shown(page, [60])
    page.wait_text("#lm-turn", "I see 1 of them. Hello! You wrote: What is it?.")
    page.evaluate("window.sendAtOnce()")
    wait_held(page)
    assert page.questions() == ["What is it?"]
    assert page.text("#lm-notice") == page.value("lm-message") == ""


@pytest.mark.slow
def test_an_edit_that_is_sent_before_its_picture_has_arrived_waits_for_it(
    page: PageDriver, server: Server
) -> None:
    page.send("one")
    page.wait_idle()
    page.page.evaluate(HELD)
    page.page.click("#lm-turn button[aria-label=Edit]")
    page.page.wait_for_selector("#lm-turn textarea")
    page.page.evaluate(DROP, [[*RED], "#lm-turn .user-row"])
    page.wait_text("#lm-attached", "Reading dropped.png")
    page.page.press("#lm-turn textarea", "Control+Enter")
    page.press("Submit", "#lm-turn")
    page.evaluate("window.letSend()")
    page.wait_text("#lm-turn", "I see 1 of them.")
    page.evaluate("window.sendAtOnce()")
    assert question_of(server)["images"] == [picture_id(RED)]


@pytest.mark.slow
def test_a_message_is_not_sent_without_a_picture_that_is_refused(page: PageDriver, server: Server) -> None:
    page.page.evaluate(HELD)
    chats = len(list((server.home / "chats").glob("*")))
    attach(page, given("red.png", RED), given("broken.png", RED[:50]))
    page.wait_text("#lm-attached", "Reading red.png")
    page.type("What is it?")
    page.evaluate("window.letSend()")
    page.wait_text("#lm-attached", "broken.png is no picture that can be read")
    wait_held(page, "red.png")
    page.evaluate("window.sendAtOnce()")
    assert page.value("lm-message") == "What is it?" and page.questions() == []
    assert len(list((server.home / "chats").glob("*"))) == chats
    page.page.fill("#lm-message textarea", "")


@pytest.mark.slow
def test_an_unsent_picture_stays_when_the_page_is_loaded_again(page: PageDriver) -> None:
    attach(page, given("red.png", RED))
    wait_held(page, "red.png")
    page.page.fill("#lm-message textarea", "not sent yet")
    page.reload()
    wait_held(page, "red.png")
    wait_for(lambda: page.value("lm-message") == "not sent yet", 10, "the text")
    page.page.fill("#lm-message textarea", "")


@pytest.mark.slow
def test_one_that_is_gone_is_said_in_its_place_and_nothing_is_asked(page: PageDriver, server: Server) -> None:
    green = picture("green")
    attach(page, given("green.png", green))
    wait_held(page, "green.png")
    page.send("gone soon")
    page.wait_idle()
    (server.home / "images" / picture_id(green)).unlink()
    page.reload()
    page.wait_text("#lm-turn .lm-pictures.placed", "A picture that is not on the disk any more")
    page.press("Retry", "#lm-turn")
    page.wait_text("#lm-notice", "attach the same file again, which brings it back")
    attach(page, given("green.png", green))
    wait_held(page, "green.png")
    page.retry()
    page.wait_text("#lm-turn", "I see 1 of them.")


def test_a_model_that_reads_none_is_said_and_the_message_stays(page: PageDriver) -> None:
    assert "reads pictures" in page.text("#lm-header")
    page.settings()
    page.choose_model("demo")
    page.page.click("#lm-apply")
    page.chat()
    wait_for(
        lambda: "ready" in page.text("#lm-header") and "reads" not in page.text("#lm-header"), 30, "demo"
    )
    page.page.fill("#lm-message textarea", "look")
    attach(page, given("red.png", RED), given("blue.png", BLUE))
    page.wait_text("#lm-attached", "fake-moe reads no pictures: load a model that does under Models")
    assert page.text("#lm-attached").count("fake-moe") == 1, "once for both"
    assert held(page) == [] and page.value("lm-message") == "look"
    page.page.press("#lm-message textarea", "Enter")
    page.wait_answer(5)
