"""From a click to the chat, without a browser: drafts, loads that fail or are stopped, deleting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import wait_for
from fake_engine import MIB, SMALLEST, FakeLoader

from app.models.queue_file import Download
from app.models.service import BACKGROUND, INSTANT, ModelsService, typed_size
from app.models_html import WAYS_ON, fit_html, queue_html
from app.service import ChatService
from app.status_html import header_html
from app.texts import ENGLISH, IN_CHINESE
from localmoe.core import errors
from localmoe.core.errors import BudgetError, ConfigError
from localmoe.core.model_facts import Fit

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
    models.stop_load()
    status = models.chats.holder.status()
    assert (status.phase, status.error) == ("error", "Loading was stopped.")
    assert "加载已停止" in header_html(status, IN_CHINESE)
    loader.load_s = 0.0
    models.chat_with("org/quick")
    wait_for(lambda: ready(models, "org/quick"))
    assert models.progress_flow() == 1


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


def test_a_token_tries_again_what_was_refused_without_one(models: ModelsService) -> None:
    for name, kind in (("org/locked", "GatedModelError"), ("org/cut", "HubUnreachableError")):
        models.queue.add(name)
        with models.queue._changed:
            models.queue._replace(models.queue.view()[-1].id, state="failed", error="x", error_kind=kind)
    models.set_token("hf_a_new_one")
    assert [one.state for one in models.queue.view()] == ["queued", "failed"]


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
