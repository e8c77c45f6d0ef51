"""What an open page shows of the Models tab, and what of it has changed since it was last told. It has a
timer of its own, which runs while the tab is open: what is out of sight costs nothing."""

from __future__ import annotations

import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from app import words
from app.models.service import ModelsService
from app.models_html import queue_html
from app.models_view import results_html, shelf_html, suggestions_html
from app.screen import parse_seen
from app.status_html import message_html
from app.tabs.models import ModelsWidgets
from app.texts import texts_for
from app.view import Seen, Updates, View

MOVING_S, STILL_S = 0.3, 3.0
_PAGE = "page"  # in what it has seen: which one it is
_MOST_PAGES = 64  # that were open of late


class LedPages:
    """Which load led a page to the chat: of two refreshes that are under way, one does, or the second would
    take its user away from where the first was left for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: OrderedDict[str, int] = OrderedDict()  # by page, the last ones

    def leads(self, page: str, load: int) -> bool:
        """Whether this is the first that leads this page there, for this load."""
        with self._lock:
            first = self._loads.pop(page, None) != load
            self._loads[page] = load
            while len(self._loads) > _MOST_PAGES:
                self._loads.popitem(last=False)
            return first


@dataclass(frozen=True, slots=True)
class ModelsScreen:
    """Computes updates; `seen` as in `Screen`. welcome: the first start's proposals, in the chat. tab: the
    one that is open; apart from the view, as the user may open one before the page's first answer is here."""

    models: ModelsService
    widgets: ModelsWidgets
    welcome: gr.HTML
    tabs: gr.Tabs
    timer: gr.Timer
    seen: gr.Textbox
    tab: gr.Textbox
    led: LedPages = field(default_factory=LedPages)

    def outputs(self) -> list[Any]:
        """What a refresh may change."""
        parts = self.widgets
        lists = [parts.queue, parts.suggestions, parts.results, parts.shelf]
        return [self.seen, self.welcome, self.tabs, self.timer, parts.notice, *lists]

    def inputs(self) -> list[Any]:
        """What `refresh` needs beside the view."""
        return [self.seen, self.tab]

    def refresh(self, view: View, seen: Seen, open_tab: str, *, leads: bool = True) -> Updates:
        """What changed since `seen`. leads: a model that is ready may lead to the chat."""
        parts = self._parts(view, open_tab)
        shown, updates = parse_seen(seen), Updates()
        page = shown.get(_PAGE) or secrets.token_hex(8)
        for name, (key, make) in parts.items():
            if shown.get(name) == repr(key):
                continue
            if name != "opened" or (leads and name in shown and self.led.leads(page, key)):
                updates.update(make())
        told = {_PAGE: page} | {name: repr(key) for name, (key, _) in parts.items()}
        now = json.dumps({**shown, **told})  # what is out of sight stays as it was shown
        updates[self.seen] = now if now != seen else gr.skip()
        return updates

    def _parts(self, view: View, open_tab: str) -> dict[str, tuple[Any, Callable[[], Updates]]]:
        models, tab, t = self.models, self.widgets, texts_for(view.language)
        opened = models.progress_flow()
        welcome = open_tab == "chat" and models.first_start()
        looking = welcome or open_tab == "models"
        unknown = looking and models.fits.hardware() is None
        waiting = tuple((one.repo_id, one.state) for one in models.queue.view())
        load = models.chats.load_settings
        from_disk = load.model if load.experts_on == "disk" else ""  # whose card is judged so
        what = (models.shelf.view().revision, models.fits.epoch, waiting, from_disk, view.language)
        pace = (looking, MOVING_S if models.moves() or unknown else STILL_S)
        parts: dict[str, tuple[Any, Callable[[], Updates]]] = {
            "opened": (opened, lambda: {self.tabs: gr.Tabs(selected="chat")}),
            "timer": (pace, lambda: {self.timer: gr.Timer(pace[1], active=pace[0])}),
            "welcome": (
                what if welcome else None,
                lambda: {self.welcome: suggestions_html(models, t) if welcome else ""},
            ),
        }
        if open_tab != "models":
            return parts
        status = models.chats.holder.status()
        draft = words.draft(status) if status.info is not None else ""
        loaded = (status.model, status.phase, draft, words.improvement_news(status))
        found = models.finder.view().revision
        model, why = models.notice
        not_loaded = f"{model}: {t(why)}" if why else ""
        return {
            **parts,
            "notice": (not_loaded, lambda: {tab.notice: message_html(not_loaded, False)}),
            "suggestions": (what, lambda: {tab.suggestions: suggestions_html(models, t)}),
            "results": ((found, *what), lambda: {tab.results: results_html(models, t)}),
            "shelf": ((loaded, *what), lambda: {tab.shelf: shelf_html(models, t)}),
            "queue": (
                (models.queue.revision, view.language),
                lambda: {tab.queue: queue_html(models.queue.view(), t)},
            ),
        }
