"""What the page can ask for: answers, stop, retry, edit, chats, a budget. On the fake engine."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from app_process import wait_for
from fake_engine import RECOMMENDED, FakeEngine, FakeLoader, answer_to

from app.chats import ChatError, ChatMessage, ChatStore
from app.engine_holder import UNLOADED, EngineNotReadyError
from app.engine_status import EngineStatus
from app.jobs import BenchmarkRunningError, JobRunningError
from app.messages import turn_entries
from app.requests import request_messages
from app.service import ChatService
from app.settings import LoadSettings, SettingsStore
from app.status_html import header_html
from localmoe.core import threads
from localmoe.core.config import SamplingConfig
from localmoe.core.errors import BudgetError, ConfigError, EngineClosedError, LocalMoeError
from localmoe.core.types import Message


def finish(service: ChatService, timeout_s: float = 5.0) -> None:
    wait_for(lambda: not service.runner.running(), timeout_s, "the end of the answer")


def contents(service: ChatService, chat_id: str) -> list[str]:
    return [message.content for message in service.chats.get(chat_id).messages]


def test_an_answer_is_streamed_kept_and_measured(service: ChatService) -> None:
    chat_id = service.send(None, "hello")
    finish(service)
    answer = service.chats.get(chat_id).messages[1]
    assert (answer.content, answer.finish) == (answer_to("hello"), "stop")
    assert answer.stats["new_tokens"] == 16 and answer.stats["link"] == "memory copy"
    view = service.runner.view()
    assert view is not None and view.stats is not None and view.stats.hit_rate == pytest.approx(29 / 34)
    assert service.holder.status().memory["shared"] == 4 << 20


def test_stop_keeps_the_text_within_three_tenths_of_a_second(service: ChatService) -> None:
    chat_id = service.send(None, "a long story")
    wait_for(lambda: len(service.runner.view().text) > 100)  # type: ignore[union-attr]
    started = time.perf_counter()
    service.runner.stop()
    assert time.perf_counter() - started < 0.3
    kept = service.chats.get(chat_id).messages[1]
    assert (
        kept.finish == "cancelled"
        and answer_to("a long story").startswith(kept.content)
        and len(kept.content) > 100
    )


def test_stop_does_not_wait_for_a_step_that_takes_long(service: ChatService, loader: FakeLoader) -> None:
    took_s = []
    while not took_s or (min(took_s) >= 0.3 and len(took_s) < 3):  # a busy machine may hold one up
        asked = len(loader.engines[0].requests)
        chat_id = service.send(None, "slow step")
        wait_for(lambda before=asked: len(loader.engines[0].requests) > before)
        started = time.perf_counter()
        service.runner.stop()
        took_s.append(time.perf_counter() - started)
        assert not service.runner.running()
    assert min(took_s) < 0.3, took_s
    assert service.chats.get(chat_id).messages[1].finish == "cancelled"
    service.send(chat_id, "hello")  # waits for the engine by itself
    finish(service)
    assert contents(service, chat_id) == ["slow step", "", "hello", answer_to("hello")]


def test_an_answer_that_takes_the_place_of_an_empty_one_is_shown(service: ChatService) -> None:
    chat_id = service.send(None, "hello")
    service.runner.stop()  # before its first word
    assert contents(service, chat_id) == ["hello", ""]
    service.retry(chat_id)
    finish(service)
    chat = service.chats.get(chat_id)
    assert contents(service, chat_id) == ["hello", answer_to("hello")]
    assert len(chat.tree.nodes) == 2  # in its place, not beside it


def test_an_answer_is_saved_while_it_is_written(
    service: ChatService, loader: FakeLoader, tmp_path: Path
) -> None:
    loader.engines[0].step_s = 0.03
    chat_id = service.send(None, "a long story")
    path = tmp_path / "chats" / f"{chat_id}.json"

    def saved() -> str:
        messages = json.loads(path.read_text())["messages"]
        return str(messages[1]["content"]) if len(messages) > 1 else ""

    wait_for(lambda: len(saved()) > 20, 2.0, "a first safety copy")
    first = saved()
    wait_for(lambda: len(saved()) > len(first), 2.0, "the next safety copy")
    assert json.loads(path.read_text())["messages"][1]["finish"] is None
    assert service.runner.running()


def test_only_one_answer_at_a_time(service: ChatService) -> None:
    chat_id = service.send(None, "a long story")
    for ask in (
        lambda: service.send(chat_id, "more"),
        lambda: service.retry(chat_id),
        lambda: service.edit(chat_id, 0, "x"),
    ):
        with pytest.raises(JobRunningError, match="Stop"):
            ask()
    assert contents(service, chat_id)[0] == "a long story"


def test_many_sends_at_once_start_one_answer(service: ChatService) -> None:
    refused: list[LocalMoeError] = []

    def send() -> None:
        try:
            service.send(None, "a long story")
        except LocalMoeError as error:
            refused.append(error)

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7 and len(service.chats.list()) == 1


def test_a_retry_keeps_the_answer_beside_the_new_one(service: ChatService, loader: FakeLoader) -> None:
    chat_id = service.send(None, "hello")
    finish(service)
    before = service.chats.get(chat_id).messages
    service.retry(chat_id)
    finish(service)
    tree = service.chats.get(chat_id).tree
    assert contents(service, chat_id) == ["hello", answer_to("hello")]
    assert tree.parents == (-1, 0, 0) and tree.path() == (0, 2) and tree.nodes[:2] == before
    first, second = loader.engines[0].requests
    assert first.messages == second.messages == (Message("user", "hello"),)
    service.show(chat_id, 1)
    assert service.chats.get(chat_id).messages == before


def test_a_retry_of_an_answer_without_text_takes_its_place(service: ChatService, loader: FakeLoader) -> None:
    loader.engines[0].step_s = 0.1
    chat_id = service.send(None, "hello")
    service.runner.stop()
    assert service.chats.get(chat_id).messages[1].content == ""
    service.retry(chat_id)
    service.runner.stop()
    assert len(service.chats.get(chat_id).tree.nodes) == 2


def test_editing_begins_a_branch_and_the_old_one_can_be_shown_again(
    service: ChatService, loader: FakeLoader, tmp_path: Path
) -> None:
    chat_id = service.send(None, "one")
    finish(service)
    service.send(chat_id, "two")
    finish(service)
    before = service.chats.get(chat_id).messages
    service.edit(chat_id, 0, " changed ")
    finish(service)
    assert contents(service, chat_id) == ["changed", answer_to("changed")]
    assert loader.engines[0].requests[-1].messages == (Message("user", "changed"),)
    assert len(service.chats.list()) == 1 and service.chats.get(chat_id).title == "one"
    service.show(chat_id, 0)
    assert service.chats.get(chat_id).messages == before
    assert ChatStore(tmp_path / "chats").get(chat_id) == service.chats.get(chat_id)
    service.edit(chat_id, 2, "three")  # the last question
    finish(service)
    assert contents(service, chat_id) == ["one", answer_to("one"), "three", answer_to("three")]


def test_versions_cannot_be_changed_under_a_running_answer_nor_be_invented(service: ChatService) -> None:
    chat_id = service.send(None, "a long story")
    with pytest.raises(JobRunningError, match="Stop"):
        service.show(chat_id, 0)
    service.runner.stop_and_wait()
    for node in (-1, 2, 99):
        with pytest.raises(ChatError, match="not there"):
            service.show(chat_id, node)


def test_a_kill_in_a_retry_loses_no_version(service: ChatService, loader: FakeLoader, tmp_path: Path) -> None:
    """What another process reads at any moment: the old answer, and the new one as far as it was saved."""
    chat_id = service.send(None, "hello")
    finish(service)
    loader.engines[0].step_s = 0.1
    service.retry(chat_id)
    seen = []
    while service.runner.running():
        chat = ChatStore(tmp_path / "chats").get(chat_id)
        seen.append([node.finish for node in chat.tree.nodes])
        assert chat.tree.nodes[1].content == answer_to("hello")
        assert len(chat.messages) == 2  # the newest answer is shown, never a question without one
        time.sleep(0.02)
    assert [None, "stop"] in seen and [None, "stop", None] in seen


ASKS: dict[str, Callable[[ChatService, str], object]] = {
    "send": lambda service, chat_id: service.send(chat_id, "and now?"),
    "send in a new chat": lambda service, _: service.send(None, "and now?"),
    "retry": lambda service, chat_id: service.retry(chat_id),
    "edit": lambda service, chat_id: service.edit(chat_id, 0, "and now?"),
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
@pytest.mark.parametrize("what", ["closed", "reserved"])
def test_an_answer_that_may_not_begin_after_all_leaves_every_chat_as_it_was(
    service: ChatService,
    loader: FakeLoader,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    what: str,
    ask: Callable[[ChatService, str], object],
) -> None:
    """The model is closed, or a benchmark begins, just after the answer was allowed."""
    service.send(None, "hello")
    finish(service)
    service.runner.settle()
    before, check_free = service.chats.list(), service.runner.check_free

    def once() -> None:
        monkeypatch.setattr(service.runner, "check_free", check_free)
        check_free()
        if what == "closed":
            loader.engines[0].closed = True
        else:
            service.runner.reserve(threading.Event())

    monkeypatch.setattr(service.runner, "check_free", once)
    with pytest.raises(EngineClosedError if what == "closed" else BenchmarkRunningError):
        ask(service, before[0].id)
    loader.engines[0].closed = False
    service.runner.release()
    assert service.chats.list() == before == ChatStore(tmp_path / "chats").list()
    ask(service, before[0].id)
    finish(service)
    assert service.chats.list()[0].messages[-1].finish == "stop"


def test_an_answer_that_was_cut_goes_on_in_its_place(service: ChatService, loader: FakeLoader) -> None:
    service.set_answers({"max_new_tokens": 7})
    chat_id = service.send(None, "a long story")
    finish(service)
    cut = service.chats.get(chat_id)
    assert cut.messages[1].finish == "length" and service.can_continue(cut)
    service.continue_answer(chat_id)
    finish(service)
    chat = service.chats.get(chat_id)
    request = loader.engines[0].requests[-1]
    assert request.continue_answer and request.messages[-1] == Message("assistant", cut.messages[1].content)
    assert chat.tree.parents == (-1, 0)
    answer = chat.messages[1]
    assert answer_to("a long story").startswith(answer.content)
    counts = (answer.stats["earlier_tokens"], answer.stats["new_tokens"])
    assert counts == (7, 7) and len(answer.content.split()) == 13  # a token of the fake's can be empty
    assert sum(answer.runs) == len(answer.content) and len(answer.runs) > 5


def test_only_an_unfinished_answer_with_room_for_more_goes_on(service: ChatService) -> None:
    chat_id = service.send(None, "hello")
    finish(service)
    with pytest.raises(ChatError, match="no unfinished answer"):
        service.continue_answer(chat_id)
    with pytest.raises(ChatError):
        service.continue_answer("f" * 32)
    stats = {"prompt_tokens": 4000, "new_tokens": 95}
    for new_tokens, room in ((94, True), (95, False)):
        answer = ChatMessage("assistant", "a", 1.0, "length", "", {**stats, "new_tokens": new_tokens})
        chat = service.chats.create((ChatMessage("user", "q"), answer))
        assert service.can_continue(chat) == room  # of 4,096 tokens


def test_a_kill_while_an_answer_goes_on_keeps_what_it_had(
    service: ChatService, loader: FakeLoader, tmp_path: Path
) -> None:
    service.set_answers({"max_new_tokens": 6})
    chat_id = service.send(None, "hello")
    finish(service)
    before = service.chats.get(chat_id).messages[1].content
    loader.engines[0].step_s = 0.05
    service.continue_answer(chat_id)
    while service.runner.running():
        assert ChatStore(tmp_path / "chats").get(chat_id).messages[1].content.startswith(before)
        time.sleep(0.02)
    assert len(service.chats.get(chat_id).messages[1].content) > len(before)


def test_thoughts_are_timed_and_kept(service: ChatService) -> None:
    chat_id = service.send(None, "think hard")
    finish(service)
    answer = service.chats.get(chat_id).messages[1]
    assert 0.05 < answer.thought_s < 3 and answer.content == answer_to("think hard")


@pytest.mark.parametrize("node", [-1, 1, 2, 99])
def test_only_own_messages_can_be_edited(service: ChatService, node: int) -> None:
    chat_id = service.send(None, "hello")
    finish(service)
    with pytest.raises(ChatError):
        service.edit(chat_id, node, "x")


@pytest.mark.parametrize(("text", "word"), [("", "empty"), ("  \n", "empty"), ("x" * 1_000_001, "1,000,001")])
def test_a_message_that_cannot_be_sent_makes_no_chat(service: ChatService, text: str, word: str) -> None:
    with pytest.raises(ChatError, match=word):
        service.send(None, text)
    assert service.chats.list() == []


def test_an_engine_error_is_shown_and_the_text_before_it_is_kept(service: ChatService) -> None:
    chat_id = service.send(None, "please fail")
    finish(service)
    answer = service.chats.get(chat_id).messages[1]
    assert answer.finish == "error" and answer.error == "A copy to the device failed: try again."
    assert answer.content and answer_to("please fail").startswith(answer.content)


def test_an_answer_for_which_there_is_no_thread_says_so_and_the_next_one_may_begin(
    service: ChatService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*_: object, **__: object) -> int:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        for module in (threading, threads):  # by whatever way it would begin
            for name in ("_start_new_thread", "_start_joinable_thread", "start_new_thread"):
                patch.setattr(module, name, no_thread, raising=False)
        chat_id = service.send(None, "hello")
    answer = service.chats.get(chat_id).messages[1]
    assert answer.finish == "error" and "no memory or thread to give" in answer.error
    service.retry(chat_id)
    finish(service)
    assert service.chats.get(chat_id).messages[1].content == answer_to("hello")


def test_deleting_a_chat_ends_its_answer_and_leaves_no_file(service: ChatService, tmp_path: Path) -> None:
    chat_id = service.send(None, "a long story")
    wait_for(lambda: bool(service.runner.view().text))  # type: ignore[union-attr]
    service.delete(chat_id)
    finish(service)
    assert list((tmp_path / "chats").iterdir()) == []


def test_settings_hold_from_the_next_answer_on(service: ChatService, loader: FakeLoader) -> None:
    service.set_answers(
        {
            "draft_length": 3,
            "policy": "on-demand",
            "max_new_tokens": 5,
            "seed": "9",
            "system_prompt": "Be brief.",
            "strict": True,
            "thinking": "off",
        }
    )
    chat_id = service.send(None, "hello")
    finish(service)
    request = loader.engines[0].requests[-1]
    given = (
        request.draft_length,
        request.policy,
        request.max_new_tokens,
        request.sampling.seed,
        request.strict,
        request.thinking,
    )
    assert given == (3, "on-demand", 5, 9, True, "off")
    assert request.messages == (Message("system", "Be brief."), Message("user", "hello"))
    assert service.chats.get(chat_id).messages[1].finish == "length"


def test_while_nobody_waits_the_engine_prepares_for_answers_as_they_are_set(
    service: ChatService, loader: FakeLoader
) -> None:
    (engine,) = loader.engines
    wait_for(lambda: engine.captures.begun)
    usual = service.answers.sampling()
    assert engine.captures.begun == [usual]
    service.send(None, "hello")
    finish(service)
    wait_for(lambda: len(engine.captures.begun) == 2)
    service.set_answers({"temperature": 0.0})
    greedy = service.answers.sampling()
    assert engine.captures.begun == [usual, usual, greedy] and greedy != usual
    service.holder.unload()
    wait_for(lambda: engine.closed)
    service.set_answers({"temperature": 0.3})  # nothing is loaded
    assert len(engine.captures.begun) == 3


def test_answers_are_drawn_as_the_loaded_models_makers_recommend_unless_that_is_switched_off(
    service: ChatService, loader: FakeLoader
) -> None:
    def used(**settings: object) -> SamplingConfig:
        service.set_answers({"temperature": 0.4, "seed": 9, "max_new_tokens": 5, **settings})
        service.send(None, "hello")
        finish(service)
        return loader.engines[-1].requests[-1].sampling

    numbers = SamplingConfig(0.4, 0.95, repetition_penalty=1.05, seed=9)
    assert used() == numbers  # nothing is recommended for it
    service.apply_load(LoadSettings("other-moe"))
    wait_for(lambda: service.holder.status().phase == "ready" and len(loader.engines) == 2)
    assert used() == replace(RECOMMENDED["other-moe"], seed=9)
    assert used(own_sampling=False) == numbers


def test_a_budget_is_applied_without_a_reload_and_kept(
    service: ChatService, loader: FakeLoader, tmp_path: Path
) -> None:
    before = service.holder.status().plan
    assert "24.0 MiB" in service.apply_load(LoadSettings(vram_budget="24MiB"))
    plan = service.holder.status().plan
    assert plan is not None and before is not None and plan.num_slots < before.num_slots
    assert len(loader.engines) == 1
    assert SettingsStore(tmp_path / "settings.json").load.vram_budget == "24MiB"


@pytest.mark.parametrize(("in_place", "budget"), [(True, "24MiB"), (False, "auto")])
def test_from_slots_to_experts_in_place_and_back_takes_a_load(
    service: ChatService, loader: FakeLoader, in_place: bool, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = service.holder.status

    def status() -> EngineStatus:  # whatever the engine is asked for meanwhile
        found = told()
        if found.info is None or found.plan is None:
            return found
        may = replace(found.info, may_be_in_place=True)  # type: ignore[type-var]
        return replace(found, info=may, plan=replace(found.plan, in_place=in_place))

    monkeypatch.setattr(service.holder, "status", status)
    other = LoadSettings(vram_budget="auto" if in_place else "24MiB")
    assert service.applies_live(other) and not service.applies_live(LoadSettings(vram_budget=budget))
    assert service.apply_load(LoadSettings(vram_budget=budget)) == ""
    wait_for(lambda: len(loader.engines) == 2 and service.holder.status().phase == "ready")


def test_a_budget_too_small_changes_nothing(service: ChatService, tmp_path: Path) -> None:
    before = service.holder.status()
    with pytest.raises(BudgetError, match=r"at least 12\.0 MiB"):
        service.apply_load(LoadSettings(vram_budget="1MiB"))
    after = service.holder.status()
    assert replace(after, revision=before.revision) == before  # a draft build that has ended is told again
    assert service.load_settings.vram_budget == "auto"
    assert not (tmp_path / "settings.json").exists()


@pytest.mark.slow
def test_a_budget_is_changed_while_a_stopped_answer_s_last_step_runs(service: ChatService) -> None:
    service.send(None, "slow step")
    wait_for(lambda: service.holder.engine().answering)  # type: ignore[attr-defined]
    service.runner.stop()
    assert "24.0 MiB" in service.apply_load(LoadSettings(vram_budget="24MiB"))


def test_an_answer_that_is_asked_for_while_the_budget_changes_waits(
    service: ChatService, loader: FakeLoader
) -> None:
    loader.engines[0].resize_s = 0.5
    change = threading.Thread(target=service.apply_load, args=(LoadSettings(vram_budget="24MiB"),))
    change.start()
    wait_for(lambda: loader.engines[0].resizing)
    chat_id = service.send(None, "hello")
    change.join()
    finish(service)
    assert contents(service, chat_id) == ["hello", answer_to("hello")]


def test_a_budget_is_not_changed_under_a_running_answer(service: ChatService) -> None:
    service.send(None, "a long story")
    with pytest.raises(ConfigError, match="Stop"):
        service.apply_load(LoadSettings(vram_budget="24MiB"))


@pytest.mark.parametrize(
    "change", [LoadSettings(model="other"), LoadSettings(context="512"), LoadSettings(emulated_link="1GB/s")]
)
def test_other_changes_load_again(service: ChatService, loader: FakeLoader, change: LoadSettings) -> None:
    service.apply_load(change)
    wait_for(lambda: len(loader.engines) == 2 and service.holder.status().phase == "ready")
    assert loader.engines[0].closed and not loader.engines[1].closed
    wait_for(lambda: service.store.load == change, what="the settings on the disk")


def test_turning_drafting_on_again_loads_the_draft(service: ChatService, loader: FakeLoader) -> None:
    service.set_answers({"draft_length": 0})
    service.apply_load(LoadSettings(context="512"))
    wait_for(lambda: len(loader.engines) == 2 and service.holder.status().phase == "ready")
    assert "Apply" in service.set_answers({"draft_length": 8})
    chat_id = service.send(None, "hello")  # answered without a draft until then
    finish(service)
    answer = service.chats.get(chat_id).messages[1]
    assert (answer.error, answer.content) == ("", answer_to("hello"))
    service.apply_load(LoadSettings(context="512"))
    wait_for(lambda: len(loader.engines) == 3 and service.holder.status().phase == "ready")
    assert loader.engines[2].plan.drafting


def test_a_load_that_fails_says_why_and_is_not_kept(service: ChatService, tmp_path: Path) -> None:
    service.apply_load(LoadSettings(model="missing"))
    wait_for(lambda: service.holder.status().phase == "error")
    assert service.holder.status().error.startswith("There is no model 'missing'")
    with pytest.raises(EngineNotReadyError, match="Models"):
        service.send(None, "hello")
    assert not (tmp_path / "settings.json").exists()
    service.apply_load(LoadSettings())
    wait_for(lambda: service.holder.status().phase == "ready")


def no_space(_descriptor: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.fixture
def full_disk(service: ChatService) -> Iterator[pytest.MonkeyPatch]:
    """No file reaches the disk, once the service has begun; `undo` makes room."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        yield patch


