"""From a click to the chat, without a browser: drafts, loads that fail or are stopped, deleting."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import gradio as gr
import pytest
from app_process import wait_for
from fake_engine import MIB, SMALLEST, FakeLoader
from hardware.example_models import QWEN

from app.models.finder import KNOWN_FOR_S, Failure, Finder
from app.models.queue_file import Download
from app.models.service import BACKGROUND, INSTANT, ModelsService
from app.models.shelf import Shelf
from app.models_html import WAYS_ON, fit_html, queue_html
from app.models_screen import ModelsScreen
from app.models_view import results_html, shelf_html, suggestions_html, token_html
from app.service import ChatService
from app.status_html import header_html, message_html
from app.tabs.models import _acts, create_models_tab
from app.texts import ENGLISH, IN_CHINESE, texts_for
from app.view import View
from localmoe.core import errors
from localmoe.core.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    GatedModelError,
    LocalMoeError,
    UnsupportedModelError,
)
from localmoe.core.model_facts import Fit, ModelFacts
from localmoe.core.units import typed_size
from localmoe.engine.suggestions import SUGGESTIONS
from localmoe.hardware.probe import probe_hardware
from localmoe.hub.catalogue import LocalModel, models_folder
from localmoe.hub.names import safe_name
from localmoe.hub.search import SearchHit
from localmoe.hub.unfinished import Pending

EVIL = '<img src=x onerror="alert(1)">'


@pytest.fixture
def models(service: ChatService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelsService]:
    """Not started: what is in the queue waits."""
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path))
    made = ModelsService(tmp_path, service, {})
    yield made
    made.close()


def ready(models: ModelsService, model: str) -> bool:
    status = models.chats.holder.status()
    return (status.phase, status.model) == ("ready", model)


def test_a_finished_download_is_loaded_and_leads_to_the_chat_once(models: ModelsService) -> None:
    models._arrived(Download("1", "org/moe", state="done", then_chat=True, draft=INSTANT))
    wait_for(lambda: models.progress_flow() == 1, what="the load that leads to the chat")
    assert ready(models, "org/moe") and models.progress_flow() == 1
    assert models.chats.load_settings.better_draft == "off" and models.chats.load_settings.draft == ""
    models.chat_with("org/moe", INSTANT)  # it is loaded already
    assert models.progress_flow() == 2
    models._arrived(Download("2", "org/other", state="done"))
    models._arrived(Download("3", "org/draft", state="done", role="draft", then_chat=True))
    assert ready(models, "org/moe")


def test_a_ready_made_draft_is_a_folder_or_is_got_first(models: ModelsService, tmp_path: Path) -> None:
    assert models.draft_for("org/moe", "") == BACKGROUND and models.draft_for("org/moe", INSTANT) == INSTANT
    assert models.draft_for("org/moe", str(tmp_path)) == str(tmp_path)
    models.get("org/moe", then_chat=True, draft="org/moe-gptq@v1")
    first, second = models.queue.view()
    assert (first.repo_id, first.revision) == ("org/moe-gptq", "v1")
    assert (first.role, first.for_model) == ("draft", "org/moe")
    assert (second.repo_id, second.draft, second.then_chat) == ("org/moe", "org/moe-gptq", True)
    with pytest.raises(ConfigError, match="neither a folder nor a repo"):
        models.draft_for("org/moe", "some words")
    models.chat_with("org/moe", str(tmp_path))
    assert models.chats.holder.config.draft_dir == tmp_path
    wait_for(lambda: ready(models, "org/moe"))
    models.chat_with("org/moe")
    assert models.chats.holder.config.draft_dir is None and models.chats.holder.config.improve_draft


@pytest.mark.skipif(sys.platform != "linux", reason="file systems that take any bytes for a name")
def test_folders_whose_names_are_no_unicode_are_refused_before_anything_is_kept(
    models: ModelsService, tmp_path: Path
) -> None:
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    with pytest.raises(ConfigError, match="rename the folder"):
        models.get("org/moe", then_chat=True, draft=str(folder))
    with pytest.raises(ConfigError, match="rename the folder"):
        models.chat_with(str(folder))
    assert models.queue.view() == () and models.queue.save_error == ""
    with pytest.raises(ConfigError) as caught:
        models.draft_for("org/moe", "half \ud800")
    assert "half ?" in message_html(str(caught.value), False)
    finder = Finder(lambda action, given: [])
    finder.search("half \ud800")
    assert finder.view().query == "half ?"
    wait_for(lambda: finder.view().phase == "done")


def test_a_token_that_the_disk_does_not_let_go_is_one_sentence(models: ModelsService, tmp_path: Path) -> None:
    (tmp_path / "hub-token").mkdir()  # a folder cannot be unlinked
    with pytest.raises(ConfigError, match=r"The token could not be deleted in .*: make it writable"):
        models.remove_token()


def test_a_load_that_does_not_fit_offers_what_would_and_one_click_takes_it(
    models: ModelsService, loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = BudgetError("Too small.", budget_bytes=SMALLEST, context=2048)

    def refuse(self: FakeLoader, model: str, config: object, **rest: object) -> object:
        raise plan

    with monkeypatch.context() as patch:
        patch.setattr(FakeLoader, "__call__", refuse)
        models.chat_with("org/moe")
        wait_for(lambda: models.chats.holder.status().phase == "error")
    status = models.chats.holder.status()
    assert (status.better_budget, status.better_context) == (SMALLEST, 2048)
    html = header_html(status)
    assert "Use 12.0 MiB and load" in html and "Use a context of 2,048 tokens and load" in html
    assert models.progress_flow() == 0
    models.load_anew(budget_bytes=status.better_budget)
    wait_for(lambda: ready(models, "org/moe"))
    assert models.chats.holder.config.vram_budget_bytes == SMALLEST and models.progress_flow() == 1
    models.load_anew(context=2048)
    assert models.chats.holder.config.context == 2048
    assert typed_size(100 * MIB + 5) == "100MiB" and typed_size(SMALLEST) == str(SMALLEST)


def test_a_load_is_stopped_and_leads_nowhere(models: ModelsService, loader: FakeLoader) -> None:
    loader.load_s = 5.0
    models.chat_with("org/slow")
    assert models.chats.holder.status().phase == "loading" and models.moves()
    loads = models.chats.holder.loads
    models.chat_with("org/slow")  # pressed once more: it goes on
    assert models.chats.holder.loads == loads
    models.stop_load()
    status = models.chats.holder.status()
    assert (status.phase, status.error) == ("error", "Loading was stopped.")
    assert "加载已停止" in header_html(status, IN_CHINESE)
    loader.load_s = 0.0
    models.chat_with("org/quick")
    wait_for(lambda: ready(models, "org/quick"))
    assert models.progress_flow() == 1


def test_a_load_that_is_refused_leads_nowhere(models: ModelsService) -> None:
    models.chats.send(None, "a long story")
    with pytest.raises(ConfigError, match="An answer is being written"):
        models.load_anew(budget_bytes=24 * MIB)
    assert models.progress_flow() == 0 and not models.moves()
    models.chats.runner.stop_and_wait()
    assert "24.0 MiB" in models.load_anew(budget_bytes=24 * MIB)  # which the loaded model takes as it is
    assert models.progress_flow() == 0


@pytest.mark.parametrize("looked", [True, False])
def test_a_load_that_another_overtakes_leads_nowhere_and_neither_does_a_later_one_of_the_model(
    models: ModelsService, loader: FakeLoader, looked: bool
) -> None:
    service = models.chats

    def apply(model: str) -> None:
        service.apply_load(replace(service.load_settings, model=model))
        wait_for(lambda: ready(models, model))

    loader.load_s = 5.0
    models.chat_with("org/slow")
    loader.load_s = 0.0
    apply("org/other")
    assert not looked or (models.progress_flow() == 0 and not models.moves())
    apply("org/slow")
    assert models.progress_flow() == 0 and not models.moves()


def screen_of(models: ModelsService) -> ModelsScreen:
    async def build() -> ModelsScreen:
        with gr.Blocks():
            others = gr.HTML(), gr.Tabs(), gr.Timer(active=False), gr.Textbox(), gr.State("models")
            return ModelsScreen(models, create_models_tab(), *others)

    return asyncio.run(build())


def test_a_model_that_is_ready_leads_to_the_chat_but_not_who_opens_a_tab_just_then(
    models: ModelsService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.fits, "hardware", lambda: None)
    screen = screen_of(models)
    seen = str(screen.refresh(View(), "", "models")[screen.seen])
    models.opened += 1
    assert screen.tabs in screen.refresh(View(), seen, "models")
    chosen = screen.refresh(View(), seen, "settings", leads=False)
    assert screen.tabs not in chosen
    assert screen.tabs not in screen.refresh(View(), str(chosen[screen.seen]), "settings"), "nor later"


def test_of_two_refreshes_under_way_one_leads_to_the_chat(
    models: ModelsService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.fits, "hardware", lambda: None)
    screen = screen_of(models)
    pages = [str(screen.refresh(View(), "", "models")[screen.seen]) for _ in range(2)]
    for load in (1, 2):
        models.opened = load
        for seen in pages:
            led = [screen.tabs in screen.refresh(View(), seen, "models") for _ in range(3)]
            assert led == [True, False, False], "each page once for each load"


def test_a_download_that_is_not_loaded_says_so_in_the_tab_until_one_is(
    models: ModelsService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.fits, "hardware", lambda: None)
    screen = screen_of(models)

    def notice() -> str:
        return str(screen._parts(View(), "models")["notice"][1]()[screen.widgets.notice])

    assert screen.widgets.notice in screen.outputs() and notice() == ""
    models._arrived(Download("1", "org/moe", state="done", then_chat=True, draft="org/never-got"))
    assert "org/moe: " in notice() and "org/never-got" in notice()
    models.chat_with("org/moe")
    assert notice() == ""


def test_what_is_loaded_is_not_deleted_and_a_waiting_one_is_cancelled(models: ModelsService) -> None:
    models.chat_with("org/moe")
    wait_for(lambda: ready(models, "org/moe"))
    with pytest.raises(ConfigError, match="is loaded"):
        models.delete("org/moe")
    models.queue.add("org/waits")
    models.delete("org/waits")
    assert [one.state for one in models.queue.view()] == ["cancelled"]
    with pytest.raises(ConfigError, match="no folder"):
        models.open_folder("/no/such/folder")


def test_what_is_loaded_by_its_folder_or_drafts_is_not_deleted_either(models: ModelsService) -> None:
    for name in ("org--moe", "org--moe-gptq"):
        folder = models_folder() / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"model_type": "qwen2_moe", "num_experts": 8}')
        (folder / "model.safetensors").touch()
    models.shelf.refresh()
    wait_for(lambda: not models.shelf.moves())
    loaded = str(models_folder() / "org--moe")
    models.open_folder(loaded, str(models_folder() / "org--moe-gptq"))
    wait_for(lambda: ready(models, loaded))
    html = shelf_html(models, ENGLISH)
    assert 'data-act="unload" data-key="org/moe"' in html
    assert 'data-act="delete" data-key="org/moe"' not in html
    with pytest.raises(ConfigError, match="org/moe is loaded"):
        models.delete("org/moe")
    with pytest.raises(ConfigError, match="org/moe-gptq drafts for the loaded model"):
        models.delete("org/moe-gptq")
    models.unload()
    assert "Deleted org/moe-gptq" in models.delete("org/moe-gptq")
    assert "Deleted org/moe" in models.delete("org/moe") and list(models_folder().iterdir()) == []


@pytest.mark.parametrize("revision", ["v1", None])
def test_an_unfinished_download_goes_on_with_the_revision_it_was_begun_for(
    models: ModelsService, revision: str | None
) -> None:
    """Another one's files would take the place of what has arrived."""
    folder = models_folder() / ".org--moe.download"
    folder.mkdir(parents=True)
    Pending("org/moe", revision, 100).write(folder)
    models.shelf.refresh()
    wait_for(lambda: models.shelf.view().unfinished != ())
    button = re.search(r'data-act="([\w-]+)" data-key="org/moe"[^>]*>Go on', shelf_html(models, ENGLISH))
    assert button is not None
    _acts(models)[button[1]]("org/moe", BACKGROUND)
    assert [(one.repo_id, one.revision) for one in models.queue.view()] == [("org/moe", revision)]
    with pytest.raises(ConfigError, match="This download is gone"):
        models.go_on("org/other")


