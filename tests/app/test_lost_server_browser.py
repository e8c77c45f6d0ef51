"""A page whose server is gone, in a real browser on the fake engine: it says so, and goes on with the next
one. What is being written stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from app_process import FORKED, running_app
from browser import PageDriver
from fake_engine import answer_to

pytestmark = pytest.mark.browser
ANOTHER = """(text) => !window.shown
    && document.querySelector('#lm-message textarea')?.value === text"""


@pytest.mark.slow
def test_a_page_says_that_its_server_is_gone_and_goes_on_with_the_next_one(
    browser: Any, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    with running_app(home, FORKED) as app:
        app.wait("ready")
        page = PageDriver.open(browser, app.url)
        page.send("Question ONE")
        page.wait_idle()
        page.page.fill("#lm-message textarea", "Question TWO")
        assert page.text("#lm-lost") == ""
        page.evaluate("window.shown = true")
    page.wait_text("#lm-lost", "start it again with python launch.py")
    with running_app(home, FORKED, "--port", str(app.port)) as again:
        again.wait("ready")
        page.page.wait_for_function(ANOTHER, arg="Question TWO")  # Gradio loads that of a new process
        assert page.text("#lm-lost") == ""
        page.page.press("#lm-message textarea", "Enter")
        page.wait_answer_is(answer_to("Question TWO"))
        assert page.questions() == ["Question ONE", "Question TWO"]
        page.reload()
        page.page.wait_for_timeout(1000)
        assert page.value("lm-message") == ""  # it was sent
        page.page.fill("#lm-message textarea", "for later")
        page.evaluate("window.shown = true")
        page.page.select_option("#lm-language", "zh")
        page.page.wait_for_function(ANOTHER, arg="for later")
        page.close()
