"""Drives the page in an installed Chromium or Chrome, in the words of a user."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app_process import wait_for

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
_MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
TIMEOUT_MS = 30_000
# Behind it tags are taken for code, which they are not to Markdown: what the page sees of them is sanitised.
AS_CODE = "> ```\n\n"
# by which a browser asks others by itself, or shows what pages are not meant to; takes the place of
# Playwright's own list, whose parts differ by version
_WITHOUT = (
    "AimEnabled", "AutofillServerCommunication", "HttpsUpgrades", "LensOverlay", "MediaRouter",
    "NetworkTimeServiceQuerying", "OptimizationHints", "PaintHolding", "PreconnectToSearch",
)  # fmt: skip


_AXE = """async ([source, theme, rules]) => {
    if (!window.axe) (0, eval)(source);
    const only = rules.length ? {runOnly: {type: 'rule', values: rules}} : {};
    const found = await axe.run(document, {resultTypes: ['violations'], ...only});
    return found.violations.filter((one) => ['serious', 'critical'].includes(one.impact)).map((one) =>
        `${theme}: ${one.id}: ${one.nodes.slice(0, 4).map((node) => node.html.slice(0, 150)
            + ' ' + (node.failureSummary || '').slice(0, 220)).join(' | ')}`);
}"""


def chromium_path() -> str | None:
    """An installed browser; CHROMIUM names another one."""
    named = os.environ.get("CHROMIUM")
    found = named or next((path for name in _NAMES if (path := shutil.which(name))), None)
    return found or (_MAC if os.path.exists(_MAC) else None)


@contextlib.contextmanager
def open_browser(playwright: Any) -> Iterator[Any]:
    """A headless browser."""
    made = playwright.chromium.launch(
        executable_path=chromium_path(),
        args=["--no-sandbox", "--disable-gpu", f"--disable-features={','.join(_WITHOUT)}"],
    )
    try:
        yield made
    finally:
        made.close()


def given(name: str, content: bytes) -> dict[str, Any]:
    """A file for `attach`."""
    return {"name": name, "mimeType": "application/octet-stream", "buffer": content}


def attach(page: PageDriver, *files: Path | dict[str, Any]) -> None:
    """By the button's own dialog."""
    with page.page.expect_file_chooser() as chooser:
        page.page.click("#lm-attach")
    chooser.value.set_files(list(files))


