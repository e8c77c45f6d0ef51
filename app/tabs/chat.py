"""The conversation and the box to write in. Asks the service; decides nothing about answers."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import gradio as gr

from app.edited import edited_node, edited_pictures
from app.now_html import frame_html
from app.requests import attached_pictures
from app.tabs.models import action_html
from app.tag_text import written
from app.theme import STATIC
from app.view import WINDOW, Seen, Updates, View
from localmoe.core.errors import LocalMoeError

if TYPE_CHECKING:
    from app.screen import Screen

_PLACEHOLDER = (
    "### What would you like to talk about?\nEverything runs on this computer; nothing you write leaves it."
)

_FORMULAS: list[dict[str, str | bool]] = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": r"\[", "right": r"\]", "display": True},
    {"left": r"\(", "right": r"\)", "display": False},
]


@dataclass(frozen=True, slots=True)
class ChatWidgets:
    """The widgets of the chat tab."""

    welcome: gr.HTML  # the first start's proposals
    earlier: gr.Button
    history: gr.Chatbot  # finished turns: drawn once
    turn: gr.Chatbot  # the last turn: drawn again while it grows
    branches: gr.HTML  # arrows to other versions of messages, which a script puts in their places
    pictures: gr.HTML  # of messages, likewise
    listed: gr.HTML  # which messages the lists show, for the script that notes what an edit is of
    go_on: gr.Button
    meter: gr.HTML  # how much of the context is used
    notice: gr.HTML
    message: gr.Textbox
    attached: gr.Textbox  # JSON of the ids of its pictures, which only the script that sends them fills
    sent: gr.HTML  # changes when a message was sent; a change of a State tells nobody
    send: gr.Button
    stop: gr.Button


def create_chat_tab() -> ChatWidgets:
    """Lay the widgets out."""
    with gr.Column(elem_id="lm-scroll"):
        welcome = action_html("lm-welcome")
        earlier = gr.Button("Show earlier messages", size="sm", visible=False, elem_id="lm-earlier")
        history = _chatbot("Earlier messages of this chat", "lm-history", None, visible="hidden")
        turn = _chatbot("Last question and answer", "lm-turn", _PLACEHOLDER, visible=True)
        go_on = gr.Button("Continue the answer", size="sm", visible=False, elem_id="lm-continue")
    branches = gr.HTML(
        "", apply_default_css=False, elem_id="lm-branches",
        js_on_load=(STATIC / "branches.js").read_text(encoding="utf-8"),
    )  # fmt: skip
    pictures = gr.HTML(
        "", apply_default_css=False, elem_id="lm-pictures",
        js_on_load=(STATIC / "pictures.js").read_text(encoding="utf-8"),
    )  # fmt: skip
    listed = gr.HTML(
        "", apply_default_css=False, elem_id="lm-listed",
        js_on_load=(STATIC / "edits.js").read_text(encoding="utf-8"),
    )  # fmt: skip
    notice = gr.HTML("", apply_default_css=False, elem_id="lm-notice")
    with gr.Row(elem_id="lm-composer"):
        gr.Button(
            "Attach", variant="secondary", elem_id="lm-attach", min_width=60, scale=0
        )  # static/attach.js
        message = gr.Textbox(
            label="Message", show_label=False, container=False, placeholder="Write a message", lines=1,
            max_lines=10, autofocus=True, elem_id="lm-message", scale=1,
            html_attributes=_message_attributes(),
        )  # fmt: skip
        send = gr.Button("Send", variant="primary", elem_id="lm-send", min_width=84, scale=0)
        stop = gr.Button("Stop", variant="stop", visible=False, elem_id="lm-stop", min_width=84, scale=0)
    meter = gr.HTML(frame_html("meter"), apply_default_css=False, elem_id="lm-meter")
    sent = gr.HTML("", apply_default_css=False, visible="hidden")
    attached = gr.Textbox("", visible=False, label="Attached pictures")
    return ChatWidgets(
        welcome, earlier, history, turn, branches, pictures, listed, go_on, meter, notice, message, attached,
        sent, send, stop,
    )  # fmt: skip


def _message_attributes() -> gr.InputHTMLAttributes:
    return gr.InputHTMLAttributes(spellcheck=True, enterkeyhint="send")


def _chatbot(
    label: str, elem_id: str, placeholder: str | None, *, visible: Literal[True, "hidden"]
) -> gr.Chatbot:
    return gr.Chatbot(
        [], label=label, show_label=False, container=False, elem_id=elem_id, elem_classes=["lm-turns"],
        height=None, autoscroll=False, editable="user", buttons=["copy"], sanitize_html=True, layout="bubble",
        feedback_options=None, placeholder=placeholder, group_consecutive_messages=True, allow_tags=False,
        latex_delimiters=_FORMULAS, visible=visible,
    )  # fmt: skip


def connect_chat_tab(widgets: ChatWidgets, screen: Screen) -> None:
    """Attach the listeners."""
    service = screen.service

    def handle_send(text: str, attached: str, view: View, seen: Seen) -> Updates:
        def act() -> tuple[View, Updates]:
            chat_id = service.send(screen.chat_id(view), text or "", attached_pictures(attached))
            shown = view.shown if chat_id == view.chat_id else WINDOW
            return view.at(chat_id, shown), {widgets.sent: str(time.monotonic_ns())}

        return screen.act(view, seen, act)

    def handle_stop(view: View, seen: Seen) -> Updates:
        service.runner.stop()
        return screen.updates(view, seen)

    def handle_retry(view: View, seen: Seen) -> Updates:
        def act() -> tuple[View, Updates]:
            service.retry(view.chat_id or "")
            return view, {}

        return screen.act(view, seen, act)

    def handle_continue(view: View, seen: Seen) -> Updates:
        def act() -> tuple[View, Updates]:
            service.continue_answer(view.chat_id or "")
            return view, {}

        return screen.act(view, seen, act)

    def handle_version(view: View, seen: Seen, event: gr.EventData) -> Updates:
        def act() -> tuple[View, Updates]:
            node = event._data.get("node")
            service.show(view.chat_id or "", node if isinstance(node, int) else -1)
            return view, {}

        return screen.act(view, seen, act)

    def handle_earlier(view: View, seen: Seen) -> Updates:
        return screen.updates(view.at(view.chat_id, view.shown + WINDOW), seen)

    both = [screen.view, screen.seen]
    # what is typed while the message is on its way stays (static/unsent.js)
    told = "[window.localmoeSends(text), window.localmoeHeld.toSend(), view, seen]"
    noted = f"(text, attached, view, seen) => {told}"
    sending = partial(gr.on, [widgets.message.submit, widgets.send.click])
    inputs, extra = [widgets.message, widgets.attached, *both], [widgets.sent]
    screen.listen(sending, handle_send, inputs, extra, js=noted, again="once")
    widgets.sent.change(
        None, [widgets.message], [widgets.message], js="(text) => [window.localmoeUnsent(text)]",
        queue=False, show_progress="hidden", api_visibility="private",
    )  # fmt: skip
    screen.listen(widgets.stop.click, handle_stop, both)
    screen.listen(widgets.turn.retry, handle_retry, both, again="once")
    screen.listen(widgets.go_on.click, handle_continue, both, again="once")
    screen.listen(widgets.branches.show_version, handle_version, both)
    screen.listen(widgets.earlier.click, handle_earlier, both)
    _connect_edits(widgets, screen)


def _connect_edits(widgets: ChatWidgets, screen: Screen) -> None:
    def handle_edit(view: View, noted: str, data: gr.EditData) -> Updates:
        """Whatever comes of it, draw both lists anew: the browser has already changed its own copy."""
        try:
            text = written(data.value) if isinstance(data.value, str) else ""
            place = data.index if isinstance(data.index, int) else data.index[0]
            node = edited_node(noted, view.chat_id, place)
            screen.service.edit(view.chat_id or "", node, text, edited_pictures(noted))
        except LocalMoeError as error:
            return screen.updates(screen.refused(view, error), "")
        return screen.updates(replace(view, notice=""), "")

    for name, chatbot in (("turn", widgets.turn), ("history", widgets.history)):
        noted = f"(view) => [view, window.localmoeEdited('{name}')]"
        screen.listen(chatbot.edit, handle_edit, [screen.view, screen.seen], js=noted)