def test_a_load_succeeds_though_its_settings_cannot_be_kept_and_the_page_says_so(
    service: ChatService, loader: FakeLoader, full_disk: pytest.MonkeyPatch
) -> None:
    service.apply_load(LoadSettings(context="512"))
    wait_for(lambda: service.holder.status().notice != "")
    status = service.holder.status()
    assert status.phase == "ready" and len(loader.engines) == 2 and not loader.engines[1].closed
    assert status.notice.startswith("The model is loaded. The settings could not be saved in ")
    assert status.notice.endswith("(No space left on device): make room there and try again.")
    assert "make room there" in header_html(status)
    assert (service.load_settings.context, service.store.load.context) == ("512", "auto")
    full_disk.undo()
    assert service.apply_load(LoadSettings(context="512")).startswith("Applied")
    assert service.store.load.context == "512" and service.holder.status().notice == ""
    assert len(loader.engines) == 2


def test_what_was_applied_and_could_not_be_kept_is_told_as_both(
    service: ChatService, full_disk: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"Applied: .* uses 24\.0 MiB\. The settings could not be saved"):
        service.apply_load(LoadSettings(vram_budget="24MiB"))
    plan = service.holder.status().plan
    assert plan is not None and plan.budget_bytes == 24 << 20
    assert (service.load_settings.vram_budget, service.store.load.vram_budget) == ("24MiB", "auto")
    with pytest.raises(ConfigError, match="could not be saved"):  # a build that fills the disk can be ended
        service.apply_load(LoadSettings(vram_budget="24MiB", better_draft="off"))
    assert not service.holder.config.improve_draft and service.load_settings.better_draft == "off"


