"""The list of chats: new, open, rename, delete. Titles are escaped here; ids are checked by the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import gradio as gr

from app.chats import Chat, check_id
from app.texts import ENGLISH, Texts
from app.view import WINDOW, Seen, Updates, View

if TYPE_CHECKING:
    from app.screen import Screen

_SCRIPT = Path(__file__).parent.parent / "static" / "chat_list.js"


@dataclass(frozen=True, slots=True)
class SidebarWidgets:
    """The widgets of the left column."""

    new: gr.Button
    chats: gr.HTML


def create_sidebar() -> SidebarWidgets:
    """Lay the widgets out."""
    gr.HTML(
        '<div class="lm-brand"><span class="lm-logo" aria-hidden="true"></span>localmoe</div>',
        apply_default_css=False,
    )
    new = gr.Button("New chat", elem_id="lm-new", variant="secondary")
    chats = gr.HTML(
        chat_list_html((), None),
        apply_default_css=False,
        elem_id="lm-chats",
        js_on_load=_SCRIPT.read_text(encoding="utf-8"),
    )
    return SidebarWidgets(new, chats)


def chat_list_html(
    chats: Sequence[Chat], current: str | None, answering: str | None = None, t: Texts = ENGLISH
) -> str:
    """The chats as a list of buttons; the one that is being answered is marked."""
    if not chats:
        return f'<p class="lm-empty">{escape(t("No chats yet."))}</p>'
    rows = "".join(_row(chat, chat.id == current, chat.id == answering, t) for chat in chats)
    return f'<nav aria-label="{escape(t("Chats"))}"><ul class="lm-chat-list">{rows}</ul></nav>'


def _row(chat: Chat, current: bool, answering: bool, t: Texts) -> str:
    title = escape(chat.title)
    mark = ' aria-current="true"' if current else ""
    dot = f'<span class="lm-answering" title="{escape(t("being answered"))}"></span>' if answering else ""
    sure, new_title = escape(t("Delete?")), escape(t("New title"))
    return (
        f'<li data-chat="{chat.id}" data-sure="{sure}" data-new-title="{new_title}"{mark}>'
        f'<button type="button" class="lm-open" data-act="open" title="{title}">{title}</button>{dot}'
        f"{_icon('rename', t('Rename'), title, '✎')}{_icon('delete', t('Delete'), title, '✕')}</li>"
    )


def _icon(action: str, name: str, title: str, sign: str) -> str:
    label = f'aria-label="{name} {title}" title="{name}"'
    return f'<button type="button" class="lm-icon" data-act="{action}" {label}>{sign}</button>'


def connect_sidebar(widgets: SidebarWidgets, screen: Screen) -> None:
    """Attach the listeners."""
    service = screen.service

    def handle_new(view: View, seen: Seen) -> Updates:
        return screen.updates(replace(view, chat_id=None, shown=WINDOW, notice=""), seen)

    def handle_open(view: View, seen: Seen, event: gr.EventData) -> Updates:
        def act() -> tuple[View, Updates]:
            chat = service.chats.get(_chat_id(event))
            return replace(view, chat_id=chat.id, shown=WINDOW), {}

        return screen.act(view, seen, act)

    def handle_rename(view: View, seen: Seen, event: gr.EventData) -> Updates:
        def act() -> tuple[View, Updates]:
            service.chats.rename(_chat_id(event), str(event._data.get("title", "")))
            return view, {}

        return screen.act(view, seen, act)

    def handle_delete(view: View, seen: Seen, event: gr.EventData) -> Updates:
        def act() -> tuple[View, Updates]:
            chat_id = _chat_id(event)
            service.delete(chat_id)
            return (replace(view, chat_id=None) if view.chat_id == chat_id else view), {}

        return screen.act(view, seen, act)

    both = [screen.view, screen.seen]
    screen.listen(widgets.new.click, handle_new, both)
    screen.listen(widgets.chats.open_chat, handle_open, both)
    screen.listen(widgets.chats.rename_chat, handle_rename, both)
    screen.listen(widgets.chats.delete_chat, handle_delete, both)


def _chat_id(event: gr.EventData) -> str:
    data = event._data if isinstance(event._data, dict) else {}
    return check_id(data.get("id"))
