"""What the Models tab can ask for: find, get, load, delete, token. Knows no widget; every refusal is a
LocalMoeError of one sentence."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from app.files import refused
from app.models.download_queue import DownloadQueue
from app.models.finder import Finder
from app.models.fits import Fits
from app.models.hub_client import HubClient, online_environment
from app.models.looker import Looker
from app.models.queue_file import Download
from app.models.shelf import Shelf
from app.service import ChatService
from app.unicode_text import check_unicode
from localmoe.core.config import EngineConfig
from localmoe.core.errors import ConfigError, LocalMoeError
from localmoe.core.model_facts import ModelFacts
from localmoe.core.units import format_bytes, typed_size
from localmoe.hub.catalogue import resolve_model
from localmoe.hub.names import is_repo_id, safe_name
from localmoe.hub.search import find_repo
from localmoe.hub.token import forget_token, hub_token, save_token

_POLL_S = 0.25
_HELD = ("loading", "ready")  # a model's phases in which its files are needed
BACKGROUND, INSTANT = "background", "instant"  # else a draft is a folder


class ModelsService:
    """The state behind the Models tab of every open page."""

    def __init__(self, home: Path, chats: ChatService, environment: Mapping[str, str]) -> None:
        """environment: that of a process that may ask the Hub, as the user started localmoe."""
        self.chats = chats
        self.client = HubClient(online_environment(environment))
        self.finder = Finder(self.client.call)
        self.looker = Looker(environment)
        self.shelf = Shelf(self.looker.facts)
        self.queue = DownloadQueue(home / "downloads.json", self.client.call, self._arrived)
        self.fits = Fits(home / "hardware.json", chats.holder.status, self._load_config, self._busy)
        self._lock = threading.Lock()
        self._opening: tuple[str, int] | None = None  # the model and the load that leads to the chat
        self._closed = threading.Event()
        self.opened = 0  # loads that led to the chat
        self.notice = ("", "")  # a model that was got and then not loaded, and why

    def start(self) -> None:
        """Go on with the queue."""
        self.queue.start()
        self.shelf.refresh()

    def close(self) -> None:
        """End what runs; the queue is kept."""
        self._closed.set()
        self.fits.close()
        self.shelf.close()
        self.looker.close()
        self.queue.close()
        self.client.close()

    # --- getting --------------------------------------------------------------------------------------------

    def search(self, text: str) -> str:
        """Begin a search of the Hub."""
        self.finder.search(text)
        return ""

    def get(self, repo_id: str, *, then_chat: bool, draft: str = BACKGROUND, from_disk: bool = False) -> str:
        """Download a model, and load it if wanted, as `chat_with` does; one that is here at once."""
        if not is_repo_id(repo_id):
            raise ConfigError("This is no model of the Hub.")
        draft = self.draft_for(repo_id, draft)
        if then_chat and any(model.name == repo_id for model in self.shelf.view().models):
            return self.chat_with(repo_id, draft, from_disk=from_disk)
        revision = facts.revision or None if (facts := self.finder.facts_of(repo_id)) else None
        self.queue.add(repo_id, revision, then_chat=then_chat, draft=draft, from_disk=from_disk)
        return ""

    def go_on(self, repo_id: str) -> str:
        """Take up an unfinished download: of the revision that it was begun for, as another one's files would
        take the place of what has arrived."""
        begun = {one.repo_id: one.revision for one in self.shelf.view().unfinished}
        if repo_id not in begun:
            raise ConfigError("This download is gone: it has ended, or was deleted.")
        self.queue.add(repo_id, begun[repo_id])
        return ""

    def draft_for(self, repo_id: str, draft: str) -> str:
        """The folder of a ready-made draft; one that is named by its repo is put in the queue, before the
        model."""
        text = draft.strip()
        if text in ("", BACKGROUND, INSTANT):
            return text or BACKGROUND
        if os.path.isdir(os.path.expanduser(text)):
            check_unicode("draft", text)  # it may wait in the queue's file
            return os.path.abspath(os.path.expanduser(text))
        if (named := find_repo(text)) is None:
            raise ConfigError(
                f"'{text[:100]}' is neither a folder nor a repo of a ready-made draft: give a GPTQ "
                "checkpoint of the same model."
            )
        try:
            return str(resolve_model(named[0]).folder)
        except LocalMoeError:
            self.queue.add(named[0], named[1], role="draft", for_model=repo_id)
            return named[0]

    def chat_with(self, model: str, draft: str = BACKGROUND, *, from_disk: bool = False) -> str:
        """Load a model of this computer; the page then goes to the chat. from_disk: with experts there."""
        if find_repo(draft) is not None and not os.path.isdir(draft):
            draft = str(resolve_model(draft).folder)  # has arrived meanwhile, or says that it has not
        ready_made = "" if draft in (BACKGROUND, INSTANT) else draft
        kept = self.chats.load_settings.of_model(model)
        kept = replace(kept, experts_on="disk") if from_disk else kept
        by_layer = kept.drafter == "mtp"  # which a ready-made draft excludes
        load = replace(
            kept, draft=ready_made, drafter="auto" if ready_made and by_layer else kept.drafter,
            better_draft="on" if draft == BACKGROUND else "off",
        )  # fmt: skip
        status = self.chats.holder.status()
        here = load == self.chats.load_settings and status.model == model
        if here and status.phase == "ready":
            with self._lock:
                self.opened += 1
            return ""
        if here and status.phase == "loading":  # pressed twice: it goes on
            self._lead_to_chat(model)
            return ""
        sentence = self.chats.apply_load(load)
        self._lead_to_chat(model)
        return sentence

    def load_anew(
        self, *, budget_bytes: int | None = None, context: int | None = None, from_disk: bool = False
    ) -> str:
        """Load the model that failed with the budget or context that would work, or with experts on the disk;
        where the loaded one takes it as it is, the page stays where it was asked for."""
        load = self.chats.load_settings
        if budget_bytes is not None:
            load = replace(load, vram_budget=typed_size(budget_bytes))
        if context is not None:
            load = replace(load, context=str(context))
        if from_disk:
            load = replace(load, experts_on="disk")
        sentence = self.chats.apply_load(load)
        if not sentence:
            self._lead_to_chat(load.model)
        return sentence

    def _lead_to_chat(self, model: str) -> None:
        with self._lock:
            self._opening = model, self.chats.holder.loads
            self.notice = ("", "")

    def stop_load(self) -> None:
        """Cancel the load under way."""
        with self._lock:
            self._opening = None
        self.chats.holder.cancel_load()

    def unload(self) -> None:
        """Free the loaded model's memory; "Chat" loads it again."""
        self.chats.holder.unload()

    def progress_flow(self) -> int:
        """Called by every refresh of a page: notes that a load has led to the chat; how many have. One that
        another load has overtaken leads nowhere."""
        with self._lock:
            status, loads = self.chats.holder.status(), self.chats.holder.loads
            if self._opening is not None and (status.phase != "loading" or self._opening[1] != loads):
                if status.phase == "ready" and self._opening == (status.model, loads):
                    self.opened += 1
                self._opening = None
            return self.opened

    def _arrived(self, download: Download) -> None:
        """In the queue's thread: list the model, and load it if that was wanted, or anew if it is loaded."""
        self.shelf.refresh()
        anew = self.is_loaded(download.repo_id)  # without what has come now
        if not (download.then_chat or anew) or download.role == "draft":
            return
        while self.chats.runner.busy():
            if self._closed.wait(_POLL_S):
                return
        try:
            if anew and self.is_loaded(download.repo_id):
                self.unload()
                self.load_anew()
            elif download.then_chat:
                self.chat_with(download.repo_id, download.draft, from_disk=download.from_disk)
        except LocalMoeError as error:
            self.notice = (download.repo_id, str(error))

    # --- the rest -------------------------------------------------------------------------------------------

    def is_loaded(self, name: str, *folders: Path) -> bool:
        """Whether this model is loaded, or about to be, by its name or as one of these folders."""
        status = self.chats.holder.status()
        return status.phase in _HELD and status.model in (name, *map(str, folders))

    def delete(self, name: str) -> str:
        """Remove a model and say what that freed."""
        folders = [model.folder for model in self.shelf.view().models if model.name == name]
        if self.is_loaded(name, *folders):
            raise ConfigError(f"{name} is loaded: load another model first, then delete it.")
        draft = self.chats.holder.config.draft_dir
        if draft is not None and draft in folders and self.chats.holder.status().phase in _HELD:
            raise ConfigError(f"{name} drafts for the loaded model: load that without it first.")
        if (waiting := self.queue.find(name)) is not None:
            self.queue.cancel(waiting.id)
            return ""
        return f"Deleted {name}: {format_bytes(self.shelf.delete(name))} are free again."

    def delete_records(self, name: str) -> str:
        """Remove the file of a model's experts, and say what that freed."""
        self._check_unused(name)
        freed = format_bytes(self.shelf.delete_records(name))
        return f"Deleted the file of the experts of {name}: {freed} are free again."

    def delete_left(self, name: str) -> str:
        """Remove what was made of a model that is not listed, and say what that freed."""
        self._check_unused(name)
        if name not in dict(self.shelf.view().left):
            raise ConfigError("This is gone already.")
        freed = format_bytes(self.shelf.delete_left(name))
        return f"Deleted what was made of {name}: {freed} are free again."

    def uses_made_of(self, name: str) -> bool:
        """Whether drafts of the loaded model, or of the one that is loading, are kept by this name."""
        status = self.chats.holder.status()
        model = os.path.basename(status.model) if os.path.isdir(status.model) else status.model
        return status.phase in _HELD and safe_name(model) == safe_name(name)

    def _check_unused(self, name: str) -> None:
        if self.uses_made_of(name):
            raise ConfigError(f"{name} is loaded: load another model first, then delete what was made of it.")

    def set_token(self, text: str) -> str:
        """Keep a token and ask again for what was refused without one."""
        save_token(text)
        for repo_id, known in self.finder.view().facts.items():
            if not isinstance(known, ModelFacts) and known.kind in ("GatedModelError", "RepoNotFoundError"):
                self.finder.look_again(repo_id)
        for download in self.queue.view():
            if download.state == "failed" and download.error_kind in ("GatedModelError", "RepoNotFoundError"):
                self.queue.resume(download.id)
        return "Kept. It is sent to the Hub alone, and only with what you ask of it."

    def remove_token(self) -> str:
        """Forget the token that localmoe keeps."""
        try:
            forget_token()
        except OSError as error:
            raise ConfigError(refused("The token could not be deleted", self.chats.home, error)) from error
        if hub_token() is not None:
            return "Forgotten here; the Hugging Face library or HF_TOKEN has another one, which is used now."
        return "Forgotten."

    def open_folder(self, text: str, draft: str = BACKGROUND) -> str:
        """Load a folder of the user's. draft: as for `chat_with`."""
        folder = os.path.abspath(os.path.expanduser(text.strip())) if text.strip() else ""
        if not folder or not os.path.isdir(folder):
            raise ConfigError(f"'{text.strip()[:200]}' is no folder on this computer.")
        resolve_model(folder)
        return self.chat_with(folder, draft)

    def download_bytes(self, repo_id: str, facts: ModelFacts) -> int:
        """What is still to be written of a model."""
        view = self.shelf.view()
        if any(model.name == repo_id for model in view.models):
            return 0
        held = [one.held_bytes for one in view.unfinished if one.repo_id == repo_id]
        return max(0, facts.num_bytes - sum(held))

    def first_start(self) -> bool:
        """Whether there is no model yet but the embedded one, and no chat either."""
        shelf = self.shelf.view()
        only_demo = all(model.source == "demo" for model in shelf.models)
        return shelf.revision > 0 and only_demo and not self.queue.view() and not self.chats.chats.list()

    def moves(self) -> bool:
        """Whether something here changes by itself soon."""
        return self.queue.moves() or self.finder.moves() or self.shelf.moves() or self._opening is not None

    def reports(self) -> list[str]:
        """Sentences on files that could not be read or written."""
        return [text for text in (self.queue.report, self.queue.save_error) if text]

    def _load_config(self) -> EngineConfig:
        return self.chats.load_settings.engine_config(self.chats.answers)

    def _busy(self) -> bool:
        return self.chats.runner.busy() or self.chats.holder.status().phase == "loading"
