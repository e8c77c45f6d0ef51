"""What an open page is told of what moves: only what it does not show, and never by waiting."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
from app_process import wait_for
from fake_engine import FakeLoader, answer_to
from fastapi import FastAPI
from starlette.testclient import TestClient

import app.now
from app.answer_html import WAITING
from app.now import ANSWERING_S, HIDDEN, IDLE_S, Asked, NowView
from app.now_routes import add_now_routes
from app.service import ChatService
from app.typed import COUNTED
from localmoe.core.live_state import PromptState


@pytest.fixture
def now(service: ChatService) -> NowView:
    return NowView(service)


@pytest.fixture
def client(service: ChatService, now: NowView) -> Iterator[TestClient]:
    made = FastAPI()
    add_now_routes(made, service, now)
    with TestClient(made) as client:
        yield client


class Page:
    """Asks as static/now.js does, and keeps what it is told."""

    def __init__(self, client: TestClient) -> None:
        self._client = client
        self.chat, self.keys = "", {"panel": "", "meter": "", "turn": ""}
        self.told: dict[str, Any] = {}

    def ask(self, **more: object) -> dict[str, Any]:
        answer = self._client.get("/now", params={**self.keys, "chat": self.chat, **more})
        assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
        self.told = answer.json()
        self.keys |= {name: self.told[name]["key"] for name in self.keys if name in self.told}
        return self.told


def test_a_page_is_told_only_what_it_does_not_show(client: TestClient, service: ChatService) -> None:
    page, other = Page(client), Page(client)
    assert {"panel", "meter"} <= page.ask().keys() and page.told["wait"] == IDLE_S
    assert page.ask().keys() == {"epoch", "wait"}
    assert "panel" not in other.ask(panel=HIDDEN) and "panel" in other.ask()
    page.chat = service.send(None, "a long story")
    texts = []
    for _ in range(20):
        told = page.ask()
        texts.append("".join(told["turn"]["parts"]) if "turn" in told else texts[-1])
        assert told["wait"] >= ANSWERING_S and ("turn" not in told or told["turn"]["of"].startswith("("))
        time.sleep(0.01)
    assert len(set(texts)) > 4 and all(answer_to("long").startswith(text.rstrip("…")) for text in texts)
    assert "turn" not in other.ask()  # it shows another chat
    service.runner.stop_and_wait()
    assert "turn" not in page.ask() and "last answer" in page.told["panel"]["html"]
    assert "tokens used" in page.told["meter"]["html"]
    page.chat = "no such chat"
    assert "turn" not in page.ask() and page.told["meter"]["html"] == ""


def test_the_rest_of_the_page_is_out_of_date_when_it_is_and_not_while_text_comes(
    service: ChatService, now: NowView, loader: FakeLoader
) -> None:
    epochs = [now.epoch()]
    chat = service.send(None, "a long story")
    epochs.append(now.epoch())
    wait_for(lambda: len(service.chats.get(chat).messages) > 1, 3.0, "a safety copy")
    wait_for(lambda: getattr(service.runner.view(), "revision", 0) > 5, what="some text")
    assert now.epoch() == epochs[1]
    service.runner.stop_and_wait()
    epochs.append(now.epoch())
    service.chats.rename(chat, "another title")
    epochs.append(now.epoch())
    service.set_answers({**asdict(service.answers), "show_drafted": True})
    epochs.append(now.epoch())
    service.holder.resize(24 << 20)
    epochs.append(now.epoch())
    service.retry(chat)
    epochs.append(now.epoch())
    assert len(set(epochs)) == len(epochs)
    assert NowView(service).epoch() != now.epoch()  # pages of an earlier process know nothing


def test_nobody_who_asks_waits_for_a_chat_that_is_saved_or_an_engine_that_is_looked_at(
    client: TestClient, service: ChatService
) -> None:
    page = Page(client)
    page.chat = service.send(None, "hello")
    service.runner.settle()
    asked: list[dict[str, Any]] = []
    with service.chats._lock, service.live._lock:
        thread = threading.Thread(target=lambda: asked.append(page.ask()))
        thread.start()
        thread.join(5.0)
        assert not thread.is_alive()
    assert "tokens used" in asked[0]["meter"]["html"]


def test_what_takes_long_is_asked_for_seldom(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> str:
        until = time.thread_time() + 0.03
        while time.thread_time() < until:
            pass
        return "<p>slow</p>"

    monkeypatch.setattr(app.now, "panel_html", slow)
    page = Page(client)
    assert page.ask()["panel"]["html"] == "<p>slow</p>" and 3.0 <= page.told["wait"] < 30.0

    def told_cheaply() -> bool:
        other = Page(client)
        return other.ask()["panel"]["html"] == "<p>slow</p>" and other.told["wait"] == IDLE_S

    # Drawn once for all pages, but anew for what the engine still says of itself after its load.
    wait_for(told_cheaply, 5.0, "a panel that was drawn for another page")


def test_typed_text_is_counted_whole_or_by_its_beginning(client: TestClient, service: ChatService) -> None:
    def counted(text: str) -> Any:
        return client.post("/typed", content=text.encode()).json()

    assert counted("  \n ") == {"tokens": 0, "about": False}
    assert counted(" one two three ") == {"tokens": 3, "about": False}
    assert counted("abc " * COUNTED) == {"tokens": COUNTED, "about": True}
    assert client.post("/typed", content=b"x" * 4_000_001).status_code == 413
    assert client.post("/typed", content=b"\xff\xfe a").json()["tokens"] == 2
    page = Page(client)
    assert "7 of 4,096 tokens used, with 7 of your message" in page.ask(typed="7")["meter"]["html"]
    assert "about 8" in page.ask(typed="8", about="1")["meter"]["html"]
    assert "消息" in page.ask(typed="7", language="zh-CN")["meter"]["html"]
    for bad in ("-1", "x", "9" * 10, ""):
        assert client.get("/now", params={"typed": bad}).status_code == 400
    service.close()
    assert counted("word " * 4) == {"tokens": 5, "about": True}


def test_nothing_of_an_answer_is_markup_on_its_way(client: TestClient, service: ChatService) -> None:
    page = Page(client)
    page.chat = service.send(None, "think <b>")
    wait_for(lambda: "thought 3" in json.dumps(page.ask()), 5.0, "thoughts")
    (thoughts,) = page.told["turn"]["parts"]
    assert "&lt;b&gt;" in thoughts and "<b>" not in thoughts and "\n" not in thoughts


def test_who_waits_for_the_first_token_is_told_why(service: ChatService, loader: FakeLoader) -> None:
    clock = [0.0]
    now, live = NowView(service, lambda: clock[0]), loader.engines[-1].live
    chat = service.send(None, "a long slow step")  # a second until the first token
    started = getattr(service.runner.view(), "started", 0.0)

    def tell(waited_s: float, **more: Any) -> list[str]:
        clock[0] = started + waited_s
        told: Any = now.tell(Asked(chat_id=chat, **more))
        return told["turn"]["parts"]

    assert tell(0.5) == tell(3.0) == [WAITING], "nothing is known"
    live.reading = PromptState(tokens=1000, read=256, disk_bytes=0)
    assert tell(0.5) == [WAITING], "not at once"
    (said,) = tell(4.2)
    assert said.endswith("… 256 of 1,000 tokens read · 4 s</p>")
    live.reading = PromptState(tokens=1000, read=0, disk_bytes=0, images=2)
    (said,) = tell(4.9)
    assert said.endswith("… 2 pictures to be read · 0 of 1,000 tokens read · 4 s</p>")
    live.reading = PromptState(tokens=1000, read=512, disk_bytes=12_300_000_000)
    assert tell(15.0) == tell(19.0), "it is read aloud"
    (said,) = tell(19.0, language="zh")
    assert said.endswith("… 已读取 512 / 1,000 个词元 · 从磁盘读取专家 11.5 GiB · 15 s</p>")
    wait_for(lambda: getattr(service.runner.view(), "text", ""), what="text")
    assert "lm-line" not in "".join(tell(19.0))
    service.runner.stop_and_wait()
