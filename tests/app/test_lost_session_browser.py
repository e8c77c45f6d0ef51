"""A page that Gradio has forgotten, in a real browser on the fake engine: it goes on where it was."""

from __future__ import annotations

import os
import time

import psutil
import pytest
from app_process import LOOKING, AppStart, Server, wait_for
from browser import PageDriver
from fake_engine import answer_to

from app.page_views import SESSIONS

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("on_a_new_chat")]
CHATS = "document.querySelectorAll('li[data-chat]').length"


@pytest.fixture(scope="module")
def app_start() -> AppStart:
    return AppStart(environment={**LOOKING, "GRADIO_IS_E2E_TEST": "1"})  # an hour takes a second


def lose_connections() -> None:
    """Of the browser, and with them the sign of life of each page, which Gradio does not send again."""
    for process in psutil.Process(os.getpid()).children(recursive=True):
        if "NetworkService" in " ".join(process.cmdline()):
            process.kill()


@pytest.mark.slow
def test_a_page_that_lost_its_connection_goes_on_in_its_chat(page: PageDriver) -> None:
    page.send("Question ONE")
    page.wait_idle()
    chats = page.evaluate(CHATS)
    lose_connections()
    time.sleep(5)
    page.type("Question TWO")
    page.wait_answer_is(answer_to("Question TWO"))
    assert page.questions() == ["Question ONE", "Question TWO"] and page.evaluate(CHATS) == chats


OTHERS = """async (count) => {
    const config = await (await fetch('/config')).json();
    const button = config.components.find((one) => one.props.elem_id === 'lm-new').id;
    const fresh = config.dependencies.find((one) => one.targets.some(([target]) => target === button));
    for (let i = 0; i < count; i++) {
        const body = { data: ['', ''], fn_index: fresh.id, session_hash: `other${i}` };
        const headers = { 'Content-Type': 'application/json' };
        const options = { method: 'POST', headers, body: JSON.stringify(body) };
        const answer = await fetch('/gradio_api/run/predict', options);
        if (!answer.ok) throw new Error(await answer.text());
    }
}"""


@pytest.mark.slow
def test_a_page_goes_on_in_its_chat_after_many_others_were_open(page: PageDriver) -> None:
    page.send("Question ONE")
    page.wait_idle()
    chats = page.evaluate(CHATS)
    page.page.evaluate(OTHERS, SESSIONS + 5)
    page.type("Question TWO")
    page.wait_answer_is(answer_to("Question TWO"))
    assert page.questions() == ["Question ONE", "Question TWO"] and page.evaluate(CHATS) == chats


@pytest.mark.slow
def test_such_a_page_still_shows_the_chats_that_are_searched_for(page: PageDriver, server: Server) -> None:
    page.send("A needle")
    page.wait_idle()
    other = page.another(server.url)
    page.page.fill("#lm-find input, #lm-find textarea", "needle")
    wait_for(lambda: len(page.titles()) == 1, 10, "what was found")
    page.page.evaluate(OTHERS, SESSIONS + 5)
    stamp = "document.querySelector('#lm-mark [data-stamp]').dataset.stamp"
    before = page.evaluate(stamp)
    other.start_again()
    other.send("Something else")
    other.wait_idle()
    other.close()
    page.page.bring_to_front()
    page.page.wait_for_function(f"Number({stamp}) > {before}")  # it was opened anew
    page.page.wait_for_timeout(500)
    assert len(page.titles()) == 1 and page.titles()[0].startswith("A needle")
    page.page.fill("#lm-find input, #lm-find textarea", "")
