"""The list of chats: new, search, open, rename, delete, export, import. Titles are escaped here; ids are
checked by the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING

import gradio as gr

from app.chat_file import NEW_TITLE
from app.chat_search import MAX_QUERY, Found
from app.chat_transfer import MAX_WITH_PICTURES
from app.chats import check_id
from app.texts import ENGLISH, Texts
from app.theme import STATIC
from app.view import Seen, Updates, View
from localmoe.core.units import format_bytes

if TYPE_CHECKING:
    from app.screen import Screen


@dataclass(frozen=True, slots=True)
class SidebarWidgets:
    """The widgets of the left column."""

    new: gr.Button
    find: gr.Textbox
    chats: gr.HTML
    files: gr.HTML  # export and import


def create_sidebar() -> SidebarWidgets:
    """Lay the widgets out."""
    gr.HTML(
        '<div class="lm-brand"><span class="lm-logo" aria-hidden="true"></span>localmoe</div>',
        apply_default_css=False,
    )
    new = gr.Button("New chat", elem_id="lm-new", variant="secondary")
    find = gr.Textbox(
        "", label="Search the chats", show_label=False, container=False, elem_id="lm-find", max_lines=1,
        placeholder="Search (Ctrl+K)",
    )  # fmt: skip
    chats = gr.HTML(
        chat_list_html((), None),
        apply_default_css=False,
        elem_id="lm-chats",
        js_on_load=(STATIC / "chat_list.js").read_text(encoding="utf-8"),
    )
    files = gr.HTML(
        "", apply_default_css=False, elem_id="lm-files",
        js_on_load=(STATIC / "files.js").read_text(encoding="utf-8"),
    )  # fmt: skip
    return SidebarWidgets(new, find, chats, files)


def chat_list_html(
    found: Sequence[Found],
    current: str | None,
    answering: str | None = None,
    t: Texts = ENGLISH,
    *,
    searched: bool = False,
) -> str:
    """The chats as a list of buttons; the one that is being answered is marked."""
    if not found:
        nothing = t("No chat has these words.") if searched else t("No chats yet.")
        role = ' role="status"' if searched else ""
        return f'<p class="lm-empty"{role}>{escape(nothing)}</p>'
    rows = "".join(_row(one, one.chat.id == current, one.chat.id == answering, t) for one in found)
    return f'<nav aria-label="{escape(t("Chats"))}"><ul class="lm-chat-list">{rows}</ul></nav>'


def files_html(chat_id: str | None, t: Texts = ENGLISH) -> str:
    """Where the chat that is shown can be had as a file, and the button that takes one."""
    limit = format_bytes(MAX_WITH_PICTURES)
    large = t("The file has more than {size}, and no more than that can be imported.", size=limit)
    failed = t("The file could not be sent: is localmoe still running?")
    texts = f'data-max="{MAX_WITH_PICTURES}" data-large="{escape(large)}" data-failed="{escape(failed)}"'
    links = ""
    if chat_id is not None:
        json_title, text_title = t("This chat with all versions"), t("What is shown, as a text")
        language = f"?language={t.language}"
        links = (
            f"<span>{escape(t('Export'))}</span>"
            f'<a href="/chats/{chat_id}.json" download title="{escape(json_title)}">JSON</a>'
            f'<a href="/chats/{chat_id}.md{language}" download title="{escape(text_title)}">Markdown</a>'
        )
    name = escape(t("Import a chat"))
    choose = (
        f'<input type="file" accept=".json,.md,application/json,text/markdown" hidden aria-label="{name}">'
    )
    button = f'<button type="button" data-act="import">{name}</button>'
    return f'<div class="lm-files" {texts}>{links}{button}{choose}</div>'


def _row(found: Found, current: bool, answering: bool, t: Texts) -> str:
    chat = found.chat
    title = escape(t(chat.title) if chat.title == NEW_TITLE else chat.title)  # of pictures without a word
    mark = ' aria-current="true"' if current else ""
    dot = f'<span class="lm-answering" title="{escape(t("being answered"))}"></span>' if answering else ""
    snippet = f'<span class="lm-snippet">{escape(found.snippet)}</span>' if found.snippet else ""
    sure, new_title = escape(t("Delete?")), escape(t("New title"))
    return (
        f'<li data-chat="{chat.id}" data-sure="{sure}" data-new-title="{new_title}"{mark}>'
        f'<button type="button" class="lm-open" data-act="open" title="{title}">{title}{snippet}</button>'
        f"{dot}"
        f"{_icon('rename', t('Rename'), title, '✎')}{_icon('delete', t('Delete'), title, '✕')}</li>"
    )


def _icon(action: str, name: str, title: str, sign: str) -> str:
    label = f'aria-label="{name} {title}" title="{name}"'
    return f'<button type="button" class="lm-icon" data-act="{action}" {label}>{sign}</button>'


def connect_sidebar(widgets: SidebarWidgets, screen: Screen) -> None:
    """Attach the listeners."""
    service = screen.service

    def handle_new(view: View, seen: Seen) -> Updates:
        return screen.updates(replace(view.at(None), notice=""), seen)

    def handle_find(text: str, view: View, seen: Seen) -> Updates:
        return screen.updates(view.searching((text or "")[:MAX_QUERY]), seen)

    def handle_imported(view: View, seen: Seen, event: gr.EventData) -> Updates:
        data = event._data if isinstance(event._data, dict) else {}
        if data.get("error"):
            return screen.updates(view.refused(str(data["error"])[:500]), seen)

        def act() -> tuple[View, Updates]:
            chat = service.chats.get(_chat_id(event))
            return view.at(chat.id), {}

        return screen.act(view, seen, act)

    def handle_open(view: View, seen: Seen, event: gr.EventData) -> Updates:
        def act() -> tuple[View, Updates]:
            chat = service.chats.get(_chat_id(event))
            return view.at(chat.id), {}

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
            return (view.at(None, view.shown) if view.chat_id == chat_id else view), {}

        return screen.act(view, seen, act)

    both = [screen.view, screen.seen]
    screen.listen(widgets.new.click, handle_new, both)
    screen.listen(widgets.find.change, handle_find, [widgets.find, *both], again="always_last")
    screen.listen(widgets.files.imported, handle_imported, both)
    screen.listen(widgets.chats.open_chat, handle_open, both)
    screen.listen(widgets.chats.rename_chat, handle_rename, both)
    screen.listen(widgets.chats.delete_chat, handle_delete, both)


def _chat_id(event: gr.EventData) -> str:
    data = event._data if isinstance(event._data, dict) else {}
    return check_id(data.get("id"))