def test_a_model_that_is_here_is_proposed_however_full_the_disk_is(
    models: ModelsService, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, begun, absent = (one.facts for one in SUGGESTIONS[:3])
    folder = models_folder() / safe_name(here.footprint.name)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "granitemoe", "num_local_experts": 32}')
    (folder / "model.safetensors").touch()
    unfinished = models_folder() / f".{safe_name(begun.footprint.name)}.download"
    unfinished.mkdir()
    (unfinished / "model.safetensors.0.part").write_bytes(bytes(1000))
    models.shelf.refresh()
    wait_for(lambda: not models.shelf.moves())
    written: dict[str, int] = {}

    def fit(facts: ModelFacts, *, download_bytes: int = 0, **settings: object) -> Fit:
        written[facts.footprint.name] = download_bytes
        return Fit(True)

    monkeypatch.setattr(models.fits, "hardware", probe_hardware)
    monkeypatch.setattr(models.fits, "fit", fit)
    suggestions_html(models, ENGLISH)
    expected = (0, begun.num_bytes - 1000, absent.num_bytes)
    assert tuple(written[facts.footprint.name] for facts in (here, begun, absent)) == expected


def test_a_token_of_the_environment_that_is_none_is_told_where_tokens_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abc\u2026xyz")
    told = token_html(texts_for("en"))
    assert "What HF_TOKEN says" in told and 'role="alert"' in told and "xyz" not in told


