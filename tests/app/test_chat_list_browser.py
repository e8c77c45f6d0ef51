"""The list of chats while it is drawn anew, in a real browser on the fake engine: a title that is being typed
and a Delete that asks first stay."""

from __future__ import annotations

from typing import Any

import pytest
from app_process import AppStart, wait_for
from browser import PageDriver

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("on_a_new_chat")]
ASKED = "document.querySelector('#lm-asking').textContent"


@pytest.fixture(scope="module")
def app_start() -> AppStart:
    return AppStart(environment={"FAKE_STEP_S": "0.06"})


def row(page: PageDriver, title: str) -> Any:
    found = page.page.locator("li[data-chat]").filter(has=page.page.locator(f".lm-open[title='{title}']"))
    found.hover()
    return found


def answer_ends(page: PageDriver) -> None:
    """While the focus stays where it is; until the list is another one."""
    assert page.page.locator(".lm-answering").count() == 1
    page.evaluate("document.querySelector('#lm-stop').click()")
    page.wait_idle()
    wait_for(lambda: page.page.locator(".lm-answering").count() == 0, 10, "another list")
    page.page.wait_for_timeout(200)


def begin_to_rename(page: PageDriver, title: str) -> None:
    page.send(title)
    page.wait_answer(20)
    row(page, title).locator("[data-act=rename]").click()
    page.page.keyboard.type("half")


@pytest.mark.slow
def test_an_answer_that_ends_leaves_a_title_that_is_being_typed(page: PageDriver) -> None:
    begin_to_rename(page, "a long story about titles")
    page.page.keyboard.press("ArrowLeft")
    answer_ends(page)
    assert page.page.input_value(".lm-rename") == "half" and "half" not in page.titles()
    page.page.keyboard.type("l-")
    page.page.keyboard.press("Enter")
    wait_for(lambda: "hall-f" in page.titles(), 10, "the new title")
    assert page.page.locator(".lm-rename").count() == 0 and page.problems == []


@pytest.mark.slow
def test_a_title_is_given_up_or_kept_after_the_list_was_drawn_anew(page: PageDriver) -> None:
    begin_to_rename(page, "a long story to give up")
    answer_ends(page)
    page.page.keyboard.press("Escape")
    assert page.titles()[0] == "a long story to give up"
    row(page, "a long story to give up").locator("[data-act=rename]").click()
    page.page.keyboard.type("kept")
    page.page.click("#lm-message textarea")  # whoever goes on elsewhere is done
    wait_for(lambda: page.titles()[:1] == ["kept"], 10, "the new title")
    assert page.problems == []


@pytest.mark.slow
def test_a_chat_that_is_deleted_elsewhere_ends_its_renaming(page: PageDriver, server: Any) -> None:
    begin_to_rename(page, "a long story that goes")
    other = page.another(server.url)
    other.delete("a long story that goes")
    other.close()
    wait_for(lambda: page.page.locator(".lm-rename").count() == 0, 10, "the list")
    page.page.wait_for_timeout(200)
    assert "half" not in page.titles() and page.problems == []


@pytest.mark.slow
def test_a_screen_reader_is_told_that_delete_asks_first(page: PageDriver) -> None:
    page.send("a long story to delete")
    page.wait_answer(20)
    delete = row(page, "a long story to delete").locator("[data-act=delete]")
    assert delete.get_attribute("aria-label") == "Delete a long story to delete"
    delete.click()
    for _ in range(2):
        assert delete.inner_text() == "Delete?"
        assert delete.get_attribute("aria-label") == "Delete? a long story to delete" == page.evaluate(ASKED)
        if page.page.query_selector("#lm-stop"):
            answer_ends(page)  # it still asks
    wait_for(lambda: page.evaluate(ASKED) == "", 6, "the end of the question")
    assert (delete.inner_text(), delete.get_attribute("aria-label")) == ("✕", "Delete a long story to delete")
    delete.click()
    delete.click()
    wait_for(lambda: "a long story to delete" not in page.titles(), 10, "one chat less")
    assert page.evaluate(ASKED) == ""


@pytest.mark.slow
def test_a_question_stays_when_another_chat_is_opened(page: PageDriver) -> None:
    for title in ("asked about", "opened meanwhile"):
        page.page.click("#lm-new")
        page.wait_questions([])
        page.send(title)
        page.wait_idle()
    page.page.click("#lm-new")
    page.wait_questions([])
    wait_for(lambda: page.page.locator(".lm-answering").count() == 0, 10, "the list as it stays")
    asked = page.page.evaluate(
        """async () => {
        const row = (title) => document.querySelector(`#lm-chats .lm-open[title='${title}']`).parentElement;
        const asking = () => [...document.querySelectorAll('#lm-chats li')]
            .filter((one) => one.innerText.includes('Delete?'))
            .map((one) => one.querySelector('.lm-open').title);
        row('asked about').querySelector('[data-act=delete]').click();
        const before = asking();
        row('opened meanwhile').querySelector('.lm-open').click();
        const until = performance.now() + 20000, waits = () => !row('opened meanwhile').ariaCurrent;
        while (waits() && performance.now() < until) await new Promise((done) => setTimeout(done, 5));
        return [before, asking()];
    }"""
    )
    assert asked == [["asked about"], ["asked about"]]


@pytest.mark.slow
def test_the_focus_stays_with_its_chat_when_others_come_above_it(page: PageDriver) -> None:
    page.send("has the focus")
    page.wait_idle()
    wait_for(lambda: page.page.locator(".lm-answering").count() == 0, 10, "the list as it stays")
    focused = "[document.activeElement.closest('li').dataset.chat, document.activeElement.dataset.act]"
    place = "[...document.querySelectorAll('#lm-chats li')].indexOf(document.activeElement.closest('li'))"
    page.page.focus(".lm-open[title='has the focus']")
    for num_above, act in ((1, "open"), (2, "rename")):
        if act == "rename":
            page.page.keyboard.press("Tab")  # a row shows that only while the focus is in it
        before = page.evaluate(focused)
        assert before[1] == act
        page.page.evaluate(
            """async ([id]) => {
            const body = await (await fetch(`/chats/${id}.json`)).text();
            await fetch('/chats', { method: 'POST', body }); // as another window imports it
        }""",
            before,
        )
        wait_for(lambda num=num_above: page.evaluate(place) == num, 10, "a chat above it")
        assert page.evaluate(focused) == before


@pytest.mark.slow
@pytest.mark.parametrize(("key", "title"), [("Enter", "by key"), ("Escape", "a keyboard story")])
def test_who_renames_with_keys_goes_on_from_the_title(page: PageDriver, key: str, title: str) -> None:
    page.send("a keyboard story")
    page.wait_idle()
    row(page, "a keyboard story").locator(".lm-open").focus()
    page.page.keyboard.press("Tab")
    page.page.keyboard.press("Enter")
    page.page.keyboard.type("by key")
    page.page.keyboard.press(key)
    wait_for(lambda: page.titles()[0] == title, 10, "the title")
    page.page.wait_for_timeout(300)
    assert page.evaluate("document.activeElement.className") == "lm-open"
    assert page.evaluate("document.activeElement.title") == title
