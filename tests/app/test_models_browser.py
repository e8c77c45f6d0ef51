"""The Models tab in a real browser, on a Hub of this computer: search, get and chat; pause, kill and go on;
gated; delete; languages."""

from __future__ import annotations

import re
import signal
import socketserver
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from app_process import FORKED, REAL, AppStart, Server, running_app, wait_for
from browser import PageDriver
from support.gptq_checkpoints import Model, write_checkpoint
from support.hub_server import TOKEN, Fault, HubServer, files_of, hub_server

from app.settings import AnswerSettings, SettingsStore

pytestmark = pytest.mark.browser
MOE, LOCKED, DENSE = "org/tiny-moe", "org/locked-moe", "org/dense"
LONG, HUGE = "org/long-moe", "org/huge-moe"
WEIGHTS = "model.safetensors"
LOADING = re.compile(r"(?s)(?=.*\d\.\d (M|k)B/s).*\d+\.\d (K|M)iB of 3\.0 MiB \(\d+ %\)")


@pytest.fixture(scope="module")
def hub(tiny16: Any) -> Iterator[HubServer]:
    files = files_of(tiny16("qwen2_moe"))
    with hub_server() as server:
        for name in (MOE, LOCKED, LONG):
            server.commit(name, files)
        server.commit(DENSE, {**files, "config.json": b'{"model_type": "llama"}'})
        server.repos[LOCKED].gated = True
        server.repos[MOE].licence = "apache-2.0"
        yield server


@dataclass
class Trap:
    """A proxy for whatever is asked of others than 127.0.0.1."""

    address: str
    asked: list[bytes] = field(default_factory=list)


@pytest.fixture(scope="module")
def trap() -> Iterator[Trap]:
    class Proxy(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            made.asked.append(self.request.recv(200))
            self.request.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Proxy) as proxy:
        made = Trap(f"http://127.0.0.1:{proxy.server_address[1]}")
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield made
        proxy.shutdown()


def environment(hub: HubServer) -> dict[str, str]:
    """Of an app that a user started who has never logged in."""
    return {
        "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", "HF_TOKEN": "",
        "HF_HOME": "/nonexistent", "FAKE_LOAD_S": "0.5",
    }  # fmt: skip


@pytest.fixture(scope="module")
def app_start(hub: HubServer, trap: Trap) -> AppStart:
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), trap.address)
    return AppStart(
        REAL, ("--model", "demo"), {**environment(hub), **proxies}, prepare=answer_briefly, ready_s=120,
        proxy=trap.address,
    )  # fmt: skip


def answer_briefly(home: Path) -> None:
    """Random weights never end an answer by themselves."""
    home.mkdir()
    SettingsStore(home / "settings.json").save(answers=AnswerSettings(max_new_tokens=24))


def open_models(page: PageDriver) -> None:
    page.page.click("#lm-tab-models-button")
    page.page.wait_for_selector("#lm-query")


def search(page: PageDriver, words: str) -> None:
    open_models(page)
    page.fill("lm-query", words)
    page.page.click("#lm-search-button")
    page.wait_text("#lm-results", "Found on the Hub")


def press(page: PageDriver, part: str, act: str, repo_id: str) -> None:
    page.page.click(f"#lm-{part} [data-model='{repo_id}'] [data-act='{act}']")


def card(page: PageDriver, part: str, repo_id: str) -> str:
    return page.text(f"#lm-{part} [data-model='{repo_id}']")


def wait_card(page: PageDriver, part: str, repo_id: str, text: str, timeout_s: float = 30) -> None:
    wait_for(lambda: text in card(page, part, repo_id), timeout_s, f"'{text}' in {part} {repo_id}")


def state(page: PageDriver, repo_id: str) -> str:
    script = "name => document.querySelector(`#lm-queue [data-model='${name}']`)?.dataset.state ?? ''"
    return str(page.page.evaluate(script, repo_id))


