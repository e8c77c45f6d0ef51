"""A message that is being edited while its list is drawn anew, in a real browser on the fake engine."""

from __future__ import annotations

import pytest
from app_process import Server, wait_for
from browser import PageDriver
from fake_engine import answer_to

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("on_a_new_chat")]


def ask(page: PageDriver, *questions: str) -> None:
    for question in questions:
        page.send(question)
        page.wait_answer_is(answer_to(question))
        page.wait_idle()


def open_edit(page: PageDriver, inside: str, text: str) -> None:
    page.page.locator(f"{inside} button[aria-label='Edit']").last.click()
    page.page.fill(f"{inside} textarea", text)


def other_asks(page: PageDriver, server: Server, question: str, turns: int) -> None:
    """In a second window; until the first one shows it."""
    other = page.another(server.url)
    other.send(question)
    other.wait_answer_is(answer_to(question))
    other.close()
    wait_for(lambda: page.page.locator(".lm-turns .user-row").count() == turns, 10, question)
    page.wait_answer_is(answer_to(question))
    page.wait_idle()


@pytest.mark.slow
def test_an_edit_is_of_the_message_that_was_opened_when_another_window_goes_on(
    page: PageDriver, server: Server
) -> None:
    ask(page, "Question ONE")
    open_edit(page, "#lm-turn", "changed")
    other_asks(page, server, "Question TWO", 2)
    page.press("Submit", "#lm-turn")
    page.wait_questions(["changed"])
    page.wait_answer_is(answer_to("changed"))
    page.wait_idle()
    page.press("Previous version", "#lm-turn .lm-branch[data-role=user]")
    page.wait_questions(["Question ONE", "Question TWO"])


@pytest.mark.slow
def test_an_edit_of_an_earlier_message_is_of_that_one(page: PageDriver, server: Server) -> None:
    ask(page, "Question ONE", "Question TWO")
    open_edit(page, "#lm-history", "changed")
    other_asks(page, server, "Question THREE", 3)
    page.press("Submit", "#lm-history")
    page.wait_questions(["changed"])


@pytest.mark.slow
def test_an_edit_that_was_begun_in_another_chat_changes_nothing(page: PageDriver) -> None:
    ask(page, "Question ONE")
    page.page.click("#lm-new")
    page.wait_questions([])
    ask(page, "Question TWO")
    open_edit(page, "#lm-turn", "changed")
    page.open_chat("Question ONE")
    page.wait_text("#lm-turn", answer_to("Question ONE")[:30])
    page.press("Submit", "#lm-turn")  # its box has stayed open
    page.wait_text("#lm-notice", "The chat has changed meanwhile")
    page.wait_questions(["Question ONE"])
    ask(page, "and more")  # the page is as it was
    page.wait_questions(["Question ONE", "and more"])


@pytest.mark.slow
def test_an_edit_is_given_up_and_another_one_begun(page: PageDriver) -> None:
    ask(page, "Question ONE", "Question TWO")
    open_edit(page, "#lm-history", "no")
    page.press("Cancel", "#lm-history")
    open_edit(page, "#lm-turn", "changed")
    page.press("Submit", "#lm-turn")
    page.wait_questions(["Question ONE", "changed"])


@pytest.mark.slow
def test_the_box_of_an_edit_has_a_name_and_keys_of_its_own(page: PageDriver) -> None:
    ask(page, "Question ONE")
    page.page.fill("#lm-message textarea", "not yet")
    open_edit(page, "#lm-turn", "changed")
    assert page.page.get_attribute("#lm-turn textarea", "aria-label") == "Your message"
    page.page.press("#lm-turn textarea", "Escape")
    page.page.wait_for_selector("#lm-turn textarea", state="detached")
    focused = "document.activeElement.getAttribute('aria-label')"
    wait_for(lambda: page.evaluate(focused) == "Edit", 5, "the focus where the edit began")
    assert page.questions() == ["Question ONE"]
    open_edit(page, "#lm-turn", "changed")
    page.page.press("#lm-turn textarea", "Control+Enter")
    page.wait_questions(["changed"])
    page.wait_answer_is(answer_to("changed"))
    assert page.page.input_value("#lm-message textarea") == "not yet"


COMPOSED = """(init) => document.querySelector('#lm-message textarea').dispatchEvent(
    new KeyboardEvent('keydown', { key: 'Escape', bubbles: true, cancelable: true, ...init }))"""


@pytest.mark.slow
@pytest.mark.parametrize("told", [{"isComposing": True}, {"keyCode": 229}], ids=["composing", "safari"])
def test_esc_that_gives_up_a_word_being_composed_stops_no_answer(page: PageDriver, told: object) -> None:
    page.send("a long story")
    page.wait_answer(20)
    page.page.evaluate(COMPOSED, told)
    before = len(page.answer())
    page.wait_answer(before + 20)
    page.page.evaluate(COMPOSED, {})
    page.wait_idle()


@pytest.mark.slow
def test_the_text_of_an_edit_that_is_refused_is_there_when_it_is_opened_again(page: PageDriver) -> None:
    ask(page, "Question ONE")
    page.send("a long story")
    page.wait_answer(20)
    open_edit(page, "#lm-history", "all that was <changed>")
    page.press("Submit", "#lm-history")
    page.wait_text("#lm-notice", "An answer is still being written")
    page.stop()
    page.page.locator("#lm-history button[aria-label='Edit']").last.click()
    edited = "#lm-history textarea"
    wait_for(lambda: page.page.input_value(edited) == "all that was <changed>", 5, "what was written")
    page.press("Submit", "#lm-history")
    page.wait_questions(["all that was <changed>"])
    page.wait_idle()
    page.press("Previous version", "#lm-turn .lm-branch[data-role=user]")
    page.wait_questions(["Question ONE", "a long story"])
    page.page.locator("#lm-history button[aria-label='Edit']").last.click()
    page.page.wait_for_timeout(300)
    assert page.page.input_value(edited) == "Question ONE"  # it was sent
    page.press("Cancel", "#lm-history")