def test_answer_settings_that_cannot_be_kept_do_not_hold(
    service: ChatService, full_disk: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="make room there and try again"):
        service.set_answers({"temperature": 1.5})
    assert service.answers.temperature == service.store.answers.temperature == 0.6


@pytest.mark.parametrize("then", ["send", "close"])
def test_an_answer_that_the_disk_refuses_is_shown_with_the_reason_and_reaches_it_with_the_next_save(
    service: ChatService, tmp_path: Path, then: str
) -> None:
    chat_id = service.send(None, "hello")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        finish(service)
    revision = service.chats.revision
    assert contents(service, chat_id) == ["hello", answer_to("hello")]
    shown = turn_entries(service.chats.get(chat_id).messages, service.runner.view())[-1]["content"]
    assert shown[0]["text"] == answer_to("hello")
    assert "could not be saved" in shown[-1]["text"] and "make room there and try again" in shown[-1]["text"]
    if then == "send":
        service.send(chat_id, "next")
        finish(service)
        assert service.chats.revision > revision
    else:
        service.close()
    kept = ChatStore(tmp_path / "chats").get(chat_id).messages
    assert (kept[1].content, kept[1].finish, kept[1].error) == (answer_to("hello"), "stop", "")
    assert len(kept) == (4 if then == "send" else 2)


