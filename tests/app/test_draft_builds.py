"""The better draft that is built behind the page: begun, shown, ended, and never in the way. On the fake
engine."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from app_process import wait_for
from fake_engine import FakeEngine, FakeLoader, answer_to
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine_holder import EngineHolder, EngineNotReadyError
from app.engine_status import INTERNAL_ERROR
from app.service import ChatService
from app.settings import LoadSettings, SettingsStore
from localmoe.core.config import EngineConfig
from localmoe.core.errors import DraftError

ON, OFF = EngineConfig(improve_draft=True), EngineConfig()
RTN, GPTQ = "INT4 RTN, group 128", "INT4 GPTQ, group 128"
LONG_S = 60.0  # a build that no test waits for


def builders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "better-draft"]


def within(seconds: float, act: Callable[[], object]) -> None:
    """Do it in a thread, so that a deadlock is a failure and not a test without an end."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"{act} took more than {seconds} s"


def wait_ready(holder: EngineHolder, model: str = "demo") -> None:
    wait_for(lambda: holder.status().phase == "ready" and holder.status().model == model, what=model)


def wait_building(holder: EngineHolder) -> None:
    wait_for(lambda: (p := holder.status().improvement) is not None and p.done > 0, what="a build's progress")


@pytest.fixture
def slow() -> FakeLoader:
    """Answers take a second, and builds a fifth of one in ten pieces."""
    return FakeLoader(step_s=0.002, improve_s=0.2)


@pytest.fixture
def holder(slow: FakeLoader) -> Iterator[EngineHolder]:
    made = EngineHolder(slow)
    yield made
    within(5, made.close)
    assert builders() == []


@pytest.fixture
def building(tmp_path: Path, slow: FakeLoader) -> Iterator[ChatService]:
    """A service whose model's better draft is being built."""
    slow.improve_s = 1.0
    made = ChatService(tmp_path, slow, lambda: [])
    made.start()
    wait_building(made.holder)
    yield made
    within(5, made.close)
    assert builders() == []


def test_after_a_load_the_better_draft_is_built_shown_and_taken(
    holder: EngineHolder, slow: FakeLoader
) -> None:
    holder.load("demo", ON)
    wait_building(holder)
    during, engine = holder.status(), slow.engines[0]
    whole = engine._plan(None).num_slots
    assert during.phase == "ready" and during.info is not None and during.info.draft == RTN
    assert during.improvement is not None and during.improvement.total == 8 * 148
    assert during.plan is not None and during.plan.num_slots == whole // 2  # the build borrows of the budget
    assert during.memory["slots"] == whole // 2 * 40_000
    wait_for(lambda: holder.status().improvement is None, what="the end of the build")
    after = holder.status()
    assert after.info is not None and after.info.draft == GPTQ and after.improvement_note == ""
    assert after.plan is not None and after.plan.num_slots == whole
    assert after.memory["slots"] == whole * 40_000
    wait_for(lambda: builders() == [], what="the end of the thread")


@pytest.mark.parametrize(
    "config", [OFF, EngineConfig(improve_draft=True, draft_length=0)], ids=["not asked for", "no draft"]
)
def test_nothing_is_built_unasked_or_where_nothing_is_drafted(
    holder: EngineHolder, slow: FakeLoader, config: EngineConfig
) -> None:
    holder.load("demo", config)
    wait_ready(holder)
    wait_for(lambda: builders() == [])
    assert slow.engines[0].improvements == 0
    assert (holder.status().improvement, holder.status().improvement_note) == (None, "")


def test_a_build_that_fails_says_why_and_can_be_begun_again(holder: EngineHolder, slow: FakeLoader) -> None:
    slow.improve_error = DraftError("The disk is full: free 3 GiB.")
    holder.load("demo", ON)
    wait_for(lambda: holder.status().improvement_note != "")
    status = holder.status()
    assert status.improvement_note == "The disk is full: free 3 GiB." and status.improvement is None
    assert status.phase == "ready" and status.info is not None and status.info.draft == RTN
    slow.engines[0].improve_error = None
    holder.improve_draft(True)
    wait_building(holder)
    assert holder.status().improvement_note == ""
    wait_for(lambda: holder.status().info.draft == GPTQ)  # type: ignore[union-attr]


