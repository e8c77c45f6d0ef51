"""What a user expects of a chat, in a real browser on the fake engine: thoughts, files, prompts, and what a
long chat costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from app_process import LOOKING, AppStart, Server, wait_for
from browser import AS_CODE, PageDriver
from fake_engine import MARKDOWN, THOUGHT, answer_to

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("on_a_new_chat")]
LONG_CHAT = "c" * 32


def _write_long_chat(folder: Path) -> None:
    """120 messages with lists, code, tables and formulas; every fourth answer has two versions."""
    stats = {"tokens_per_s": 12.5, "new_tokens": 24, "ttft_s": 0.2, "hit_rate": 0.9}
    messages: list[dict[str, Any]] = []
    last = -1
    for turn in range(60):
        question = {"role": "user", "content": f"question {turn} about `x`", "parent": last, "stats": {}}
        answer = {"role": "assistant", "content": f"{MARKDOWN}\n\n$$x^2 + {turn}$$", "stats": stats}
        asked = len(messages)
        versions = 2 if turn % 4 == 0 else 1
        messages += [question, *({**answer, "parent": asked} for _ in range(versions))]
        last = len(messages) - 1
    whole = [{"created": 1, "finish": "stop", "error": "", **message} for message in messages]
    chat = {
        "schema": 2, "id": LONG_CHAT, "title": "long chat", "created": 1, "updated": 1, "shown": last,
        "messages": whole,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / f"{LONG_CHAT}.json").write_text(json.dumps(chat))


@pytest.fixture(scope="module")
def app_start() -> AppStart:
    return AppStart(
        environment={**LOOKING, "FAKE_LOAD_S": "0.1"}, prepare=lambda home: _write_long_chat(home / "chats")
    )


class MainThread:
    """Seconds of processor time that the page's main thread has used, whatever else the machine does."""

    def __init__(self, page: PageDriver) -> None:
        self._session = page.page.context.new_cdp_session(page.page)
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def seconds(self) -> float:
        found = self._session.send("Performance.getMetrics")["metrics"]
        return float(next(metric["value"] for metric in found if metric["name"] == "TaskDuration"))


@pytest.mark.slow
def test_a_long_chat_opens_quickly_and_costs_an_answer_little(page: PageDriver) -> None:
    """At most 1.5 s of the main thread's processor time each, as promised."""
    page.send("a long story")
    page.wait_answer(300)
    main = MainThread(page)
    page.stop()
    before = main.seconds()
    page.open_chat("long chat")
    page.wait_text("#lm-turn", "That is all.")
    wait_for(lambda: page.page.locator("#lm-history .lm-branch.placed").count() == 5, 10, "the arrows")
    opening = main.seconds() - before
    before = main.seconds()
    page.type("think, once more")  # ten redraws or more
    page.wait_text("#lm-turn [data-testid=user]", "once more")
    page.wait_idle()
    page.wait_text("#lm-turn .lm-line", "accepted")
    answering = main.seconds() - before
    print(f"opening: {opening:.2f} s of the main thread, an answer: {answering:.2f} s")
    assert opening < 1.5 and answering < 1.5


@pytest.mark.slow
def test_thoughts_are_folded_and_stay_open_when_opened(page: PageDriver) -> None:
    page.send("think about it")
    page.wait_text("#lm-turn .lm-think summary", "Thinking …")
    page.page.click("#lm-turn .lm-think summary")
    before = len(page.text("#lm-turn .lm-think pre"))
    wait_for(lambda: len(page.text("#lm-turn .lm-think pre")) > before + 20, 10, "more thoughts, still shown")
    page.wait_idle()
    page.wait_text("#lm-turn .lm-think summary", "Thought for ")
    shown = page.evaluate("document.querySelector('#lm-turn .lm-think pre').textContent")
    assert shown == f"Let me see: {THOUGHT}"  # tags and formulas in it are text
    assert "<strong>four</strong>" in page.turn_html()
    assert page.copied() == "It is **four**."
    page.reload()
    page.wait_text("#lm-turn .lm-think summary", "Thought for ")
    assert not page.evaluate("document.querySelector('#lm-turn .lm-think').open")