def test_a_safety_copy_that_the_disk_refused_is_forgotten_once_the_answer_is_saved(
    service: ChatService, tmp_path: Path
) -> None:
    chat_id = service.send(None, "a long story")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        wait_for(lambda: "could not be saved" in service.runner.view().error)  # type: ignore[union-attr]
        assert service.runner.running()
    service.runner.stop()
    kept = ChatStore(tmp_path / "chats").get(chat_id).messages
    assert (len(kept), kept[1].finish, kept[1].error) == (2, "cancelled", "")
    assert service.runner.view().error == ""  # type: ignore[union-attr]


def test_what_killed_writes_left_is_removed_at_the_start_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "chats").mkdir()
    (tmp_path / "run").mkdir()
    names = (f"chats/.{'a' * 32}.json", ".settings.json", "run/.server.json")
    left = [tmp_path / f"{name}.0123abcd.tmp" for name in names]
    others = [tmp_path / "chats" / f"{'a' * 32}.json.012abc.damaged", tmp_path / ".notes.tmp"]
    for path in (*left, *others):
        path.write_text("{")
    ChatService(tmp_path, FakeLoader(), lambda: [])
    assert [path.exists() for path in left] == [False] * 3
    assert all(path.exists() for path in others)


def test_the_page_is_there_while_the_model_loads_and_shows_how_far(tmp_path: Path) -> None:
    service = ChatService(tmp_path, FakeLoader(load_s=1.0), lambda: [])
    started = time.perf_counter()
    service.start()
    assert time.perf_counter() - started < 0.2
    with pytest.raises(EngineNotReadyError, match="still loading"):
        service.send(None, "hello")
    wait_for(lambda: (p := service.holder.status().progress) is not None and p.done > 0)
    service.close()


