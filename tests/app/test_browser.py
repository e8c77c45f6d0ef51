"""The page in a real browser on the fake engine: what a user sees and does, and what stays here. What plain
runs look at of it is here where it can be: to open another module's page takes five seconds."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from app_process import LOOKING, AppStart, Server, wait_for
from browser import AS_CODE, PageDriver
from fake_engine import MARKDOWN, answer_to

from app.page import TABS

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("on_a_new_chat")]
OWN_SAMPLING = "#lm-own-sampling input"


def _write_long_chat(folder: Path) -> None:
    turns = [
        {"role": role, "content": f"{role} {i}", "created": 1, "finish": "stop", "error": "", "stats": {}}
        for i in range(60)
        for role in ("user", "assistant")
    ]
    chat = {"schema": 1, "id": "c" * 32, "title": "long chat", "created": 1, "updated": 1, "messages": turns}
    folder.mkdir(parents=True)
    (folder / f"{'c' * 32}.json").write_text(json.dumps(chat))


@pytest.fixture(scope="module")
def app_start() -> AppStart:
    return AppStart(environment=LOOKING, prepare=lambda home: _write_long_chat(home / "chats"))


def test_a_message_is_answered_with_rendered_markdown_and_a_line_of_figures(page: PageDriver) -> None:
    page.send("show me markdown")
    page.wait_text("#lm-turn", "That is all.")
    page.wait_idle()
    assert page.turn_html().count("<li>") == 2 and "<strong>bold</strong>" in page.turn_html()
    assert "<table>" in page.turn_html() and "language-python" in page.turn_html()
    assert page.line().endswith("accepted 50 %") and "24 tokens" in page.line()


def test_tokens_stream_and_the_panel_moves(page: PageDriver) -> None:
    page.send("tell me a long story")
    lengths, tokens = page.watch(lambda: (len(page.answer()), page.figure("new_tokens")), 6)
    assert lengths == sorted(lengths) and len(set(lengths)) >= 4
    assert len(set(tokens)) >= 4
    assert page.figure("hit_rate") == "85 %" and float(page.figure("tokens_per_s")) > 10
    page.stop()


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_is_quick_and_keeps_the_text(page: PageDriver, how: str) -> None:
    page.send("tell me a long story")
    page.wait_answer(200)
    seconds = page.stop(escape=how == "escape")
    assert (
        seconds < 2.0
    )  # mostly the browser's on a busy machine; the answer ends within 0.3 s (test_service)
    kept = page.answer()
    time.sleep(0.5)
    assert page.answer() == kept and answer_to("long").startswith(kept) and "stopped" in page.line()


def test_a_reload_finds_the_chat_and_the_running_answer(page: PageDriver) -> None:
    page.send("tell me a long story")
    page.wait_answer(100)
    before = len(page.answer())
    page.reload()
    page.wait_answer(before + 100)
    page.stop()
    kept = page.answer()
    page.reload()
    page.wait_answer(1)
    assert page.answer() == kept and page.titles()[0] == "tell me a long story"


def test_retry_and_edits(page: PageDriver) -> None:
    page.send("hello")
    page.wait_idle()
    page.retry()
    page.wait_idle()
    assert page.questions() == ["hello"]
    page.edit_last("good evening")
    page.wait_answer_is(answer_to("good evening"))
    page.wait_questions(["good evening"])
    page.wait_idle()
    page.send("and more")
    page.wait_idle()
    page.edit_first("changed")
    page.wait_answer_is(answer_to("changed"))
    page.wait_questions(["changed"])
    page.wait_idle()
    page.press("Previous version", "#lm-turn .lm-branch")
    page.wait_questions(["good evening", "and more"])
    assert page.titles()[0] == "hello"


def test_chats_are_renamed_and_deleted(page: PageDriver) -> None:
    page.send("the first words")
    page.wait_idle()
    count = len(page.titles())
    page.rename("the first words", '<img src=x onerror="window.hacked=1"> & co')
    assert '<img src=x onerror="window.hacked=1"> & co' in page.titles()
    assert page.evaluate("window.hacked") is None
    page.delete("<img src=x")
    assert len(page.titles()) == count - 1
    page.wait_questions([])


def test_two_windows_show_the_same_chats(page: PageDriver, server: Server) -> None:
    page.send("tell me a long story in two windows")
    other = page.another(server.url)
    other.wait_answer(50)
    other.page.click("#lm-stop")
    page.wait_text("#lm-turn", "stopped")
    other.delete("tell me a long story in two windows")
    page.wait_questions([])
    page.send("still there?")  # the chat is gone: this is a new one
    other.open_chat("still there?")
    other.close()


ACTIVE = "#lm-turn .prose :is(script, [onerror], [href^=javascript])"


def test_html_in_an_answer_runs_nothing_and_fetches_nothing(page: PageDriver) -> None:
    page.send("attack")
    page.wait_idle()
    assert page.page.locator(ACTIVE).count() == 0
    assert page.answer().startswith("Look: <script>window.hacked = 1</script><img src=x")  # all of it is text
    assert page.evaluate("window.hacked") is None
    assert page.loaded_images() == 0


def test_html_in_a_question_runs_nothing(page: PageDriver) -> None:
    page.send('<img src=x onerror="window.hacked=5"><script>window.hacked=6</script> hi')
    page.wait_idle()
    assert page.evaluate("window.hacked") is None and page.page.locator(ACTIVE).count() == 0


def test_a_budget_is_applied_and_a_bad_one_is_explained(page: PageDriver) -> None:
    page.settings()
    page.fill("lm-budget", "24MiB")
    page.apply("24.0 MiB")
    assert "31 % of the experts stay in emulated device memory (367 of 1,184)" in page.text("#lm-share")
    wait_for(lambda: page.figure("memory").endswith("of 24.0 MiB"), 5, "the panel")
    page.fill("lm-budget", "1MiB")
    page.apply("at least 12.0 MiB")
    page.fill("lm-budget", "lots")
    page.apply("'lots' is not a size")
    page.reload()
    page.settings()
    assert page.value("lm-budget") == "24MiB"
    page.fill("lm-budget", "auto")
    page.apply("32.0 MiB")


def test_settings_are_checked_kept_and_used(page: PageDriver, server: Server) -> None:
    page.settings()
    assert page.page.is_checked(OWN_SAMPLING)
    assert "no recommendation: the numbers below are used" in page.text("#lm-own")
    page.fill("lm-temperature", "99")
    page.wait_text("#lm-saved", "Temperature 99.0 is out of range")
    wait_for(lambda: not page.page.is_checked(OWN_SAMPLING), 5, "the user's own number to win")
    page.fill("lm-temperature", "0.25")
    page.page.click("#lm-thinking input")
    page.page.click("#lm-thinking [role=option]:has-text('Low effort')")
    page.fill("lm-max", "5")
    page.choose_draft("Fixed")
    page.fill("lm-draft-length", "65")
    page.wait_text("#lm-saved", "Draft length 65 is out of range")
    page.fill("lm-draft-length", "6")
    page.wait_text("#lm-saved", "Saved")
    kept = json.loads((server.home / "settings.json").read_text())["answers"]
    assert (kept["temperature"], kept["max_new_tokens"], kept["draft_length"]) == (0.25, 5, 6)
    assert (kept["own_sampling"], kept["thinking"]) == (False, "low")
    page.chat()
    page.send("hello")
    page.wait_idle()
    assert page.line().endswith("cut at the token limit")
    page.settings()
    page.choose_draft("Auto")
    page.fill("lm-max", "1024")
    page.wait_text("#lm-saved", "Saved")


def test_every_control_has_a_label(page: PageDriver) -> None:
    assert page.unlabelled() == []
    page.settings()
    assert page.unlabelled() == []


@pytest.mark.slow
def test_dark_light_and_the_systems_choice(page: PageDriver) -> None:
    page.theme("dark")
    dark = page.background()
    page.reload()
    assert page.background() == dark
    page.theme("light")
    light = page.background()
    assert sum(dark) < 150 < 600 < sum(light)
    page.theme("auto")
    page.page.emulate_media(color_scheme="dark")
    assert page.background() == dark
    page.page.emulate_media(color_scheme="light")
    assert page.background() == light


@pytest.mark.slow
def test_a_phone_screen_shows_the_chat_and_opens_the_rest_as_drawers(page: PageDriver) -> None:
    page.page.set_viewport_size({"width": 390, "height": 800})
    page.send("hello")
    page.wait_idle()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert not page.visible("#lm-live") and not page.visible("#lm-nav")
    page.toggle("live")
    assert page.visible("#lm-live")
    page.toggle_away()
    assert not page.visible("#lm-live")
    page.toggle("nav")
    page.open_chat("hello")
    assert not page.visible("#lm-nav")


@pytest.mark.slow
def test_a_long_chat_is_windowed(page: PageDriver) -> None:
    page.open_chat("long chat")
    page.wait_text("#lm-turn", "assistant 59")
    page.wait_questions([f"user {i}" for i in range(39, 60)])
    page.press_button("Show earlier messages")
    page.wait_text("#lm-history", "user 19")
    page.wait_questions([f"user {i}" for i in range(19, 60)])


def test_versions_are_switched_by_their_arrows_in_the_middle_of_a_chat(page: PageDriver) -> None:
    page.send("one")
    page.wait_idle()
    page.retry()
    page.wait_idle()
    assert page.text("#lm-turn .lm-branch") == "◂\n2 / 2\n▸"
    page.send("two")
    page.wait_idle()
    page.edit_first("changed")
    page.wait_answer_is(answer_to("changed"))
    page.wait_idle()
    page.press("Previous version", "#lm-turn .lm-branch[data-role=user]")
    page.wait_questions(["one", "two"])
    page.press("Previous version", "#lm-history .lm-branch[data-role=assistant]")
    page.wait_questions(["one"])  # the first answer, which nobody asked on
    page.press("Next version", "#lm-turn .lm-branch[data-role=assistant]")
    page.wait_questions(["one", "two"])
    focused = page.evaluate("document.activeElement.closest('.lm-branch')?.dataset.role ?? ''")
    assert focused in ("", "assistant")
    page.press("Next version", "#lm-history .lm-branch[data-role=user]")
    page.wait_questions(["changed"])
    page.reload()
    page.wait_questions(["changed"])
    page.wait_text("#lm-turn .lm-branch", "2 / 2")


def test_a_stopped_answer_is_continued(page: PageDriver) -> None:
    page.send("tell me a long story")
    page.wait_answer(200)
    page.stop()
    kept = page.answer()
    page.page.click("#lm-continue")
    page.wait_answer(len(kept) + 100)
    assert page.page.query_selector("#lm-continue") is None
    page.stop()
    assert page.answer().startswith(kept) and answer_to("long").startswith(page.answer())
    page.send("hello")
    page.wait_idle()
    assert page.page.query_selector("#lm-continue") is None  # it ended by itself
    assert "of 4,096 tokens used" in page.text("#lm-meter")


def test_a_refusal_goes_with_its_reason(page: PageDriver) -> None:
    page.send("tell me a long story")
    page.wait_answer(20)
    page.type("another")
    page.wait_text("#lm-notice", "An answer is still being written")
    page.stop()
    wait_for(lambda: page.text("#lm-notice") == "", 10, "nothing to wait for")
    assert page.value("lm-message") == "another"


HOSTILE = r"""hostile <div style="position:fixed;inset:0;z-index:99" onclick="window.hacked=1">over</div>
<details open ontoggle="window.hacked=2"><summary>x</summary></details><form action="/x">secret?<input></form>
<svg onload="window.hacked=3"></svg><iframe srcdoc="<script>parent.hacked=4</script>"></iframe>
<style>body { display: none }</style><link rel=stylesheet href=//203.0.113.7/x.css>