def test_a_first_start_says_what_is_there_and_proposes_what_fits(page: PageDriver, hub: HubServer) -> None:
    wait_for(lambda: "This computer" in page.text("#lm-welcome"), 30, "what was detected")
    welcome = page.text("#lm-welcome")
    assert "RAM" in welcome and "free" in welcome
    assert 1 <= page.page.locator("#lm-welcome .lm-model").count() <= 3
    assert "NaN" not in welcome and "undefined" not in welcome
    assert hub.requests == []  # nobody was asked for it


@pytest.mark.slow
def test_a_search_tells_what_fits_and_why_the_rest_does_not_run(page: PageDriver) -> None:
    search(page, "org/")
    wait_card(page, "results", MOE, "Fits:")
    found = card(page, "results", MOE)
    assert re.search(
        r"1\.5 M parameters, 807\.9 K a token · 3\.0 MiB · 512 tokens of context · apache-2\.0", found
    )
    assert re.search(r"Fits: \d+\.\d MiB RAM", found) and "Get and chat" in found
    wait_card(page, "results", LOCKED, "gated")
    assert "llama is no Mixture of Experts" in card(page, "results", DENSE)
    assert page.page.locator(f"#lm-results [data-model='{DENSE}'].grey button").count() == 0
    search(page, "nothing-like-this")
    page.wait_text("#lm-results", "try other words")
    assert page.unlabelled() == []


@pytest.mark.slow
def test_a_gated_model_comes_with_a_token_that_stays_secret(
    page: PageDriver, server: Server, hub: HubServer
) -> None:
    search(page, f"{hub.url}/{LOCKED}")
    wait_card(page, "results", LOCKED, "ask for access")
    page.page.click("#lm-token-box button")
    page.fill("lm-token", "two words")
    page.page.click("#lm-keep-token")
    page.wait_text("#lm-models-notice", "no access token")
    page.page.locator("#lm-token input").fill(TOKEN)
    page.page.click("#lm-keep-token")
    wait_card(page, "results", LOCKED, "Get and chat")
    kept = server.home / "hub-token"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600 and kept.read_text() == TOKEN
    assert f"…{TOKEN[-4:]}" in page.text("#lm-token-state")
    page.reload()
    open_models(page)
    assert TOKEN not in page.page.content() and TOKEN not in Path(f"{server.home}.log").read_text()


@pytest.mark.slow
def test_it_pauses_is_killed_and_goes_on_at_the_byte(hub: HubServer, browser: Any, tmp_path: Path) -> None:
    home = tmp_path / "home"
    hub.rate, hub.requests[:] = 1e5, []  # so that it is far from its end whatever clicks take
    with running_app(home, FORKED, **environment(hub)) as app:
        page = PageDriver.open(browser, app.url)
        search(page, LONG)
        wait_card(page, "results", LONG, "Get and chat")
        press(page, "results", "get-chat", LONG)
        wait_for(lambda: LOADING.search(card(page, "queue", LONG)), 20, "a rate, and how much has arrived")
        press(page, "queue", "pause", LONG)
        wait_card(page, "queue", LONG, "paused")
        held = part_bytes(home)
        press(page, "queue", "resume", LONG)
        wait_for(lambda: part_bytes(home) > held + 100_000, 20, "more bytes")
        app.process.send_signal(signal.SIGKILL)
        app.process.wait()
        page.page.context.close()
    (home / "run" / "server.json").unlink()  # it says where the killed one was
    kept = part_bytes(home)
    hub.rate, hub.requests[:] = None, []
    with running_app(home, FORKED, **environment(hub)) as app:  # nobody clicks: it goes on, and loads
        wait_for(lambda: app.health()["model"] == LONG, 30, "the model that was got")
        total = len(next(iter(hub.repos[LONG].commits.values()))["model.safetensors"])
        assert sum(one.sent for one in hub.bodies("model.safetensors")) == total - kept
        app.wait("ready")
        assert (home / "models" / "org--long-moe" / "model.safetensors").stat().st_size == total


def part_bytes(home: Path) -> int:
    """Bytes of weights that an unfinished download has."""
    return sum(path.stat().st_size for path in home.glob("models/.*/model.safetensors.*"))


