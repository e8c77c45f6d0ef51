"""Models that were downloaded without what says how they read pictures: what the page says, and one click."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from app_process import wait_for
from fake_engine import FakeLoader

from app.models.picture_settings import why_unread
from app.models.queue_file import Download
from app.models.service import INSTANT, ModelsService
from app.models_view import shelf_html
from app.picture_routes import why_no_pictures
from app.service import ChatService
from app.tabs.models import _acts
from app.texts import ENGLISH, IN_CHINESE
from localmoe.core.errors import ConfigError
from localmoe.hub.catalogue import models_folder
from localmoe.hub.download_record import RECORD_FILE
from localmoe.hub.picture_settings import PROCESSOR_FILES

NAME = "org/moe"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a model that an older version has downloaded."""
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path))
    made = models_folder() / "org--moe"
    made.mkdir(parents=True)
    (made / "config.json").write_text('{"model_type": "qwen3_vl_moe", "num_experts": 8}')
    (made / "model.safetensors").touch()
    (made / RECORD_FILE).write_text(json.dumps({"repo_id": NAME, "revision": "its commit"}))
    return made


@pytest.fixture
def models(service: ChatService, folder: Path, tmp_path: Path) -> Iterator[ModelsService]:
    """Not started: what is in the queue waits."""
    made = ModelsService(tmp_path, service, {})
    made.shelf.refresh()
    wait_for(lambda: not made.shelf.moves())
    yield made
    made.close()


def test_one_click_gets_what_is_missing_of_the_revision_that_is_here(
    models: ModelsService, folder: Path
) -> None:
    button = f'data-act="get-settings" data-key="{NAME}"'
    html = shelf_html(models, ENGLISH)
    assert (
        button in html
        and html.count("get-settings") == 1
        and "获取其图片设置" in shelf_html(models, IN_CHINESE)
    )
    assert _acts(models)["get-settings"](NAME, INSTANT) == ""
    assert [(one.repo_id, one.revision) for one in models.queue.view()] == [(NAME, "its commit")]
    assert button not in shelf_html(models, ENGLISH), "it is in the queue"
    models.queue.cancel(models.queue.view()[0].id)
    (folder / PROCESSOR_FILES[1]).touch()
    assert button not in shelf_html(models, ENGLISH)
    for name in (NAME, "org/other"):
        with pytest.raises(ConfigError, match="has what it needs already"):
            _acts(models)["get-settings"](name, INSTANT)


def test_a_loaded_model_is_loaded_again_as_it_was_once_they_have_come(
    models: ModelsService, loader: FakeLoader
) -> None:
    models.chat_with(NAME, INSTANT)
    wait_for(lambda: models.progress_flow() == 1)
    told = why_no_pictures(models.chats.holder.status())
    assert told == why_unread(NAME) != "", "and not that the model reads none"
    engines, settings = len(loader.engines), models.chats.load_settings
    models._arrived(Download("1", NAME, state="done"))
    wait_for(lambda: models.progress_flow() == 2)
    assert len(loader.engines) == engines + 1 and models.chats.load_settings == settings
    assert models.chats.holder.status().phase == "ready" and models.notice == ("", "")


def test_another_model_that_is_loaded_meanwhile_stays(
    models: ModelsService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy() -> bool:
        """An answer, at whose end somebody loads another model."""
        models.chat_with("org/other", INSTANT)
        wait_for(lambda: models.chats.holder.status().phase == "ready")
        return False

    models.chat_with(NAME, INSTANT)
    wait_for(lambda: models.progress_flow() == 1)
    with monkeypatch.context() as patch:
        patch.setattr(models.chats.runner, "busy", busy)
        models._arrived(Download("1", NAME, state="done"))
    status = models.chats.holder.status()
    assert (status.phase, status.model) == ("ready", "org/other")


def test_who_attaches_a_picture_is_told_what_to_do(folder: Path) -> None:
    for name in (NAME, str(folder)):
        assert "press Get its picture settings under Models" in why_unread(name)
    assert "获取其图片设置" in why_unread(NAME, IN_CHINESE)
    (folder / RECORD_FILE).unlink()
    assert "put its makers' preprocessor_config.json into its folder" in why_unread(NAME)
    assert why_unread(NAME, IN_CHINESE) != why_unread(NAME)
    (folder / PROCESSOR_FILES[0]).touch()
    assert why_unread(NAME) == why_unread("org/unknown") == why_unread("demo") == ""
