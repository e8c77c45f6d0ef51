"""Models that RAM does not hold and the disk does: what their cards say, and one click that loads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from app_process import wait_for
from fake_engine import FakeLoader
from little_ram import COMPUTER, FACTS, GIB, LARGE, SMALL, models_with_little_ram, set_computer
from support.tiny_models import tiny_model, write_model

from app.engine_holder import EngineHolder
from app.engine_status import EngineStatus, RamAloneError
from app.main import load_engine
from app.models.queue_file import QueueFile
from app.models.service import ModelsService
from app.models_html import queue_html
from app.models_view import results_html, shelf_html, suggestions_html
from app.service import ChatService
from app.settings import LoadSettings
from app.status_html import header_html
from app.tabs.load_form import LoadForm, load_values
from app.tabs.models import _acts
from app.texts import ENGLISH, IN_CHINESE
from localmoe.core.config import EngineConfig
from localmoe.engine.facts import local_facts
from localmoe.engine.fit import fit_model
from localmoe.hardware.facts import Hardware
from localmoe.hub.search import SearchHit

RUNS = "Does not fit into RAM; runs from the disk, slower:"


@pytest.fixture
def models(service: ChatService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelsService]:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path))
    with models_with_little_ram(service, tmp_path) as made:
        yield made


def card(html: str, name: str) -> str:
    return html.split(f'data-model="{name}"')[1].split("</li>")[0]


def press(models: ModelsService, act: str, key: str) -> None:
    assert _acts(models)[act](key, "background") == ""


def loaded(models: ModelsService, name: str) -> EngineConfig:
    """The configuration with which it has led to the chat."""
    wait_for(lambda: models.progress_flow() and models.chats.holder.status().phase == "ready", what="a load")
    assert models.chats.holder.status().model == name
    return models.chats.holder.config


def test_one_click_on_the_card_loads_it_from_the_disk_and_that_is_kept(
    models: ModelsService, loader: FakeLoader
) -> None:
    large = card(shelf_html(models, ENGLISH), LARGE)
    assert RUNS in large and "RAM (36 % of the experts) + 17.7 GiB on the disk" in large
    assert "est." not in large
    assert f'data-act="chat-disk" data-key="{LARGE}" aria-label="Chat (from the disk) {LARGE}"' in large
    small = card(shelf_html(models, ENGLISH), SMALL)
    assert "<b>Fits:</b>" in small and 'data-act="chat"' in small and "disk" not in small
    press(models, "chat-disk", LARGE)
    assert loaded(models, LARGE).experts_on == "disk"
    wait_for(lambda: models.chats.store.load.model == LARGE, what="what has led to a model to be kept")
    assert models.chats.store.load.experts_on == "disk"
    models.chats.list_models = lambda: [(LARGE, LARGE)]
    form = LoadForm(**{name: cast(Any, object()) for name in LoadForm.__slots__})
    assert load_values(form, models.chats)[form.experts_on] == "disk", "the Settings tab shows it"
    loads = models.chats.holder.loads
    press(models, "chat", LARGE)  # its card, once it is loaded
    assert models.progress_flow() == 2 and models.chats.holder.loads == loads
    press(models, "chat", SMALL)
    wait_for(lambda: models.progress_flow() == 3, what="the other one")
    assert loaded(models, SMALL).experts_on == "ram"


def test_a_model_of_the_hub_is_got_and_loaded_from_the_disk(models: ModelsService) -> None:
    models.shelf._models = list
    models.shelf.refresh()
    wait_for(lambda: models.shelf.view().models == (), what="an empty shelf")
    hit = SearchHit(LARGE, "qwen2_moe", 0, "", False, "", 0)
    models.finder._found = replace(
        models.finder._found, phase="done", query="qwen", hits=(hit,), facts={LARGE: FACTS[LARGE]}
    )
    found = card(results_html(models, ENGLISH), LARGE)
    assert RUNS in found and "Get and chat (from the disk)" in found and "Only download" in found
    press(models, "get-chat-disk", LARGE)
    (download,) = models.queue.view()
    assert download.from_disk
    assert "then it is loaded, with experts on the disk" in queue_html([download], ENGLISH)
    assert "之后加载" in queue_html([download], IN_CHINESE) and "磁盘" in queue_html([download], IN_CHINESE)
    press(models, "get", LARGE)
    assert models.queue.view()[0].from_disk, "as it was asked for"
    kept = models.chats.home / "downloads.json"
    assert [one.from_disk for one in QueueFile(kept).read()] == [True]
    models._arrived(replace(download, state="done"))
    assert loaded(models, LARGE).experts_on == "disk"
    press(models, "get-chat", LARGE)  # the other wish, given later, holds
    assert not models.queue.view()[0].from_disk


def test_a_queue_of_before_is_read(tmp_path: Path) -> None:
    entry = {"id": "a1", "repo_id": LARGE, "state": "paused", "then_chat": True}
    for more, number in (({}, 1), ({"from_disk": "yes"}, 0)):
        (tmp_path / "queue.json").write_text(json.dumps({"schema": 1, "downloads": [{**entry, **more}]}))
        found = QueueFile(tmp_path / "queue.json").read()
        assert len(found) == number and not any(one.from_disk for one in found)


def test_what_neither_ram_nor_disk_holds_says_both(models: ModelsService) -> None:
    set_computer(models, replace(COMPUTER, disk_free_bytes=GIB))
    large = card(shelf_html(models, ENGLISH), LARGE)
    assert "Does not fit now." in large and "of host RAM" in large
    assert "too little room for the experts&#x27; file" in large and 'data-act="chat"' in large


def test_what_runs_from_the_disk_is_proposed_only_where_nothing_fits(models: ModelsService) -> None:
    html = suggestions_html(models, ENGLISH)
    assert html.count("<li") == 3 and "disk, slower" not in html and "Fits:" in html
    set_computer(models, replace(COMPUTER, ram_available_bytes=2 * GIB))
    html = suggestions_html(models, ENGLISH)
    assert html.count("<li") == 1 and RUNS in card(html, SMALL) and "grey" not in html
    assert "可从磁盘运行" in suggestions_html(models, IN_CHINESE)


def test_a_card_is_that_of_the_choice_that_was_made_for_its_model(models: ModelsService) -> None:
    models.chats.load_settings = LoadSettings(SMALL, experts_on="disk")
    html = shelf_html(models, ENGLISH)
    small = card(html, SMALL)
    assert "Fits, with its experts on the disk:" in small and "100 %" in small and "chat-disk" in small
    models.chats.load_settings = LoadSettings("demo", vram_budget="lots")
    assert RUNS in card(shelf_html(models, ENGLISH), LARGE), "whatever cannot be read of the settings"


def test_a_load_that_ram_alone_refuses_offers_the_disk_and_one_click_takes_it(
    models: ModelsService, loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: FakeLoader, model: str, config: object, **rest: object) -> object:
        raise RamAloneError("The experts need 38 GiB of host RAM.")

    with monkeypatch.context() as patch:
        patch.setattr(FakeLoader, "__call__", refuse)
        models.open_folder(str(write_model(models.chats.home / "folder", tiny_model("qwen2_moe"))))
        wait_for(lambda: models.chats.holder.status().phase == "error")
    status = models.chats.holder.status()
    html = header_html(status)
    assert 'data-act="use-disk"' in html and "Keep experts on the disk and load" in html
    assert "将专家存放于磁盘并加载" in header_html(status, IN_CHINESE)
    press(models, "use-disk", "load")
    assert loaded(models, status.model).experts_on == "disk"
    assert not models.chats.holder.status().runs_from_disk


def test_the_real_engine_is_asked_whether_the_disk_is_a_way_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path))
    folder = str(
        write_model(tmp_path / "m", tiny_model("qwen2_moe", num_hidden_layers=12, dtype=torch.bfloat16))
    )
    facts, holder = local_facts(folder), EngineHolder(load_engine)
    usual = EngineConfig(draft_length=0, context=64)

    def computer(ram: int) -> Hardware:
        return replace(COMPUTER, ram_available_bytes=ram, ram_total_bytes=ram)

    def status(config: EngineConfig, ram: int) -> EngineStatus:
        found = computer(ram)
        monkeypatch.setattr("localmoe.engine.planning.probe_hardware", lambda measure: found)
        holder.load(folder, config)
        wait_for(lambda: holder.status().phase != "loading", 180, "the load")  # it may compile
        return holder.status()

    on_disk = replace(usual, experts_on="disk")
    enough = next(n << 20 for n in range(500) if fit_model(facts, computer(n << 20), None, on_disk).fits)
    try:
        refused = status(usual, enough)
        assert refused.phase == "error" and refused.runs_from_disk and "RAM" in refused.error
        assert status(on_disk, enough).phase == "ready"
        assert not status(usual, 1 << 20).runs_from_disk, "nothing runs there"
        small = replace(usual, vram_budget_bytes=1 << 10)
        refused = status(small, 16 * GIB)
        assert refused.phase == "error" and not refused.runs_from_disk, "RAM is not what lacks"
    finally:
        holder.close()