def test_a_token_tries_again_what_was_refused_without_one(models: ModelsService) -> None:
    for name, kind in (("org/locked", "GatedModelError"), ("org/cut", "HubUnreachableError")):
        models.queue.add(name)
        with models.queue._changed:
            models.queue._replace(models.queue.view()[-1].id, state="failed", error="x", error_kind=kind)
    models.set_token("hf_a_new_one")
    assert [one.state for one in models.queue.view()] == ["queued", "failed"]


@pytest.mark.parametrize(
    "pasted", ["org/moe@v1", "https://huggingface.co/org/moe/tree/v1", "org/moe", "some words"]
)
def test_who_tries_again_or_gives_a_token_is_told_of_the_revision_that_was_asked_for(
    models: ModelsService, monkeypatch: pytest.MonkeyPatch, pasted: str
) -> None:
    asked: list[str | None] = []

    def answer(action: str, given: dict[str, str | None]) -> object:
        if action == "search":
            return [asdict(SearchHit("org/moe", "", None, "", True, 0, ""))]
        asked.append(given["revision"])
        if len(asked) == 1:
            raise GatedModelError("org/moe is gated.")
        return ModelFacts(QWEN, 2, 1 << 30, revision=f"commit of {given['revision']}").as_dict()

    monkeypatch.setattr(models.finder, "_call", answer)
    revision = "v1" if "v1" in pasted else None
    models.search(pasted)
    wait_for(lambda: not models.moves())
    models.set_token("hf_a_new_one")
    wait_for(lambda: not models.moves())
    assert asked == [revision, revision]
    models.get("org/moe", then_chat=False)
    assert [one.revision for one in models.queue.view()] == [f"commit of {revision}"]