def test_a_second_load_cancels_the_first(tmp_path: Path) -> None:
    loader = FakeLoader(load_s=20.0)
    service = ChatService(tmp_path, loader, lambda: [])
    service.start()
    wait_for(lambda: service.holder.status().progress is not None)
    loader.load_s = 0.0
    service.apply_load(LoadSettings(model="other"))
    wait_for(lambda: service.holder.status().phase == "ready")
    assert service.holder.status().model == "other" and len(loader.engines) == 1
    service.close()


def test_a_model_is_unloaded_though_it_answers_and_can_be_loaded_again(
    service: ChatService, loader: FakeLoader
) -> None:
    chat_id = service.send(None, "a long story")
    wait_for(lambda: bool(service.runner.view().text))  # type: ignore[union-attr]
    for _ in range(2):
        service.holder.unload()
    status = service.holder.status()
    assert (status.phase, status.error, status.memory) == ("error", UNLOADED, {})
    wait_for(lambda: loader.engines[0].closed)
    finish(service)
    kept = service.chats.get(chat_id).messages[1]
    assert kept.finish == "cancelled" and kept.content
    with pytest.raises(EngineNotReadyError, match="choose one under Models"):
        service.send(chat_id, "go on")
    service.apply_load(service.load_settings)
    wait_for(lambda: service.holder.status().phase == "ready")
    service.send(chat_id, "hello")
    finish(service)
    assert contents(service, chat_id)[-1] == answer_to("hello") and len(loader.engines) == 2
    service.holder.unload()
    service.close()
    assert loader.engines[1].closed