@dataclass
class PageDriver:
    """One open page."""

    page: Any
    problems: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)  # addresses that answered a request

    @classmethod
    def open(cls, browser: Any, url: str, proxy: str | None = None) -> PageDriver:
        """A page of its own profile; with a proxy, everything it asks of others than 127.0.0.1 goes there."""
        settings = {"server": proxy, "bypass": "127.0.0.1"} if proxy else None
        context = browser.new_context(viewport={"width": 1400, "height": 900}, proxy=settings)
        driver = cls(context.new_page())
        driver._go(url)
        return driver

    def another(self, url: str) -> PageDriver:
        """A second window of the same browser, which has the page's files already."""
        driver = PageDriver(self.page.context.new_page())
        driver._go(url)
        return driver

    def _go(self, url: str) -> None:
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("response", lambda response: self.answered.append(response.url))
        self.page.goto(url)
        self._wait_shown()

    def close(self) -> None:
        """This window, and with the last one its profile."""
        context = self.page.context
        self.page.close()
        if not context.pages:
            context.close()
        assert self.problems == []

    def _wait_shown(self) -> None:
        self.page.wait_for_selector("#lm-message textarea")
        wait_for(lambda: self.text("#lm-header") != "", 30, "the header")

    def reload(self) -> None:
        self.page.reload()
        self._wait_shown()

    def evaluate(self, script: str) -> Any:
        return self.page.evaluate(script)

    def text(self, selector: str) -> str:
        return str(self.page.evaluate("s => document.querySelector(s)?.innerText ?? ''", selector)).strip()

    def _texts(self, selector: str) -> list[str]:
        script = "s => [...document.querySelectorAll(s)].map(e => e.textContent.trim())"
        return list(self.page.evaluate(script, selector))

    def wait_text(self, selector: str, text: str) -> None:
        wait_for(lambda: text in self.text(selector), 30, f"'{text}' in {selector}")

    def visible(self, selector: str) -> bool:
        script = """s => {
            const e = document.querySelector(s), b = e?.getBoundingClientRect();
            return !!e && getComputedStyle(e).visibility === 'visible' && b.width > 0 && b.right > 1
                && b.left < innerWidth - 1;
        }"""
        time.sleep(0.35)  # the drawers slide
        return bool(self.page.evaluate(script, selector))

    # --- the conversation

    def start_again(self) -> None:
        self.page.set_viewport_size({"width": 1400, "height": 900})
        self.chat()
        self.page.evaluate("document.querySelector('#lm-stop')?.click()")  # or it ends by itself just now
        self.page.wait_for_selector("#lm-send")
        self.page.click("#lm-new")
        self.wait_questions([])
        self.page.fill("#lm-message textarea", "")

    def wait_questions(self, expected: list[str]) -> None:
        wait_for(lambda: self.questions() == expected, 30, f"the questions {expected}")

    def type(self, text: str) -> None:
        self.page.fill("#lm-message textarea", text)
        self.page.press("#lm-message textarea", "Enter")

    def send(self, text: str) -> None:
        """Until the page shows the question, and with it that the answer is under way."""
        asked = len(self.questions())
        self.type(text)
        wait_for(lambda: len(self.questions()) == asked + 1, 30, text)

    def retry(self) -> None:
        before = self.line()
        self.press("Retry", "#lm-turn")
        wait_for(lambda: self.line() != before, 30, "another answer")

    def questions(self) -> list[str]:
        return self._texts(".lm-turns [data-testid=user]")

    def answer(self) -> str:
        parts = self._texts("#lm-turn [data-testid=bot]")
        return parts[0] if parts else ""

    def copied(self) -> str:
        """What the button under the last answer puts on the clipboard."""
        self.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.page.locator(
            "#lm-turn .bot-row ~ .message-buttons button[aria-label='Copy message']"
        ).last.click()
        return str(self.page.evaluate("navigator.clipboard.readText()"))

    def line(self) -> str:
        return self.text("#lm-turn .lm-line")

    def turn_html(self) -> str:
        """The rendered messages of the last turn."""
        script = "() => [...document.querySelectorAll('#lm-turn .prose')].map(e => e.innerHTML).join('\\n')"
        return str(self.page.evaluate(script))

    def loaded_images(self) -> int:
        script = "() => [...document.images].filter(i => i.naturalWidth > 0).length"
        return int(self.page.evaluate(script))

    def wait_idle(self) -> None:
        wait_for(lambda: self.page.query_selector("#lm-stop") is None, 30, "the end of the answer")

    def wait_answer_is(self, text: str) -> None:
        wait_for(lambda: self.answer() == text and self.line() != "", 30, text)

    def wait_answer(self, length: int) -> None:
        wait_for(lambda: len(self.answer()) >= length, 30, f"{length} characters of an answer")

    def watch(self, look: Callable[[], tuple[Any, Any]], times: int) -> tuple[list[Any], list[Any]]:
        """What is seen of two things that should move, four times a second: so many times at least, and until
        both have moved; ten seconds at most."""
        self.wait_answer(2)
        first: list[Any] = []
        second: list[Any] = []
        deadline = time.monotonic() + 10
        while len(first) < times or (
            min(len(set(first)), len(set(second))) < 2 and time.monotonic() < deadline
        ):
            for seen, one in zip((first, second), look(), strict=True):
                seen.append(one)
            time.sleep(0.25)
        return first, second

    def stop(self, escape: bool = False) -> float:
        """Seconds from the click to the Send button."""
        started = time.perf_counter()
        if escape:
            self.page.keyboard.press("Escape")
        else:
            self.page.click("#lm-stop")
        self.page.wait_for_selector("#lm-send")
        seconds = time.perf_counter() - started
        wait_for(lambda: self.line() != "", 5, "the line of a stopped answer")
        return seconds

    def press(self, label: str, inside: str) -> None:
        self.page.click(f"{inside} button[aria-label='{label}']")

    def press_button(self, text: str) -> None:
        self.page.click(f"button:has-text('{text}')")

    def _edit(self, inside: str, text: str) -> None:
        self.page.locator(f"{inside} button[aria-label='Edit']").first.click()
        self.page.fill(f"{inside} textarea", text)
        self.press("Submit", inside)

    def edit_last(self, text: str) -> None:
        self._edit("#lm-turn", text)

    def edit_first(self, text: str) -> None:
        self._edit("#lm-history", text)

    # --- the chats

    def titles(self) -> list[str]:
        return self._texts(".lm-open")

    def _row(self, title: str) -> Any:
        """The first chat with this title, or with one that begins so."""
        wait_for(lambda: any(found.startswith(title) for found in self.titles()), 30, f"the chat {title}")
        titles = self.titles()
        place = next(i for i, found in enumerate([*titles, title]) if found == title)
        if place == len(titles):
            place = next(i for i, found in enumerate(titles) if found.startswith(title))
        return self.page.locator("li[data-chat]").nth(place)

    def open_chat(self, title: str) -> None:
        self._row(title).locator(".lm-open").click()
        wait_for(lambda: self._row(title).get_attribute("aria-current") == "true", 10, f"chat {title}")

    def rename(self, title: str, new: str) -> None:
        row = self._row(title)
        row.hover()
        row.locator("[data-act=rename]").click()
        self.page.fill(".lm-rename", new)
        self.page.keyboard.press("Enter")
        wait_for(lambda: new in self.titles(), 10, "the new title")

    def delete(self, title: str) -> None:
        count = len(self.titles())
        row = self._row(title)
        row.hover()
        for _ in range(2):  # the second click confirms
            row.locator("[data-act=delete]").click()
        wait_for(lambda: len(self.titles()) == count - 1, 10, "one chat less")

    # --- panel and settings

    def figure(self, key: str) -> str:
        return self.text(f"#lm-live [data-key='{key}']")

    def settings(self) -> None:
        self.page.click("#lm-tab-settings-button")
        self.page.wait_for_selector("#lm-apply")

    def open_tab(self, name: str) -> None:
        self.page.click(f"#lm-tab-{name}-button")
        self.page.wait_for_selector(f"#lm-tab-{name}", state="visible")

    def chat(self) -> None:
        self.page.click("#lm-tab-chat-button")
        self.page.wait_for_selector("#lm-message textarea")

    def _field(self, elem_id: str) -> Any:
        return self.page.locator(f"#{elem_id} input, #{elem_id} textarea").first

    def value(self, elem_id: str) -> str:
        return str(self._field(elem_id).input_value())

    def fill(self, elem_id: str, text: str) -> None:
        self._field(elem_id).fill(text)
        self._field(elem_id).press("Tab")

    def choose_model(self, text: str) -> None:
        self._field("lm-model").fill(text)
        self._field("lm-model").press("Enter")

    def choose_draft(self, label: str) -> None:
        self.page.click(f"#lm-draft label:has-text('{label}')")
        self.wait_text("#lm-saved", "")

    def apply(self, expected: str) -> None:
        self.page.click("#lm-apply")
        self.wait_text("#lm-applied", expected)

    def unlabelled(self) -> list[str]:
        """Controls that a screen reader could not name."""
        script = """() => {
            const named = (e) => (e.innerText || '').trim() || e.ariaLabel
                || (e.labels && [...e.labels].some((label) => label.textContent.trim()));
            return [...document.querySelectorAll('button, input, select, textarea')]
                .filter((e) => e.offsetParent !== null && !named(e)).map((e) => e.outerHTML.slice(0, 160));
        }"""
        return list(self.page.evaluate(script))

    def violations(self, name: str, rules: Sequence[str] = ()) -> list[str]:
        """What axe finds that is serious or critical; with rules, by these alone."""
        import axe_playwright_python

        source = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
        return list(self.page.evaluate(_AXE, [source, name, list(rules)]))

    def theme(self, name: str) -> None:
        self.page.select_option("#lm-theme", name)

    def background(self) -> tuple[int, int, int]:
        time.sleep(0.3)
        colour = str(self.page.evaluate("() => getComputedStyle(document.body).backgroundColor"))
        red, green, blue = (int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
        return red, green, blue

    def toggle(self, name: str) -> None:
        self.page.click(f"[data-toggle={name}]")

    def toggle_away(self) -> None:
        self.page.mouse.click(20, 400)