def test_a_search_after_a_while_gets_what_the_hub_has_by_then() -> None:
    now, asked = 1e6, 0

    def answer(action: str, given: dict[str, str | None]) -> object:
        nonlocal asked
        asked += 1
        return ModelFacts(QWEN, 2, 1 << 30, revision=f"commit {asked}").as_dict()

    finder = Finder(answer, lambda: now)

    def found() -> str:
        finder.search("org/moe")
        wait_for(lambda: not finder.moves())
        facts = finder.facts_of("org/moe")
        assert facts is not None
        return facts.revision

    assert found() == found() == "commit 1"  # a moment later
    now += KNOWN_FOR_S / 2
    assert found() == "commit 1"
    now += KNOWN_FOR_S / 2 + 1
    assert found() == found() == "commit 2"  # the page may be open for weeks


def test_a_download_that_failed_goes_on_with_the_commit_that_a_search_finds(models: ModelsService) -> None:
    """Its own may be squashed away; cancelling it would delete what has arrived."""
    facts = ModelFacts(QWEN, 2, 1 << 30, revision="a commit that is here")
    models.finder._call = lambda action, given: facts.as_dict()
    models.search("org/moe")
    wait_for(lambda: not models.moves())
    models.queue.add("org/moe", "a commit that is gone")
    assert 'data-act="get' not in results_html(models, ENGLISH)
    with models.queue._changed:
        failed = models.queue._replace(models.queue.view()[0].id, state="failed", error="x", done_bytes=7)
    assert re.search('data-act="get-chat(-disk)?" data-key="org/moe"', results_html(models, ENGLISH))
    models.get("org/moe", then_chat=True)
    (again,) = models.queue.view()
    assert (again.id, again.state, again.done_bytes) == (failed.id, "queued", 7)
    assert (again.revision, again.then_chat) == ("a commit that is here", True)


class Gate:
    """Stands for something that takes its time: each call waits to be let through."""

    def __init__(self, result: object = None) -> None:
        self.result, self._came, self._open = result, threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, *_: object, **__: object) -> object:
        self._came.release()
        assert self._open.acquire(timeout=10)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def wait_entered(self) -> None:
        assert self._came.acquire(timeout=10)

    def let_through(self) -> None:
        self._open.release()


