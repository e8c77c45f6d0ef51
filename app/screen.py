"""What an open page shows, and what of it has changed since it was last told. The one place that turns the
service's state into widget updates; every listener ends here. What moves while an answer is written goes
another way (app/now.py)."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import gradio as gr

from app.branches_html import branches_html
from app.chat_search import ChatSearch
from app.chats import Chat, ChatError
from app.edited import listed_html
from app.engine_holder import EngineNotReadyError
from app.jobs import JobRunningError
from app.messages import history_entries, split_turns, turn_entries
from app.now import NowView, turn_key
from app.now_html import mark_html
from app.page_views import PageViews, view_text
from app.pictures_html import pictures_html
from app.service import ChatService
from app.status_html import header_html, message_html, news_html, own_sampling_html, share_html
from app.tabs.chat import ChatWidgets
from app.tabs.settings import SettingsWidgets
from app.tabs.sidebar import SidebarWidgets, chat_list_html, files_html
from app.texts import Texts, texts_for
from app.view import Seen, Updates, View, in_sight
from localmoe.core.errors import LocalMoeError

Part = tuple[Any, Callable[[], Updates]]  # what it shows, as a key; its updates
Again = Literal["once", "multiple", "always_last"]


@dataclass(frozen=True, slots=True)
class Widgets:
    """Everything that a refresh may change."""

    chat: ChatWidgets
    sidebar: SidebarWidgets
    settings: SettingsWidgets
    header: gr.HTML
    said: gr.HTML  # what came of its buttons
    news: gr.HTML
    kept: gr.HTML  # changes when settings have changed, here or elsewhere; a change of a State tells nobody
    mark: gr.HTML  # what the page shows, for its script
    last_chat: gr.BrowserState


class Screen:
    """Computes updates. `seen` says, by part, what the page shows. It lives in the page and not here: answers
    can overtake each other, and whichever the page takes last brings its own `seen` and mark, by which its
    script asks for another refresh that mends what is out of date."""

    def __init__(self, service: ChatService, now: NowView, widgets: Widgets) -> None:
        self.service = service
        self._now = now
        self.widgets = widgets
        self._views = PageViews()
        self.view = self._views.box()
        self._search = ChatSearch()
        self.seen = gr.Textbox("", visible=False, label="Shown")
        chat = widgets.chat
        self._outputs = [
            self.view, self.seen, chat.earlier, chat.history, chat.turn, chat.branches, chat.pictures,
            chat.listed, chat.go_on, chat.notice, chat.send, chat.stop, widgets.sidebar.chats,
            widgets.sidebar.files, widgets.settings.load.share, widgets.settings.answers.sampling.own,
            widgets.kept, widgets.header, widgets.said, widgets.news, widgets.mark,
            widgets.last_chat,
        ]  # fmt: skip

    def listen(
        self,
        event: Callable[..., Any],
        handler: Callable[..., Updates],
        inputs: Sequence[Any],
        extra: Sequence[Any] = (),
        js: str | None = None,
        again: Again = "multiple",
    ) -> None:
        """Attach a listener that may change anything above and `extra`; nothing waits in a queue. again: what
        becomes of the event while the answer to another of its kind is on its way; Gradio's own "once" loses
        it, which is right only for what would be refused."""
        event(
            handler, list(inputs), list(dict.fromkeys([*self._outputs, *extra])), queue=False,
            show_progress="hidden", api_visibility="private", js=js, trigger_mode=again,
        )  # fmt: skip

    def listen_to_script(self) -> None:
        """Events of static/now.js: `due`, when the page is out of date, and `grown`, when the answer has new
        text. The latter never comes here: it is a function of the page, which puts the text into the turn
        that is shown by `seen`; `check` looks whether that turn is still shown. Gradio makes all outputs of a
        listener anew, changed or not, at a millisecond each; so nothing that moves may be one."""
        settings: dict[str, Any] = {
            "queue": False, "show_progress": "hidden", "api_visibility": "private"
        }  # fmt: skip
        mark, turn = self.widgets.mark, self.widgets.chat.turn
        seen = "(view, seen) => [view, window.localmoeSeen(seen)]"
        mark.due(self.refresh, [self.view, self.seen], self._outputs, js=seen, **settings)
        grown = "(seen, turn) => window.localmoeGrown(seen, turn)"
        mark.grown(None, [self.seen, turn], [turn], js=grown, **settings)
        check = "(seen, turn) => window.localmoeCheck(seen, turn)"
        mark.check(None, [self.seen, turn], [], js=check, **settings)

    def act(self, view: View, seen: Seen, action: Callable[[], tuple[View, Updates]]) -> Updates:
        """Do what the user asked; a refusal becomes the notice and changes nothing else."""
        try:
            new_view, extra = action()
        except LocalMoeError as error:
            return self.updates(self.refused(view, error), seen)
        return {**self.updates(replace(new_view, notice=""), seen), **extra}

    def refused(self, view: View, error: LocalMoeError) -> View:
        """With the refusal as its notice, which says "wait" no longer than there is something to wait for."""
        passes = isinstance(error, JobRunningError | EngineNotReadyError)
        return view.refused(str(error), self._doing() if passes else "")

    def _doing(self) -> str:
        return f"{self.service.runner.running()} {self.service.holder.status().phase}"

    def updates(self, view: View, seen: Seen) -> Updates:
        """A refresh after an action: like `refresh`, and the page remembers its view."""
        view = self._views.keep(replace(view, page=view.page or secrets.token_hex(8)))
        return {**self.refresh(view, seen), self.widgets.last_chat: view.chat_id}

    def chat_id(self, view: View) -> str | None:
        """The chat that the page shows; None for a new one, or one deleted in another window."""
        chat = self._chat(view)
        return chat.id if chat is not None else None

    def refresh(self, view: View, seen: Seen) -> Updates:
        """What changed since `seen`."""
        parts, shown = self._parts(view), parse_seen(seen)
        updates: Updates = {}
        for name, (key, make) in parts.items():
            if shown.get(name) != str(key):
                updates.update(make())
        told = json.dumps({name: str(key) for name, (key, _) in parts.items()})
        updates[self.seen] = told if told != seen else gr.skip()  # drawing it anew costs the page 0.1 s
        return updates

    def _parts(self, view: View) -> dict[str, Part]:
        """What the page should show, part by part."""
        service, widgets = self.service, self.widgets
        epoch = self._now.epoch()  # before all else: what changes from here on is of a later one
        status, job = service.holder.status(), service.runner.view()
        revision = service.chats.revision
        chat = self._chat(view)
        mine = job if job is not None and chat is not None and job.chat_id == chat.id else None
        running = job is not None and job.finish is None
        t = texts_for(view.language)
        header, news, share = header_html(status, t), news_html(status, t), share_html(status, running, t)
        own = own_sampling_html(status, t)
        answering = job.chat_id if job is not None and running else None
        chat_id = chat.id if chat is not None else None
        coloured = service.answers.show_drafted
        go_on = chat is not None and not running and service.can_continue(chat)
        questions = [message for message in split_turns(chat)[1] if message.role == "user"]
        held = view_text(view)
        notice = view.notice if view.notice_of in ("", self._doing()) else ""
        mark = mark_html(chat_id, len(questions), running, epoch, view.stamp)
        return {
            "view": (held, lambda: {self.view: held}),
            "history": (
                (chat_id, revision, view.shown, coloured),
                lambda: self._history(chat, view.shown, coloured, t),
            ),
            "turn": (
                turn_key(chat_id, revision, mine, coloured),
                lambda: {widgets.chat.turn: turn_entries(split_turns(chat)[1], mine, t, coloured=coloured)},
            ),
            "go on": (go_on, lambda: {widgets.chat.go_on: gr.Button(visible=go_on)}),
            "branches": (
                (chat_id, revision, view.shown, answering == chat_id),
                lambda: {widgets.chat.branches: branches_html(chat, view.shown, answering == chat_id, t)},
            ),
            "pictures": (
                (chat_id, revision, view.shown),
                lambda: {widgets.chat.pictures: pictures_html(chat, view.shown, service.pictures.has, t)},
            ),
            "listed": (
                (chat_id, revision, view.shown),
                lambda: {widgets.chat.listed: listed_html(chat, view.shown, t)},
            ),
            "list": (
                (revision, chat_id, answering, view.find),
                lambda: {widgets.sidebar.chats: self._list(view.find, chat_id, answering, t)},
            ),
            "files": (chat_id, lambda: {widgets.sidebar.files: files_html(chat_id, t)}),
            # these two are read out when they change, so the page gets them only then
            "header": (hash(header), lambda: {widgets.header: header, widgets.said: ""}),
            "news": (hash(news), lambda: {widgets.news: news}),
            "share": (hash(share), lambda: {widgets.settings.load.share: share}),
            "own sampling": (hash(own), lambda: {widgets.settings.answers.sampling.own: own}),
            "settings": (
                hash((service.load_settings, service.answers)),
                lambda: {widgets.kept: str(time.monotonic_ns())},  # another one when told again
            ),
            "buttons": (running, lambda: self._buttons(running)),
            "notice": (notice, lambda: {widgets.chat.notice: message_html(t(notice), view.good)}),
            "mark": (mark, lambda: {widgets.mark: mark}),
        }

    def _chat(self, view: View) -> Chat | None:
        if view.chat_id is None:
            return None
        try:
            return self.service.chats.get(view.chat_id)
        except ChatError:
            return None  # deleted in another window

    def _history(self, chat: Chat | None, shown: int, coloured: bool, t: Texts) -> Updates:
        messages = split_turns(chat)[0]
        widgets = self.widgets.chat
        return {
            widgets.history: gr.update(
                value=history_entries(messages[-shown:], t, coloured=coloured),
                visible=in_sight(bool(messages)),
            ),
            widgets.earlier: gr.Button(visible=len(messages) > shown),
        }

    def _list(self, find: str, chat_id: str | None, answering: str | None, t: Texts) -> str:
        found = self._search.find(self.service.chats.list(), find)
        return chat_list_html(found, chat_id, answering, t, searched=bool(find.strip()))

    def _buttons(self, running: bool) -> Updates:
        widgets = self.widgets.chat
        return {widgets.send: gr.Button(visible=not running), widgets.stop: gr.Button(visible=running)}


def parse_seen(seen: Seen) -> dict[str, str]:
    """Part -> key of what the page shows; empty if it is none of ours."""
    try:
        found = json.loads(seen or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