@pytest.mark.slow
def test_what_the_draft_wrote_is_coloured_on_request(page: PageDriver) -> None:
    page.settings()
    page.page.locator("#lm-tab-settings button:has-text('Advanced')").last.click()
    page.page.check("#lm-show-drafted input")
    page.wait_text("#lm-saved", "Saved")
    page.chat()
    page.send("attack")
    page.wait_idle()
    page.wait_text("#lm-turn .lm-line", "accepted from the draft")
    assert page.evaluate("document.querySelector('#lm-turn .lm-tokens').textContent") == answer_to("attack")
    assert page.page.locator("#lm-turn .lm-tokens mark").count() > 1
    assert page.copied() == answer_to("attack")
    assert page.page.locator("#lm-turn .lm-tokens :not(mark)").count() == 0
    page.settings()
    page.page.uncheck("#lm-show-drafted input")
    page.chat()
    page.wait_text("#lm-turn [data-testid=bot] strong", "done")


TAGS = "Put List<String> into a <div>, or `<b>` into a <textarea> or <!-- what --> is left"


@pytest.mark.slow
def test_tags_are_shown_copied_and_edited_as_they_were_written(page: PageDriver) -> None:
    page.send(TAGS)
    page.wait_idle()
    shown = TAGS.replace("`", "")
    assert page.questions() == [shown]
    assert page.answer() == answer_to(shown)
    assert page.copied() == answer_to(TAGS)
    page.page.click("#lm-turn button[aria-label='Edit']")
    wait_for(lambda: page.page.input_value("#lm-turn textarea") == TAGS, 10, "the text as it was written")
    page.press("Submit", "#lm-turn")
    page.wait_text("#lm-turn .lm-branch", "2 / 2")
    page.wait_idle()
    assert page.questions() == [shown] and page.answer() == answer_to(shown)
    log = "[INFO]: &nbsp;Ready"  # as Markdown an address that nothing leads to
    page.send(log)
    page.wait_idle()
    assert page.questions()[-1] == log
    page.page.click("#lm-turn button[aria-label='Edit']")
    wait_for(lambda: page.page.input_value("#lm-turn textarea") == log, 10, "the line of a log")
    page.press("Cancel", "#lm-turn")


@pytest.mark.slow
def test_names_in_the_html_of_a_message_are_not_taken_for_the_page_s_own(page: PageDriver) -> None:
    names = ("lm-stop", "lm-send", "lm-turn", "lm-live", "lm-scroll", "lm-composer", "lm-message")
    idle = "window.localmoePart('lm-send') !== null && window.localmoePart('lm-stop') === null"
    page.send(AS_CODE + "".join(f'<div id="{name}">{name}</div>' for name in names))
    page.page.wait_for_function(idle)
    assert page.evaluate("document.querySelectorAll('#lm-stop, #lm-send').length") > 2, "they are in the page"
    page.page.wait_for_timeout(3000)
    asked = len(page.answered)
    page.page.wait_for_timeout(4000)
    assert not [one for one in page.answered[asked:] if "gradio_api" in one], "it is not drawn anew"
    box = page.page.locator("#lm-composer #lm-message textarea")
    box.fill("long")
    box.press("Enter")
    page.page.wait_for_function(f"!({idle})")
    page.page.keyboard.press("Escape")
    page.page.wait_for_function(idle, timeout=5000)


@pytest.mark.slow
def test_chats_are_searched_exported_and_imported_with_the_keyboard_at_hand(
    page: PageDriver, server: Server, tmp_path: Path
) -> None:
    page.send("a walrus and nothing else")
    page.wait_idle()
    page.retry()
    page.wait_idle()
    page.page.keyboard.press("Control+k")
    page.page.keyboard.type("walrus ELSE")
    wait_for(lambda: len(page.titles()) == 1, 10, "the chat with these words")
    assert "walrus" in page.text(".lm-snippet")
    page.page.keyboard.press("Escape")
    wait_for(lambda: len(page.titles()) > 1, 10, "all chats")
    with page.page.expect_download() as download:
        page.page.click("#lm-files a:has-text('JSON')")
    assert download.value.suggested_filename == "a walrus and nothing else.json"
    file = tmp_path / "chat.json"
    download.value.save_as(file)
    page.delete("a walrus and nothing else")
    page.wait_questions([])
    page.page.keyboard.press("Control+Shift+O")
    focused = "document.activeElement.closest('#lm-message') !== null"
    wait_for(lambda: page.evaluate(focused), 10, "the cursor in the box to write in")
    page.page.keyboard.type("a new question")
    wait_for(lambda: page.page.input_value("#lm-message textarea") == "a new question", 10, "the text")
    page.page.keyboard.press("Control+Enter")
    page.wait_questions(["a new question"])
    page.wait_idle()
    page.page.set_input_files("#lm-files input[type=file]", file)
    page.wait_questions(["a walrus and nothing else"])
    page.wait_text("#lm-turn .lm-branch", "2 / 2")
    chats, answer = len(page.titles()), page.answer()
    with page.page.expect_download() as download:
        page.page.click("#lm-files a:has-text('Markdown')")
    download.value.save_as(tmp_path / "chat.md")
    too_large = "**/chats/*.json"
    page.page.route(too_large, lambda route: route.fulfill(status=409, body="Export it as Markdown."))
    page.page.click("#lm-files a:has-text('JSON')")
    page.wait_text("#lm-notice", "Export it as Markdown.")
    page.page.unroute(too_large)
    page.page.set_input_files("#lm-files input[type=file]", tmp_path / "chat.md")
    wait_for(lambda: len(page.titles()) == chats + 1, 10, "the chat from Markdown")
    wait_for(
        lambda: page.text("#lm-turn .lm-branch") == "" and page.answer() == answer, 10, "its one version"
    )
    file.write_text("{}")
    page.page.set_input_files("#lm-files input[type=file]", file)
    page.wait_text("#lm-notice", "The file is no exported chat")
    page.wait_questions(["a walrus and nothing else"])