@pytest.mark.slow
def test_get_cancel_and_delete_with_what_that_frees(page: PageDriver, server: Server, hub: HubServer) -> None:
    hub.rate = 1e5  # so that it is far from its end whatever clicks take
    search(page, MOE)
    wait_card(page, "results", MOE, "Only download")
    press(page, "results", "get", MOE)
    wait_for(lambda: state(page, MOE) == "running" and part_bytes(server.home) > 50_000, 20, "some bytes")
    press(page, "queue", "cancel", MOE)
    wait_card(page, "queue", MOE, "Delete what has arrived?")
    press(page, "queue", "cancel", MOE)
    wait_for(lambda: state(page, MOE) == "", 20, "an empty queue")
    assert list((server.home / "models").iterdir()) == []
    hub.rate = None
    press(page, "results", "get", MOE)
    wait_card(page, "shelf", MOE, "Fits:")
    press(page, "shelf", "delete", MOE)
    wait_card(page, "shelf", MOE, "Delete and free 3.0 MiB?")
    shown = f"document.querySelector(\"#lm-shelf [data-model='{MOE}'] [data-act=delete]\")"
    name = f"{shown}.getAttribute('aria-label')"
    asked = f"Delete and free 3.0 MiB? {MOE}"
    assert page.evaluate(name) == asked == page.text("#lm-asking")
    wait_for(lambda: page.text("#lm-asking") == "", 6, "the end of the question")
    assert page.evaluate(name) == f"Delete {MOE}"
    press(page, "shelf", "delete", MOE)
    press(page, "shelf", "delete", MOE)
    page.wait_text("#lm-models-notice", f"Deleted {MOE}: 3.0 MiB are free again")
    wait_for(lambda: card(page, "shelf", MOE) == "", 10, "a list without it")
    assert list((server.home / "models").iterdir()) == []


@pytest.mark.slow
def test_the_page_speaks_chinese_by_the_browser_or_by_choice(
    server: Server, browser: Any, page: PageDriver
) -> None:
    context = browser.new_context(locale="zh-CN", viewport={"width": 390, "height": 800})
    chinese = PageDriver(context.new_page())
    chinese.page.goto(server.url)
    chinese.page.wait_for_selector("#lm-message textarea")
    chinese.wait_text("#lm-tab-models-button", "模型")
    chinese.wait_text("#lm-header", "就绪")
    assert chinese.page.get_attribute("#lm-message textarea", "placeholder") == "写一条消息"
    open_models(chinese)
    chinese.wait_text("#lm-shelf", "在这台电脑上")
    assert chinese.evaluate("document.documentElement.scrollWidth") == 390
    assert chinese.evaluate("document.documentElement.lang") == "zh"
    chinese.settings()
    assert chinese.value("lm-thinking") == "由模型决定"
    with chinese.page.expect_navigation():  # a reload
        chinese.page.select_option("#lm-language", "en")
    chinese.wait_text("#lm-tab-models-button", "Models")
    assert chinese.page.eval_on_selector("#lm-language", "e => e.value") == "en"
    context.close()


@pytest.mark.slow
def test_a_disk_that_is_too_small_is_said_with_a_way_on(page: PageDriver, hub: HubServer) -> None:
    hub.commit(HUGE, next(iter(hub.repos[MOE].commits.values())))
    hub.sizes, hub.requests[:] = {WEIGHTS: 10**15}, []
    search(page, HUGE)
    wait_card(page, "results", HUGE, "Only download")
    press(page, "results", "get", HUGE)
    wait_card(page, "queue", HUGE, "The disk is full: delete a model you no longer need")
    assert state(page, HUGE) == "failed" and hub.bodies(WEIGHTS) == []
    hub.sizes = {}
    press(page, "queue", "cancel", HUGE)  # nothing has arrived, so nothing is asked
    wait_for(lambda: state(page, HUGE) == "", 20, "an empty queue")


