"""A chat as JSON: what a file holds, and reading it back with everything checked. Opens no file.

Schema 2 keeps a tree: each message names the one that it follows, and `shown` is the last message of the
branch that is shown. Schema 1 kept one branch, as a list. Schema 3 is written for chats with pictures alone:
versions that know none would drop them with the next change, and leave such a file as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from app.chat_tree import ROOT, ChatMessage, MessageTree
from app.pictures import MAX_PICTURES, is_picture_id
from app.unicode_text import whole_unicode

SCHEMA, WITHOUT_PICTURES = 3, 2
Mend = Callable[[str], str]
MAX_TITLE = 80
NEW_TITLE = "New chat"
EMPTY = MessageTree()
_FIELDS = tuple(one.name for one in fields(ChatMessage))
_FIELDS_OF_TEXT = tuple(name for name in _FIELDS if name != "images")
_ROLES = ("user", "assistant")
_LATEST = 32_503_680_000.0  # the year 3000, in seconds since 1970
_LONGEST = 1 << 40  # characters
_BREAKS = re.compile(r"\r\n?|[\x85\u2028\u2029]")
_UNWANTED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # control characters that no text needs


class NewerChatError(Exception):
    """A newer version of localmoe wrote it."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation with all its branches. Times are seconds since 1970."""

    id: str
    title: str
    created: float
    updated: float
    tree: MessageTree = EMPTY

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The branch that is shown, oldest message first."""
        return tuple(self.tree.nodes[node] for node in self.tree.path())

    @property
    def images(self) -> tuple[str, ...]:
        """Ids of the pictures of the branch that is shown."""
        return tuple(one for message in self.messages for one in message.images)

    def last_user_index(self) -> int | None:
        """Where the last turn of the shown branch begins; None in an empty chat."""
        messages = self.messages
        return next((i for i in reversed(range(len(messages))) if messages[i].role == "user"), None)


def clean_title(text: str) -> str:
    """One line of at most 80 printable characters; "New chat" if nothing is left."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return (line if len(line) <= MAX_TITLE else line[: MAX_TITLE - 1].rstrip() + "…") or NEW_TITLE


def chat_to_json(chat: Chat) -> dict[str, Any]:
    """What is written to the disk and exported."""
    tree = chat.tree
    messages = [
        {"parent": parent, **_fields(message)}
        for parent, message in zip(tree.parents, tree.nodes, strict=True)
    ]
    schema = SCHEMA if any(tree.images()) else WITHOUT_PICTURES
    return {
        "schema": schema, "id": chat.id, "title": chat.title, "created": chat.created,
        "updated": chat.updated, "shown": tree.leaf, "messages": messages,
    }  # fmt: skip


def _fields(message: ChatMessage) -> dict[str, Any]:
    return {name: getattr(message, name) for name in (_FIELDS if message.images else _FIELDS_OF_TEXT)}


def clean_text(text: str) -> str:
    """A stranger's text without lone surrogates and control characters; line ends are newlines."""
    return _UNWANTED.sub("", _BREAKS.sub("\n", whole_unicode(text)))


def chat_from_json(data: dict[str, Any], chat_id: str, mend: Mend = whole_unicode) -> Chat:
    """The chat of any schema so far, under this id; `mend` is what its texts go through.

    Raises:
        NewerChatError: it is of a later schema.
        ValueError, KeyError, TypeError, AttributeError, OverflowError: it is none.
    """
    schema = data["schema"]
    if isinstance(schema, int) and schema > SCHEMA:
        raise NewerChatError(f"schema {schema}")
    items = data["messages"]
    if schema not in (1, WITHOUT_PICTURES, SCHEMA) or isinstance(schema, bool) or not isinstance(items, list):
        raise ValueError("unknown schema")
    messages = tuple(_message(item, mend) for item in items)
    if schema == 1:
        tree = MessageTree.line(messages)
    else:
        parents = tuple(_whole(item["parent"], ROOT, node - 1) for node, item in enumerate(items))
        tree = MessageTree(messages, parents).showing(_whole(data["shown"], ROOT, len(items) - 1))
    title = clean_title(str(data["title"]))
    return Chat(chat_id, title, _time(data["created"]), _time(data["updated"]), tree)


def _message(data: dict[str, Any], mend: Mend) -> ChatMessage:
    if data["role"] not in _ROLES or not isinstance(data["content"], str):
        raise ValueError("not a message")
    finish, content = data["finish"], mend(data["content"])
    runs = data.get("runs", [])
    if not isinstance(runs, list):
        raise ValueError("not lengths")
    lengths = tuple(_whole(length, 0, _LONGEST) for length in runs)
    return ChatMessage(
        role=data["role"],
        content=content,
        created=_time(data["created"]),
        finish=clean_title(str(finish)) if finish is not None else None,
        error=mend(str(data["error"])),
        stats=_stats(data["stats"]),
        thought_s=_time(data.get("thought_s", 0.0)),
        runs=lengths if sum(lengths) == len(content) else (),  # of another text
        images=_images(data.get("images", [])) if data["role"] == "user" else (),
    )


def _images(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_PICTURES or not all(map(is_picture_id, value)):
        raise ValueError("not pictures")
    return tuple(value)


def _stats(data: dict[str, Any]) -> dict[str, Any]:
    """Finite numbers or missing ones, and the link's name; whatever else is there is left out."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        number = isinstance(value, int | float) and abs(value) < 1e18 and math.isfinite(value)
        if (number or value is None) if name != "link" else isinstance(value, str):
            found[clean_title(name)] = clean_title(value) if isinstance(value, str) else value
    return found


def _whole(value: object, lowest: int, highest: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise ValueError("a number out of range")
    return value


def _time(value: object) -> float:
    seconds = float(value)  # type: ignore[arg-type]
    if not 0.0 <= seconds <= _LATEST:
        raise ValueError("not a time")
    return seconds