def test_closing_ends_the_answer_keeps_its_text_and_frees_the_engine(
    service: ChatService, loader: FakeLoader
) -> None:
    chat_id = service.send(None, "a long story")
    wait_for(lambda: bool(service.runner.view().text))  # type: ignore[union-attr]
    service.close()
    assert loader.engines[0].closed
    assert service.chats.get(chat_id).messages[1].finish == "cancelled"


def test_a_page_opens_the_chat_it_had_or_the_running_one_or_the_latest(service: ChatService) -> None:
    assert service.chat_to_open(None) is None
    old, new = (
        service.chats.create((ChatMessage("user", "a"),)).id,
        service.chats.create((ChatMessage("user", "b"),)).id,
    )
    assert service.chat_to_open(None) == new
    assert service.chat_to_open(old) == old
    assert service.chat_to_open("../x") == service.chat_to_open({"id": 1}) == new
    service.send(old, "a long story")
    service.chats.add(new, ChatMessage("user", "c"), 0)
    assert service.chat_to_open(None) == old


def test_turns_without_an_answer_are_not_given_to_the_model() -> None:
    messages = (
        ChatMessage("user", "failed"), ChatMessage("assistant", "", finish="error"),
        ChatMessage("user", "lost"),
        ChatMessage("user", "one"), ChatMessage("assistant", "two"), ChatMessage("user", "three"),
    )  # fmt: skip
    assert request_messages(messages, " ", lambda picture: b"") == (
        Message("user", "one"), Message("assistant", "two"), Message("user", "three"),
    )  # fmt: skip