@pytest.mark.parametrize("what", ["search", "token", "download", "shelf"])
def test_the_tab_moves_while_something_is_looked_at_or_handed_over_and_not_after(
    models: ModelsService, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    gate = Gate([] if what == "shelf" else LocalMoeError("No answer."))
    monkeypatch.setattr(models.finder, "_call", gate)
    monkeypatch.setattr(models.queue, "_pull", lambda *_, **__: None)
    monkeypatch.setattr(models.queue, "_on_done", gate)
    monkeypatch.setattr(models.shelf, "_models", gate)
    assert not models.moves()
    if what == "search":
        models.search("org/moe")
    elif what == "token":
        models.finder.look_again("org/moe")
    elif what == "download":
        gate.result = None
        models.queue.start()
        models.queue.add("org/moe")
    else:
        models.shelf.refresh()
    assert models.moves()
    gate.wait_entered()
    assert models.finder.view().phase != "searching" and models.queue.view() == ()
    assert models.moves()
    gate.let_through()
    wait_for(lambda: not models.moves(), what="the end")


class SlowLock:
    """Lets others in for a while before its last holder goes on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        time.sleep(0.001)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_shelf_is_looked_at_by_one_thread_at_a_time_and_again_after_an_unforeseen_error() -> None:
    inside, most, looks = 0, 0, 0

    def models() -> list[LocalModel]:
        nonlocal inside, most, looks
        inside, looks = inside + 1, looks + 1
        most = max(most, inside)
        time.sleep(0.002)
        inside -= 1
        if looks == 1:
            raise ZeroDivisionError
        return []

    shelf = Shelf(lambda folder: pytest.fail("nothing is here"), models)
    shelf._lock = SlowLock()  # type: ignore[assignment]
    shelf.refresh()
    wait_for(lambda: looks == 1 and not shelf.moves(), what="the error")
    for pause in range(200):
        shelf.refresh()
        time.sleep(0.0005 * (pause % 8))  # also just as a look ends
    wait_for(lambda: not shelf.moves(), what="the last look")
    assert most == 1 and looks > 5 and inside == 0


def test_what_is_known_of_a_model_is_looked_at_again_once_its_files_or_drafts_are_others(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").touch()
    here = LocalModel("org/moe", tmp_path, 100, "qwen2_moe", (), "huggingface")
    answer: ModelFacts | LocalMoeError = CheckpointError("Weight file x is damaged.")
    asked: list[str] = []

    def facts(model: str) -> ModelFacts:
        asked.append(model)
        if isinstance(answer, LocalMoeError):
            raise answer
        return answer

    shelf = Shelf(facts, lambda: [here])

    def look() -> ModelFacts | Failure | None:
        shelf.refresh(closely=True)
        wait_for(lambda: not shelf.moves())
        return shelf.view().facts_of("org/moe")

    assert isinstance(look(), Failure)
    answer = ModelFacts(QWEN, 2, 100)  # downloaded again, of the same size
    assert look() == look() == answer and asked == ["org/moe"] * 2  # drafts are kept by name
    answer = replace(answer, has_draft=True)
    here = replace(here, drafts=(tmp_path / "int4-gptq-g128",))
    assert look() == answer and len(asked) == 3
    answer = replace(answer, footprint=replace(QWEN, max_context=5))
    os.utime(tmp_path / "config.json", (1, 1))  # another revision, whose weights are of the same size
    assert look() == answer and len(asked) == 4
    answer, here = UnsupportedModelError("Its weights are quantised."), replace(here, num_bytes=7)
    assert isinstance(look(), Failure) and look() is not None and len(asked) == 5


def test_lists_escape_names_and_every_refusal_has_a_way_on() -> None:
    evil = Download("1", "org/moe", state="failed", error=EVIL, error_kind="GatedModelError", for_model=EVIL)
    html = queue_html([evil, replace(evil, role="draft", state="running", rate=EVIL)], ENGLISH)
    html += fit_html(Fit(False, EVIL), ENGLISH)
    assert EVIL not in html and html.count("&lt;img") == 4
    assert "ask for access" in html
    assert [kind for kind in WAYS_ON if not hasattr(errors, kind)] == []
    assert "est." not in fit_html(Fit(True, ram_bytes=MIB), ENGLISH)
    tiers = Fit(True, vram_bytes=8 << 30, ram_bytes=14 << 30, drafting=True, tokens_per_s=20.4)
    told = fit_html(tiers, ENGLISH)
    assert "8.0 GiB VRAM + 14.0 GiB RAM" in told and "est. at most 20 tok/s" in told and "estimate" in told