def test_a_model_of_the_hub_is_got_loaded_and_answers(
    page: PageDriver, server: Server, hub: HubServer
) -> None:
    """Though the link is cut, the Hub is busy, and bytes arrive changed until its user tries again."""
    busy = Fault(status=503, headers={"Retry-After": "0"})
    hub.requests.clear()
    hub.fail(WEIGHTS, Fault(cut_after=500_000), busy, *[Fault(flip_at=2_000_000)] * 3)
    search(page, MOE)
    wait_card(page, "results", MOE, "Fits:", 60)
    press(page, "results", "get-chat", MOE)
    wait_card(page, "queue", MOE, "The download failed.", 60)
    assert "wrong checksum" in card(page, "queue", MOE) and state(page, MOE) == "failed"
    starts = [one.start for one in hub.requests if one.path.endswith(WEIGHTS) and one.server == "cdn"]
    assert starts == [None, 500_000, 500_000, None, None]  # cut, refused, and thrice wrong
    press(page, "queue", "resume", MOE)
    wait_for(lambda: server.health()["model"] == MOE, 60, "the model")
    server.wait("ready", 60)
    page.page.wait_for_selector("#lm-tab-chat-button[aria-selected=true]")
    page.wait_text("#lm-header", "tiny-moe")
    page.send("hello")
    page.wait_idle()
    assert "tok/s" in page.line() and page.answer() != ""


def test_a_model_gives_its_memory_back_and_is_loaded_again(page: PageDriver, server: Server) -> None:
    open_models(page)
    page.page.focus(f"#lm-shelf [data-model='{MOE}'] [data-act=unload]")
    page.page.keyboard.press("Enter")
    page.wait_text("#lm-header", "its memory is free for other programs")
    wait_for(lambda: "Unload" not in card(page, "shelf", MOE), 15, "no model that is loaded")
    wait_for(
        lambda: page.evaluate("document.activeElement.dataset.act") == "chat", 15, "the focus in its row"
    )
    page.page.keyboard.press("Enter")
    server.wait("ready", 60)
    page.page.wait_for_selector("#lm-tab-chat-button[aria-selected=true]")
    in_box = "document.activeElement === document.querySelector('#lm-message textarea')"
    wait_for(lambda: page.evaluate(in_box), 15, "the focus on the message")
    page.wait_text("#lm-header", "ready")


@pytest.mark.slow
def test_a_folder_of_the_user_s_is_loaded_with_a_ready_made_draft(
    page: PageDriver, server: Server, tiny16: Any, tmp_path: Path
) -> None:
    folder, draft = tiny16("qwen3_moe"), tmp_path / "gptq"
    write_checkpoint(Model.load(folder), draft)

    def load_the_folder(text: str) -> None:
        page.fill("lm-folder", text)
        page.page.click("#lm-open-folder")

    open_models(page)
    load_the_folder(str(tmp_path / "nothing"))
    page.wait_text("#lm-models-notice", "is no folder on this computer")
    page.page.click("#lm-draft-choice button")
    page.page.click("#lm-draft-kind label:has-text('Ready-made')")
    page.page.wait_for_selector("#lm-ready-made input, #lm-ready-made textarea", state="visible")
    load_the_folder(str(folder))
    page.wait_text("#lm-models-notice", "Name the ready-made draft")
    page.fill("lm-ready-made", str(draft))
    load_the_folder(str(folder))
    wait_for(lambda: server.health()["model"] == str(folder), 60, "the folder's model")
    server.wait("ready", 60)
    page.page.wait_for_selector("#lm-tab-chat-button[aria-selected=true]")
    page.send("hello")
    page.wait_idle()
    assert "tok/s" in page.line() and "accepted" in page.line()
    page.settings()
    page.wait_text("#lm-tab-settings", "INT4 GPTQ, group 32")


def test_nothing_of_all_this_left_the_computer(page: PageDriver, server: Server, trap: Trap) -> None:
    """But what was asked of the Hub, which is on 127.0.0.1 here."""
    page.page.click("#lm-tab-settings-button")
    page.page.select_option("#lm-theme", "dark")
    assert {url.split("/")[2] for url in page.answered} == {f"127.0.0.1:{server.port}"}
    page.evaluate("fetch('http://203.0.113.7/').catch(() => 0)")  # even a script in the page may not
    assert trap.asked == []
    page.page.goto("http://203.0.113.7/")  # the trap works: this one is seen
    assert trap.asked and b"203.0.113.7" in trap.asked[0]
