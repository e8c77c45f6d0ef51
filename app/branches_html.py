"""The arrows "2 / 3" that lead to other versions of a message, as HTML. A script of the page puts them under
their messages: what a Chatbot shows is sanitised, and keeps no button that could be pressed."""

from __future__ import annotations

from html import escape

from app.chats import Chat
from app.messages import split_turns
from app.texts import ENGLISH, Texts


def branches_html(chat: Chat | None, shown: int, answering: bool, t: Texts = ENGLISH) -> str:
    """Arrows for every message of the shown branch that has other versions. While an answer is written they
    wait.

    Args:
        shown: how many messages of the finished history are drawn.
    """
    if chat is None:
        return ""
    tree, children = chat.tree, chat.tree.children()
    cut = len(split_turns(chat)[0])
    first = max(0, cut - shown)
    found, users = [], {"history": -1, "turn": -1}
    for place, node in enumerate(tree.path()):
        if place < first:
            continue
        where = "history" if place < cut else "turn"
        role = tree.nodes[node].role
        users[where] += role == "user"
        versions = children[tree.parents[node]]
        if len(versions) > 1:
            at = f'data-list="{where}" data-user="{users[where]}" data-role="{role}"'
            found.append(f'<div class="lm-branch" {at}>{_arrows(versions, node, answering, t)}</div>')
    return f"<div hidden>{''.join(found)}</div>" if found else ""


def _arrows(versions: list[int], node: int, answering: bool, t: Texts) -> str:
    place = versions.index(node)
    before = versions[place - 1] if place else None
    after = versions[place + 1] if place + 1 < len(versions) else None
    total = t("version {number} of {total}", number=place + 1, total=len(versions))
    count = f'<span aria-label="{escape(total)}">{place + 1} / {len(versions)}</span>'
    return (
        _arrow("◂", before, t("Previous version"), answering)
        + count
        + _arrow("▸", after, t("Next version"), answering)
    )


def _arrow(sign: str, node: int | None, label: str, answering: bool) -> str:
    off = " disabled" if node is None or answering else ""
    key = "" if node is None else f' data-node="{node}"'
    name = f'aria-label="{escape(label)}" title="{escape(label)}"'
    return f'<button type="button" {name}{key}{off}>{sign}</button>'