def test_the_speed_line_comes_from_differences_of_statistics(service: ChatService) -> None:
    service.send(None, "a long story")
    wait_for(lambda: len(service.runner.view().speeds) >= 2, 5.0)  # type: ignore[union-attr]
    view = service.runner.view()
    assert view is not None and view.draft_length == 4.0
    assert view is not None and view.stats is not None and view.stats.tokens_per_s is not None
    mean = sum(view.speeds) / len(view.speeds)
    assert mean == pytest.approx(view.stats.tokens_per_s, rel=0.5)


def test_a_damaged_chat_is_reported_to_the_page(tmp_path: Path) -> None:
    ChatStore(tmp_path / "chats")
    (tmp_path / "chats" / f"{'a' * 32}.json").write_text("{")
    (tmp_path / "settings.json").write_text("{")
    service = ChatService(tmp_path, FakeLoader(), lambda: [])
    assert len(service.reports()) == 2


def test_the_fake_has_every_name_that_the_page_uses() -> None:
    engine = FakeEngine("demo", LoadSettings().engine_config(SettingsStore(Path("nowhere")).answers))
    names = ("footprint", "plan", "info", "stream", "device_memory", "resize", "close")
    for name in (*names, "why_no_better_draft", "improve_draft"):
        assert hasattr(engine, name)