@pytest.mark.slow
def test_system_prompts_are_saved_chosen_and_deleted(page: PageDriver, server: Server) -> None:
    def prompt_kept(text: str) -> bool:
        return bool(
            json.loads((server.home / "settings.json").read_text())["answers"]["system_prompt"] == text
        )

    page.settings()
    page.fill("lm-preset-prompt", "pirate")
    page.page.fill("#lm-system textarea", "Answer like a pirate.")
    page.page.click("#lm-save-prompt")
    page.wait_text("#lm-said-prompt", "The preset is saved.")
    page.wait_text("#lm-saved", "Saved")  # the same click ended the typing: neither covers the other
    assert page.page.locator("#lm-preset-prompt [role=option]").count() == 0  # left with Tab, which closes it
    page.fill("lm-system", "")
    wait_for(lambda: prompt_kept(""), 10, "no system prompt")
    page.reload()
    page.settings()
    page.page.click("#lm-preset-prompt input")
    page.page.click("#lm-preset-prompt [role=option]:has-text('pirate')")
    wait_for(lambda: page.value("lm-system") == "Answer like a pirate.", 10, "the chosen prompt")
    wait_for(lambda: prompt_kept("Answer like a pirate."), 10, "the chosen prompt in the settings")
    page.page.click("#lm-delete-prompt")
    page.wait_text("#lm-said-prompt", "The preset is deleted.")
    page.fill("lm-system", "")
    wait_for(lambda: prompt_kept(""), 10, "no system prompt")


# those of the page's own that look for the chat; Gradio has others
INTERVALS = """() => {
    const begin = window.setInterval, end = window.clearInterval;
    window.running = new Set(), window.begun = 0;
    window.setInterval = (...given) => {
        const id = begin(...given);
        if (given[1] === 200) { window.running.add(id); window.begun++; }
        return id;
    };
    window.clearInterval = (id) => { end(id); window.running.delete(id); };
}"""


@pytest.mark.slow
def test_a_press_of_chat_by_key_waits_for_the_chat_until_its_load_has_failed(
    page: PageDriver, server: Server
) -> None:
    page.page.click("#lm-tab-models-button")
    chat = page.page.wait_for_selector("#lm-shelf [data-act=chat]")
    page.page.evaluate(INTERVALS)
    chat.evaluate("(button) => { button.dataset.key = 'missing'; button.focus(); }")
    page.page.keyboard.press("Enter")
    assert page.evaluate("window.begun") == 1
    page.wait_text("#lm-header", "There is no model 'missing' on this computer")
    page.page.wait_for_function("window.running.size === 0", timeout=5000)
    page.page.click("#lm-shelf [data-act=chat]")
    server.wait("ready")


@pytest.mark.slow
def test_a_button_that_goes_away_when_it_is_pressed_by_key_leaves_the_focus_to_the_message(
    page: PageDriver,
) -> None:
    in_box = "document.activeElement === document.querySelector('#lm-message textarea')"
    page.page.fill("#lm-message textarea", "a long story")
    for button in ("#lm-send", "#lm-stop", "#lm-continue", "#lm-stop", "#lm-turn button[aria-label='Retry']"):
        page.page.wait_for_selector(button)
        if button == "#lm-stop":
            page.wait_answer(20)
        page.page.focus(button)
        page.page.keyboard.press("Enter")
        page.page.wait_for_function(in_box)
    page.stop(escape=True)
