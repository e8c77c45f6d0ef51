"""What each open page looks at. The page holds it itself, in a box that nobody sees, as Gradio's own state is
gone an hour after a connection was lost; the newest view of each page is remembered here besides, as answers
can overtake each other on their way to it, and actions while they are done. Decides nothing of what is
shown."""

from __future__ import annotations

import itertools
import json
import threading
import time
from abc import ABCMeta
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import gradio as gr
from gradio.component_meta import ComponentMeta

from app.chat_search import MAX_QUERY
from app.chats import ChatError, check_id
from app.view import WINDOW, View

SESSIONS = 200  # that Gradio keeps, at 0.4 MB each
PAGES = 150  # fewer: a page that Gradio has forgotten is unknown here too, and opens anew (static/now.js)
_MAX_SHOWN = 1_000_000


class _WithoutStub(ComponentMeta):
    """Gradio's own also writes a stub of each new class of components beside its file."""

    def __new__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> _WithoutStub:
        return ABCMeta.__new__(cls, name, bases, attributes)


class PageViews:
    """By page. May be used from any thread."""

    def __init__(self) -> None:
        self._views: OrderedDict[str, View] = OrderedDict()
        self._actions = itertools.count(1)  # a clock may stand still between two of them
        self._lock = threading.Lock()

    def box(self) -> gr.Textbox:
        """Where a page holds its view. As an input of a listener it is the newest `View`."""
        views = self

        class ViewBox(gr.Textbox, metaclass=_WithoutStub):
            """Gradio makes another one of the class whenever a listener leaves it as it is."""

            is_template = True  # of a Textbox, for the page

            def preprocess(self, payload: str | None) -> View:  # type: ignore[override]
                return views.newest(parse_view(payload))

        return ViewBox("", visible=False, label="View")

    def newest(self, held: View) -> View:
        """Of the page that holds this one. One that is not known here keeps what it holds, and its stamp
        says so."""
        with self._lock:
            begun, kept = next(self._actions), self._views.get(held.page)
            if kept is None:
                return replace(held, stamp=0, begun=begun)
            self._views.move_to_end(held.page)
            return replace(kept, begun=begun)

    def keep(self, view: View) -> View:
        """What the page looks at from here on, as an action that has ended leaves it: but for the place and
        the search of one that began later, and has ended before."""
        with self._lock:
            kept = self._views.get(view.page)
            if kept is not None and view.placed < kept.placed:
                view = replace(view, chat_id=kept.chat_id, shown=kept.shown, placed=kept.placed)
            if kept is not None and view.searched < kept.searched:
                view = replace(view, find=kept.find, searched=kept.searched)
            view = replace(view, stamp=max(time.monotonic_ns(), 1 + (kept.stamp if kept else 0)))
            self._views[view.page] = view
            self._views.move_to_end(view.page)
            while len(self._views) > PAGES:
                self._views.popitem(last=False)
            return view


def view_text(view: View) -> str:
    """What a page holds of its view. A notice is no part of it: it goes with the next action anyway."""
    return json.dumps(
        {"page": view.page, "chat": view.chat_id, "shown": view.shown, "language": view.language,
         "find": view.find}
    )  # fmt: skip


def parse_view(text: object) -> View:
    """The other way; what is not a page's own text counts as that of a page that has just opened."""
    try:
        found = json.loads(text) if isinstance(text, str) and text else {}
    except (ValueError, RecursionError):
        found = {}
    if not isinstance(found, dict):
        return View()
    shown, find, page = found.get("shown"), found.get("find"), found.get("page")
    return View(
        chat_id=_chat_id(found.get("chat")),
        shown=min(max(shown, WINDOW), _MAX_SHOWN) if isinstance(shown, int) else WINDOW,
        language="zh" if found.get("language") == "zh" else "en",
        find=find[:MAX_QUERY] if isinstance(find, str) else "",
        page=page[:32] if isinstance(page, str) else "",
    )


def _chat_id(found: object) -> str | None:
    try:
        return None if found is None else check_id(found)
    except ChatError:
        return None
