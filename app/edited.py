"""Which message an edit is of, and its pictures. A list of the page may be drawn anew while a message of it
is being edited, and Gradio tells only the text and the place in the list; so the page notes which messages
the list showed when the edit began, and which pictures the message is sent with (static/edits.js). Changes
nothing."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from app.chats import Chat, ChatError
from app.messages import split_turns
from app.requests import picture_ids
from app.texts import ENGLISH, Texts


def listed_html(chat: Chat | None, shown: int, t: Texts = ENGLISH) -> str:
    """For the page's script: the nodes of the messages that are drawn, by list; how an edit's box is called.

    Args:
        shown: how many messages of the finished history are drawn.
    """
    if chat is None:
        return ""
    nodes, cut = chat.tree.path(), len(split_turns(chat)[0])
    lists = {"history": nodes[max(0, cut - shown) : cut], "turn": nodes[cut:]}
    told = "".join(
        f' data-{name}="{escape(json.dumps({"chat": chat.id, "nodes": found}))}"'
        for name, found in lists.items()
    )
    return f'<i hidden{told} data-name="{escape(t("Your message"))}"></i>'


def edited_node(noted: object, chat_id: str | None, place: object) -> int:
    """The message that was at this place of its list when its edit began.

    Args:
        noted: by the page's script, then.
        chat_id: which the page shows now.

    Raises:
        ChatError: it was in another chat, or nobody knows it.
    """
    found = _noted(noted)
    try:
        nodes = found["nodes"] if found["chat"] == chat_id else ()
        node = nodes[place] if isinstance(place, int) and place >= 0 else None
    except (LookupError, TypeError):
        node = None
    if not isinstance(node, int):
        raise ChatError("The chat has changed meanwhile: open the message again to edit it.")
    return node


def edited_pictures(noted: object) -> tuple[str, ...] | None:
    """Ids of the pictures of the message as it is sent; None: those that it has.

    Raises:
        ChatError: one was not attached.
    """
    images = _noted(noted).get("images")
    return None if images is None else picture_ids(images)


def _noted(noted: object) -> dict[str, Any]:
    try:
        found = json.loads(noted) if isinstance(noted, str) and noted else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
