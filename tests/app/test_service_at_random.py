"""Three users at once do whatever comes to their minds: every refusal is a sentence, every answer comes from
an engine that was free, and the disk holds what the lists show."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from app_process import wait_for
from fake_engine import FakeLoader
from picture_files import picture

from app.bench.service import BenchmarkService
from app.chat_markdown import export_markdown
from app.chat_transfer import export_json
from app.chats import ChatStore
from app.service import ChatService
from localmoe.core.errors import LocalMoeError

SECONDS, AT_MOST_S = 1.5, 60.0
TO_DO = {
    "send",
    "show it",
    "retry",
    "edit",
    "delete",
    "budget",
    "context",
    "json",
    "markdown",
}  # each at least once
QUESTIONS = ("hello", "a long story", "1 + 1?", "ß漢字 \n#")
# else there is seldom a model that is free to answer
RARELY = {"context": 0.2, "budget": 0.5, "unload": 0.1, "stop": 3.0, "benchmark": 0.2}
RED, NO_PICTURES = picture("red"), "fake-moe reads no pictures: load a model that does."
BUDGETS = ("auto", "24MiB", "16MiB", "no size")


def exported(service: ChatService, chat_id: str) -> bytes:
    chat = service.chats.get(chat_id)
    return export_json(chat, service.pictures.read_all(chat.tree.images())).encode()


def actions(benchmarks: BenchmarkService, draw: random.Random) -> dict[str, Callable[[], object]]:
    """What one can do now, with random choices made."""
    service = benchmarks.chats
    chats = [chat.id for chat in service.chats.list()]
    chat_id = draw.choice([*chats, "f" * 32])
    text, node, load = draw.choice(QUESTIONS), draw.randrange(6), service.load_settings
    length = draw.choice([0, 4, "auto"])
    return {
        "send": lambda: service.send(draw.choice([None, chat_id]), text),
        "show it": lambda: service.send(draw.choice([None, chat_id]), text, (service.pictures.keep(RED),)),
        "retry": lambda: service.retry(chat_id),
        "continue": lambda: service.continue_answer(chat_id),
        "edit": lambda: service.edit(chat_id, node, text, draw.choice([None, ()])),
        "show": lambda: service.show(chat_id, node),
        "rename": lambda: service.chats.rename(chat_id, text),
        "delete": lambda: service.delete(chat_id),
        "stop": service.runner.stop,
        "length": lambda: service.set_answers({"draft_length": length}),
        "budget": lambda: service.apply_load(replace(load, vram_budget=draw.choice(BUDGETS))),
        "unload": service.holder.unload,
        "context": lambda: service.apply_load(replace(load, context=draw.choice(["auto", "512"]))),
        "benchmark": lambda: benchmarks.run(["on-demand"], ["0", "4"], 1, 4),
        "end benchmark": benchmarks.stop,
        "json": lambda: service.import_chat(exported(service, chat_id)),
        "markdown": lambda: service.import_chat(export_markdown(service.chats.get(chat_id)).encode()),
    }


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.slow(but=1)
def test_nothing_that_three_users_do_at_once_breaks_a_chat(seed: int, tmp_path: Path) -> None:
    loader, faults, began = FakeLoader(load_s=0.05, step_s=0.002), [], time.monotonic()
    service = ChatService(tmp_path, loader, lambda: [("demo", "demo")])
    benchmarks = BenchmarkService(service)
    service.start()
    done: list[str] = []

    def goes_on() -> bool:
        passed_s = time.monotonic() - began
        return passed_s < SECONDS or (passed_s < AT_MOST_S and not set(done) >= TO_DO)

    def use(user: int) -> None:
        draw = random.Random(10 * seed + user)
        while goes_on():
            able = actions(benchmarks, draw)
            name = draw.choices(list(able), [RARELY.get(name, 1.0) for name in able])[0]
            act = able[name]
            try:
                act()
                done.append(name)
            except LocalMoeError:
                pass  # said in a sentence
            except Exception as fault:
                faults.append((name, repr(fault)))
            time.sleep(0.02 * draw.random())

    users = [threading.Thread(target=use, args=(user,)) for user in range(3)]
    for user in users:
        user.start()
    for user in users:
        user.join(2 * AT_MOST_S)
    service.runner.stop_and_wait()
    wait_for(lambda: service.holder.status().phase != "loading")
    assert faults == [] and not any(user.is_alive() for user in users)
    assert set(done) >= TO_DO
    shown = {chat.id: chat for chat in service.chats.list()}
    service.close()
    kept = ChatStore(tmp_path / "chats")
    assert {chat.id: chat for chat in kept.list()} == shown and kept.reports == []
    errors = {node.error for chat in shown.values() for node in chat.tree.nodes if node.error}
    assert errors <= {"The engine is closed: load a model first.", NO_PICTURES}, errors
