"""Who looks at the page while benchmarks/panel_cost.py measures: a script that asks as the page's scripts do,
or the page itself in Chromium, in a process of its own, or someone who opens and closes its panel. Measures
nothing.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

import psutil

ALONE, SCRIPT, BROWSER, PANEL = "alone", "script", "browser", "panel"
LIVE_S = 1.0  # as static/live.js asks


class Client:
    """Asks as the page's scripts do."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._shown = {"panel": "", "meter": "", "turn": ""}

    def _ask(self, path: str, query: dict[str, str]) -> Any:
        self._http.request("GET", f"{path}?{urllib.parse.urlencode(query)}")
        answer = self._http.getresponse()
        content = answer.read()
        assert answer.status == 200, (path, answer.status, content[:300])
        return json.loads(content)

    def now(self, chat_id: str) -> float:
        """What has moved; seconds until the next question."""
        told = self._ask("/now", {**self._shown, "chat": chat_id, "language": "en", "typed": "0"})
        self._shown.update({name: told[name]["key"] for name in self._shown if name in told})
        return float(told["wait"])

    def live(self) -> None:
        """The map, the link and the step."""
        assert self._ask("/live", {"language": "en", "timeline": "true"})["cells"]


def watch_by_script(port: int, chat_id: str) -> None:
    """Ask at the page's rate."""
    client = Client(port)
    next_live = next_now = time.monotonic()
    while True:
        now = time.monotonic()
        if now >= next_live:
            client.live()
            next_live = now + LIVE_S
        if now >= next_now:
            next_now = now + client.now(chat_id)
        time.sleep(max(0.0, min(next_live, next_now) - time.monotonic()))


def watch_by_browser(port: int) -> None:
    """Look at the page, with the step's timeline open."""
    from browser import open_browser
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, open_browser(playwright) as browser:
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("[data-map]")
        page.click("[data-timeline] summary")
        for _ in sys.stdin:  # a line for each time that the panel is put away or brought back
            page.click("[data-toggle=live]")


class Watcher:
    """A process that looks at the page; nobody for ALONE."""

    def __init__(self, kind: str, port: int, chat_id: str, cores: set[int]) -> None:
        """port: of the page's server. chat_id: what it looks at. cores: what it may use."""
        command = [sys.executable, __file__, kind, str(port), chat_id]
        self._process: subprocess.Popen[bytes] | None = None
        self._family: list[int] = []
        self._kind, self._away = kind, False
        if kind != ALONE:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, preexec_fn=lambda: os.sched_setaffinity(0, cores)
            )
        time.sleep(8.0 if kind in (BROWSER, PANEL) else 1.0)  # its start is no part of it

    def halt(self, halted: bool) -> None:
        """Stop all its processes where they are, or let them go on; of PANEL, put the panel away."""
        if self._process is None:
            return
        if self._kind == PANEL:
            if halted != self._away:
                self._away = halted
                assert self._process.stdin is not None
                self._process.stdin.write(b"\n")
                self._process.stdin.flush()
            return
        if not self._family:  # a browser has process groups of its own
            watcher = psutil.Process(self._process.pid)
            self._family = [watcher.pid, *(one.pid for one in watcher.children(recursive=True))]
        for pid in self._family:
            with contextlib.suppress(ProcessLookupError):  # a browser ends processes that it keeps to spare
                os.kill(pid, signal.SIGSTOP if halted else signal.SIGCONT)

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            assert self._process.poll() is None, "the watcher failed"
            self._process.communicate()


def end_with_stdin() -> None:
    """Whoever started this process holds its other end."""
    sys.stdin.read()
    os.killpg(0, signal.SIGTERM)


def main() -> None:
    """Watch until whoever started this process ends. Arguments: kind, port, chat."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/app"))
    kind, port, chat_id = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    os.setpgid(0, 0)  # a browser's processes end with it
    if kind == SCRIPT:  # in this thread: where it fails, the process ends
        ended = threading.Thread(target=end_with_stdin, daemon=True)
        ended.start()
        watch_by_script(port, chat_id)
    else:
        watch_by_browser(port)
        os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    main()
