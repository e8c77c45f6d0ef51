"""Takes the pictures of the README: the real app with the embedded model, in an installed Chromium.

python tests/app/screenshots.py [FOLDER]      docs/screenshots if not said otherwise
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from app_process import REAL, Server, running_app, wait_for
from browser import PageDriver, open_browser

ROOT = Path(__file__).resolve().parents[2]
PHONE, DESK = {"width": 390, "height": 800}, {"width": 1400, "height": 900}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"}


def shoot(page: PageDriver, folder: Path, name: str) -> None:
    """Once all has settled."""
    page.page.mouse.move(700, 890)
    page.evaluate("document.getElementById('lm-live').scrollTop = 0")
    page.page.wait_for_timeout(1500)
    page.page.screenshot(path=folder / f"{name}.png")


def first_start(browser: Any, app: Server, folder: Path) -> None:
    """What a first start shows, and the Models tab."""
    page = PageDriver.open(browser, app.url)
    wait_for(lambda: "est. at most" in page.text("#lm-welcome"), 60, "what was detected and measured")
    shoot(page, folder, "first-start")
    page.open_tab("models")
    page.wait_text("#lm-suggestions", "Get and chat")
    for theme in ("light", "dark"):
        page.theme(theme)
        shoot(page, folder, f"models-{theme}")
    page.page.set_viewport_size(PHONE)
    page.theme("light")
    shoot(page, folder, "models-phone")
    page.page.context.close()


def conversation(browser: Any, app: Server, folder: Path) -> None:
    """A chat, as answers over a slow link look, and the other tabs."""
    page = PageDriver.open(browser, app.url)
    page.theme("light")
    page.page.click("[data-timeline] summary")
    questions = (
        "Tell me a story about a fox.",
        "Sam has 3 apples and buys 4 more. How many apples does he have now?",
    )
    for question in (*questions, "who are you?"):
        page.send(question)
        page.wait_idle()
    wait_for(lambda: "at best" in page.figure("reuse"), 20, "what could be reused")
    shoot(page, folder, "chat-light")
    page.theme("dark")
    shoot(page, folder, "chat-dark")
    page.theme("light")
    page.page.set_viewport_size(PHONE)
    shoot(page, folder, "phone")
    page.toggle("live")
    shoot(page, folder, "phone-live")
    page.toggle_away()
    page.page.set_viewport_size(DESK)
    page.open_tab("settings")
    shoot(page, folder, "settings")
    page.open_tab("benchmark")
    page.page.locator("#lm-bench-prompts input[type=number]").fill("1")
    page.page.locator("#lm-bench-tokens input[type=number]").fill("40")
    page.page.click("#lm-bench-run")
    wait_for(lambda: "same tokens" in page.text("#lm-bench-result"), 120, "a result")
    page.page.locator("#lm-bench-result").scroll_into_view_if_needed()
    shoot(page, folder, "benchmark")


def main() -> None:
    """All pictures."""
    from playwright.sync_api import sync_playwright

    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    slow = ("--vram-budget", "72MiB", "--emulated-link", "100MB/s")
    with (
        tempfile.TemporaryDirectory() as homes,
        sync_playwright() as playwright,
        open_browser(playwright) as chromium,
    ):
        with running_app(Path(homes) / "first", REAL, "--model", "demo", **OFFLINE) as app:
            app.wait("ready", 120)
            first_start(chromium, app, folder)
        with running_app(Path(homes) / "chat", REAL, "--model", "demo", *slow, **OFFLINE) as app:
            app.wait("ready", 120)
            conversation(chromium, app, folder)


if __name__ == "__main__":
    main()
