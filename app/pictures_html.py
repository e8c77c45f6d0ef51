"""The pictures of messages, as HTML. A script of the page puts them above their texts (static/pictures.js):
within a message they would be part of the text that is copied and edited."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from app.chats import Chat
from app.messages import split_turns
from app.texts import ENGLISH, Texts


def pictures_html(chat: Chat | None, shown: int, is_there: Callable[[str], bool], t: Texts = ENGLISH) -> str:
    """Of every message of the shown branch that has pictures; each opens whole in a tab of its own.

    Args:
        shown: how many messages of the finished history are drawn.
        is_there: whether a picture of this id is on the disk.
    """
    if chat is None:
        return ""
    history, turn = split_turns(chat)
    lists = {"history": history[max(0, len(history) - shown) :], "turn": turn}
    found = []
    for name, messages in lists.items():
        questions = [message for message in messages if message.role == "user"]
        for place, message in enumerate(questions):
            if message.images:
                alone = "" if message.content else " data-alone"
                found.append(
                    f'<ul class="lm-pictures" data-list="{name}" data-user="{place}"{alone} '
                    f'aria-label="{escape(t("Pictures of this message"))}">'
                    f"{_items(message.images, is_there, t)}</ul>"
                )
    return f"<div hidden>{''.join(found)}</div>" if found else ""


def _items(images: tuple[str, ...], is_there: Callable[[str], bool], t: Texts) -> str:
    items = enumerate(images, 1)
    return "".join(
        f'<li data-id="{escape(one)}">{_item(one, i, len(images), is_there, t)}</li>' for i, one in items
    )


def _item(image: str, number: int, total: int, is_there: Callable[[str], bool], t: Texts) -> str:
    if not is_there(image):
        return f"<span>{escape(t('A picture that is not on the disk any more'))}</span>"
    alt = escape(t("Picture {number} of {total}", number=number, total=total))
    title = escape(t("Open it whole in a new tab"))
    return (
        f'<a href="/images/{escape(image)}" target="_blank" rel="noopener" title="{title}">'
        f'<img src="/images/{escape(image)}" alt="{alt}" loading="lazy" decoding="async"></a>'
    )