def test_an_unexpected_failure_goes_to_the_terminal_and_not_to_the_page(
    holder: EngineHolder, slow: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda failure: printed.append(failure.exc_value))
    slow.improve_error = ValueError("shapes (3, 4) and (5,)")
    holder.load("demo", ON)
    wait_for(lambda: holder.status().improvement_note != "")
    assert holder.status().improvement_note == INTERNAL_ERROR
    wait_for(lambda: printed == [slow.improve_error])


def test_a_note_goes_with_the_model_it_is_about(holder: EngineHolder, slow: FakeLoader) -> None:
    slow.improve_error = DraftError("No.")
    holder.load("demo", ON)
    wait_for(lambda: holder.status().improvement_note == "No.")
    holder.load("other", OFF)
    wait_ready(holder, "other")
    assert holder.status().improvement_note == ""


def test_the_switch_ends_and_begins_builds_without_a_reload(
    building: ChatService, slow: FakeLoader, tmp_path: Path
) -> None:
    engine = slow.engines[0]
    assert "kept" in building.apply_load(LoadSettings(better_draft="off"))
    wait_for(lambda: builders() == [], what="the end of the thread")
    status = building.holder.status()
    assert (status.phase, status.improvement, status.improvement_note) == ("ready", None, "")
    assert status.plan is not None and status.plan.num_slots == engine._plan(None).num_slots
    assert not engine.improved and not engine.closed
    assert SettingsStore(tmp_path / "settings.json").load == LoadSettings(better_draft="off")
    engine.improve_s = 0.05
    assert "pauses between answers" in building.apply_load(LoadSettings(better_draft="on"))
    wait_for(lambda: engine.improved and builders() == [])
    assert SettingsStore(tmp_path / "settings.json").load.better_draft == "on"
    building.apply_load(LoadSettings(better_draft="off"))
    assert GPTQ in building.apply_load(LoadSettings(better_draft="on"))
    assert len(slow.engines) == 1 and engine.improvements == 2


def test_off_and_on_at_once_leaves_one_build(building: ChatService, slow: FakeLoader) -> None:
    for switch in ("off", "on", "off", "on"):
        building.apply_load(LoadSettings(better_draft=switch))
    wait_for(lambda: building.holder.status().improvement is not None)
    for _ in range(40):  # the end of the first one does not hide the last one
        assert building.holder.status().improvement is not None
        time.sleep(0.005)
    wait_for(lambda: len(builders()) == 1)
    begun = slow.engines[0].improvements
    assert begun in (2, 3)  # the one in between may have begun before it was switched off
    building.holder.improve_draft(True)  # it is under way
    time.sleep(0.1)
    assert len(builders()) == 1 and slow.engines[0].improvements == begun


def test_the_switch_does_not_disturb_an_answer(building: ChatService, slow: FakeLoader) -> None:
    building.set_answers({"max_new_tokens": 1024})
    chat_id = building.send(None, "a long story")
    building.apply_load(LoadSettings(better_draft="off"))
    assert building.runner.running()
    while building.runner.running():  # a piece that was under way ends meanwhile, and is not shown
        assert building.holder.status().improvement is None
        time.sleep(0.005)
    wait_for(lambda: builders() == [], what="the end of the thread")
    answer = building.chats.get(chat_id).messages[1]
    whole = " ".join(answer_to("a long story").split(" ")[:1024])
    assert (answer.content, answer.finish) == (whole, "length")
    assert not slow.engines[0].improved


def test_a_switch_during_a_load_holds_when_it_is_done(tmp_path: Path, slow: FakeLoader) -> None:
    slow.load_s, slow.improve_s = 0.3, LONG_S
    service = ChatService(tmp_path, slow, lambda: [])
    service.start()
    service.apply_load(LoadSettings(better_draft="off"))
    wait_ready(service.holder)
    assert len(slow.engines) == 1 and builders() == []
    within(5, service.close)


