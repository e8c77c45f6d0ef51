"""Where a conversation is read, in a real browser on the fake engine: a chat is opened at its end, an answer
that is asked for is seen, and earlier messages push nothing away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from app_process import AppStart, Server, wait_for
from browser import PageDriver
from fake_engine import answer_to

pytestmark = pytest.mark.browser
TURNS = 45
FROM_END = """(() => {
    const box = document.querySelector('#lm-scroll');
    return box.scrollHeight - box.clientHeight - box.scrollTop;
})()"""
PLACE = """(text) => [...document.querySelectorAll('#lm-history [data-testid=user]')]
    .find((bubble) => bubble.textContent.trim() === text)?.getBoundingClientRect().top"""


def long_chats(home: Path) -> None:
    (home / "chats").mkdir(parents=True)
    for number in (1, 2):
        messages = []
        for node in range(2 * TURNS):
            role = "assistant" if node % 2 else "user"
            text = f"answer {node // 2}. " + 40 * "word " if node % 2 else f"question {node // 2}"
            finish = "stop" if node % 2 else None
            messages.append(
                {"parent": node - 1, "role": role, "content": text, "created": 1.0, "finish": finish,
                 "error": "", "stats": {}}
            )  # fmt: skip
        chat = {
            "schema": 2, "id": f"{number:032x}", "title": f"chat {number}", "created": 1.0,
            "updated": float(number), "shown": 2 * TURNS - 1, "messages": messages,
        }  # fmt: skip
        (home / "chats" / f"{number:032x}.json").write_text(json.dumps(chat))


@pytest.fixture(scope="module")
def app_start() -> AppStart:
    return AppStart(prepare=long_chats)


def scroll_up(page: PageDriver) -> None:
    """As a reader does."""
    page.evaluate("document.querySelector('#lm-scroll').scrollTop = 500")
    wait_for(lambda: page.evaluate(FROM_END) > 500, 5, "an earlier place")
    page.page.wait_for_timeout(100)


def at_end(page: PageDriver) -> None:
    wait_for(lambda: page.evaluate(FROM_END) < 5, 10, "the end of the conversation")
    page.page.wait_for_timeout(200)
    assert page.evaluate(FROM_END) < 5


@pytest.mark.slow
def test_a_chat_is_opened_at_its_end(page: PageDriver) -> None:
    at_end(page)
    scroll_up(page)
    page.open_chat("chat 1")
    at_end(page)


@pytest.mark.slow
def test_an_answer_is_seen_by_who_asked_for_it_and_disturbs_nobody_else(
    page: PageDriver, server: Server
) -> None:
    scroll_up(page)
    page.type("one more question")
    page.wait_answer_is(answer_to("one more question"))
    at_end(page)
    page.wait_idle()
    scroll_up(page)
    other = page.another(server.url)
    other.type("from another window")
    page.wait_answer_is(answer_to("from another window"))
    assert page.evaluate(FROM_END) > 500
    other.close()


@pytest.mark.slow
def test_earlier_messages_come_before_what_is_read(page: PageDriver) -> None:
    first = page.questions()[0]
    page.evaluate("document.querySelector('#lm-scroll').scrollTop = 0")
    page.page.wait_for_timeout(200)
    before = page.page.evaluate(PLACE, first)
    page.page.click("#lm-earlier")
    wait_for(lambda: page.questions()[0] != first, 10, "the earlier messages")
    page.page.wait_for_timeout(500)
    assert abs(page.page.evaluate(PLACE, first) - before) < 60  # the button is gone