[link](javascript:window.hacked=5) ![x](x" onerror="window.hacked=6) $$\href{javascript:window.hacked=7}{x}$$
\(\htmlData{x=y}{z}\) `<img src=x onerror=window.hacked=8>` <a href="javascript:window.hacked=9">a</a>"""


def test_code_is_copied_formulas_are_set_and_hostile_markup_stays_inert(page: PageDriver) -> None:
    page.send("show me markdown")
    page.wait_idle()
    assert page.copied() == MARKDOWN
    page.page.click("#lm-turn .copy_code_button")
    assert page.evaluate("navigator.clipboard.readText()").strip() == "print('hello')"
    page.send(r"sums: \(a_1 + b\) and \[c^2\] and $$d$$ but $5 and `\(e\)`")
    page.wait_idle()
    assert page.page.locator("#lm-turn [data-testid=user] .katex").count() == 3
    assert page.page.locator("#lm-turn [data-testid=user] .katex-display").count() == 2
    dollars = r"so $a_1 < b$, **$-x$** and $5 * y * z$, but $5 and $6, and `$e$`"
    page.send(dollars)
    page.wait_idle()
    formulas = "[...document.querySelectorAll('#lm-turn [data-testid=user] .katex')]"
    sources = f"{formulas}.map((one) => one.querySelector('annotation').textContent.trim())"
    assert page.evaluate(sources) == [rf"\relax {one}" for one in ("a_1 < b", "-x", "5 * y * z")]
    assert page.evaluate(f"{formulas}.every((one) => !one.querySelector('.katex-error'))")
    assert page.copied() == answer_to(dollars)
    page.send(AS_CODE + HOSTILE)
    page.wait_idle()
    for link in page.page.locator("#lm-turn a").all():
        assert not str(link.get_attribute("href") or "").startswith("javascript")
    assert page.evaluate("window.hacked") is None and page.loaded_images() == 0
    kept = page.page.locator("#lm-turn .prose :is(iframe, style, link, script, [onload], [onclick])")
    assert kept.count() == 0
    forms = page.page.locator("#lm-turn .prose :is(form, input)")
    assert forms.count() > 0 and not any(form.is_visible() for form in forms.all())
    page.send("still there?")  # nothing covers the box to write in, and the page is shown
    page.wait_idle()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_axe_finds_nothing_serious_on_any_tab_in_any_theme_and_width(
    width: int, theme: str, page: PageDriver
) -> None:
    page.send("show me markdown")
    page.wait_idle()
    found: list[str] = []
    page.page.set_viewport_size({"width": width, "height": 900})
    page.theme(theme)
    page.background()  # it fades
    for tab in TABS:
        page.open_tab(tab)
        rules = ["color-contrast"] if theme == "dark" else []  # all that a theme changes
        found += page.violations(f"{tab}, {theme}, {width}", rules)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.theme("auto")
    assert found == [], "\n".join(found)
