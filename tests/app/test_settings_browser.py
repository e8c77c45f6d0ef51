"""The Settings tab in a real browser, when settings change in another tab or in another window."""

from __future__ import annotations

import pytest
from browser import PageDriver

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("on_a_new_chat")]


def test_a_refusal_is_said_where_the_button_is_and_leads_nowhere(page: PageDriver) -> None:
    page.settings()
    page.fill("lm-budget", "1MiB")  # this computer is not measured while an answer is written
    page.page.wait_for_selector("#lm-preview [data-act=use-budget]", timeout=60_000)
    page.chat()
    page.send("tell me a long story")
    page.settings()
    page.page.click("#lm-preview [data-act=use-budget]")
    page.wait_text("#lm-applied", "An answer is being written")
    assert page.page.is_visible("#lm-apply") and "answer" not in page.text("#lm-models-notice")
    page.chat()
    page.stop()
    page.settings()
    page.page.wait_for_selector("#lm-preview [data-act=use-budget]", state="detached")  # the form says it
    page.fill("lm-budget", "1MiB")
    page.page.click("#lm-preview [data-act=use-budget]")
    page.wait_text("#lm-applied", "Applied")
    assert page.page.is_visible("#lm-apply"), "what needs no load leads nowhere else"
    page.fill("lm-budget", "auto")
    page.apply("32.0 MiB")
    page.chat()
    button = '<button data-act="of-an-older-page" data-key="1">Old</button>'
    page.page.evaluate(
        "html => document.querySelector('#lm-header .lm-head').insertAdjacentHTML('beforeend', html)", button
    )
    page.page.click("#lm-header [data-act=of-an-older-page]")
    page.wait_text("#lm-said", "This button is of an older page")
    assert page.page.is_visible("#lm-said .lm-alert")