def test_a_build_stands_still_while_an_answer_is_written(building: ChatService) -> None:
    building.send(None, "a long story")
    wait_for(lambda: len(building.runner.view().text) > 100)  # type: ignore[union-attr]
    time.sleep(0.25)  # the piece under way ends
    before = building.holder.status().improvement
    time.sleep(0.25)
    assert building.runner.running() and building.holder.status().improvement == before is not None
    building.runner.stop()
    wait_for(lambda: building.holder.status().improvement != before)


def test_another_model_is_loaded_during_a_build(building: ChatService, slow: FakeLoader) -> None:
    slow.improve_s = 0.1
    within(5, lambda: building.apply_load(LoadSettings(model="other")))
    wait_ready(building.holder, "other")
    first, second = slow.engines
    assert first.closed and not first.improved
    wait_for(lambda: second.improved and builders() == [])
    status = building.holder.status()
    assert status.model == "other" and status.info is not None and status.info.draft == GPTQ


def test_a_build_that_ends_during_the_next_load_is_not_shown_in_it(slow: FakeLoader) -> None:
    holder = EngineHolder(slow, before_unload=lambda: time.sleep(0.2))
    holder.load("demo", ON)
    wait_building(holder)
    holder.load("other", OFF)
    while (status := holder.status()).phase == "loading":
        assert (status.info, status.plan, status.improvement) == (None, None, None)
        time.sleep(0.005)
    wait_ready(holder, "other")
    within(5, holder.close)


def test_a_budget_is_applied_during_a_build(building: ChatService, slow: FakeLoader) -> None:
    within(5, lambda: building.apply_load(LoadSettings(vram_budget="24MiB")))
    assert building.holder.status().improvement is not None and len(slow.engines) == 1
    wait_for(lambda: building.holder.status().improvement is None)
    status = building.holder.status()
    assert status.plan is not None and status.plan.budget_bytes == 24 << 20
    assert status.info is not None and status.info.draft == GPTQ
    assert slow.engines[0].improvements == 1


def test_the_switch_and_a_budget_are_applied_together(building: ChatService, slow: FakeLoader) -> None:
    building.apply_load(LoadSettings(vram_budget="24MiB", better_draft="off"))
    wait_for(lambda: builders() == [], what="the end of the thread")
    assert not slow.engines[0].improved
    building.apply_load(LoadSettings(vram_budget="25MiB", better_draft="on"))
    wait_building(building.holder)
    assert len(slow.engines) == 1


@pytest.mark.parametrize("message", ["", "a long story"], ids=["between answers", "while one is written"])
def test_closing_ends_a_build(building: ChatService, slow: FakeLoader, message: str) -> None:
    if message:
        building.send(None, message)
        wait_for(lambda: bool(building.runner.view().text))  # type: ignore[union-attr]
    within(5, building.close)
    assert builders() == [] and slow.engines[0].closed and not slow.engines[0].improved


ACTIONS: dict[str, Callable[[EngineHolder], object]] = {
    "on": lambda holder: holder.improve_draft(True),
    "off": lambda holder: holder.improve_draft(False),
    "load": lambda holder: holder.load("demo", ON),
    "load off": lambda holder: holder.load("other", OFF),
    "resize": lambda holder: holder.resize(24 << 20),
    "wait": lambda holder: time.sleep(0.004),
    "unload": lambda holder: holder.close(),
}


@settings(max_examples=40)
@given(st.lists(st.sampled_from(sorted(ACTIONS)), max_size=12))
def test_no_order_of_actions_locks_up_or_leaves_a_thread(names: list[str]) -> None:
    engines: list[FakeEngine] = []
    loader = FakeLoader(improve_s=0.02)
    loader.engines = engines
    holder = EngineHolder(loader)

    def act() -> None:
        for name in names:
            with contextlib.suppress(EngineNotReadyError):  # a resize that came too late
                ACTIONS[name](holder)
        holder.close()

    within(10, act)
    assert builders() == [] and all(engine.closed for engine in engines)
