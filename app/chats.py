"""Chats on disk: one JSON file each, versioned, replaced atomically. Knows no engine and no page."""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from app.files import set_aside, write_json
from localmoe.core.errors import LocalMoeError

SCHEMA = 1
MAX_TITLE = 80
NEW_TITLE = "New chat"
_ID = re.compile(r"[0-9a-f]{32}")
_ROLES = ("user", "assistant")


class ChatError(LocalMoeError):
    """A chat does not exist, or what was asked of it makes no sense."""


class ChatSaveError(ChatError):
    """The chat is there, but the disk did not take it."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. `finish` is None on an answer that was being written when the file was saved.

    Attributes:
        finish: "stop", "length", "cancelled" or "error"; answers only.
        error: the sentence shown under an answer that failed.
        stats: `GenerationStats.as_dict()` of an answer, plus "link" (how experts were copied).
    """

    role: Literal["user", "assistant"]
    content: str
    created: float = 0.0
    finish: str | None = None
    error: str = ""
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, oldest message first. Times are seconds since 1970."""

    id: str
    title: str
    created: float
    updated: float
    messages: tuple[ChatMessage, ...] = ()

    def last_user_index(self) -> int | None:
        """Where the last turn begins; None in an empty chat."""
        return next((i for i in reversed(range(len(self.messages))) if self.messages[i].role == "user"), None)


def check_id(chat_id: object) -> str:
    """The id itself, if it is 32 hex digits; nothing else ever becomes a file name.

    Raises:
        ChatError: otherwise.
    """
    if not isinstance(chat_id, str) or not _ID.fullmatch(chat_id):
        raise ChatError("That is not the id of a chat.")
    return chat_id


def clean_title(text: str) -> str:
    """One line of at most 80 printable characters; "New chat" if nothing is left."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return (line if len(line) <= MAX_TITLE else line[: MAX_TITLE - 1].rstrip() + "…") or NEW_TITLE


class ChatStore:
    """The folder of chats. Safe for several threads of one process; `revision` grows with every change that
    a list of chats or a finished turn would show."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._chats: dict[str, Chat] = {}
        self.revision = 0
        self.reports: list[str] = []  # one sentence for each file that could not be read
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.json")):
            if _ID.fullmatch(path.stem):
                self._read(path)

    def _read(self, path: Path) -> None:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(data, dict) and isinstance(data.get("schema"), int) and data["schema"] > SCHEMA:
                self.reports.append(f"{path.name} was written by a newer version and is not shown.")
                return
            chat = _from_json(data, path.stem)
        except (ValueError, KeyError, TypeError, RecursionError):
            kept = set_aside(path)
            self.reports.append(
                f"A chat file could not be read and was kept as {kept.name} in {kept.parent}."
            )
        except OSError as error:
            self.reports.append(f"{path.name} could not be opened: {error.strerror}.")
        else:
            self._chats[chat.id] = chat

    def list(self) -> list[Chat]:
        """All chats, the last changed first."""
        with self._lock:
            return sorted(self._chats.values(), key=lambda chat: chat.updated, reverse=True)

    def get(self, chat_id: str) -> Chat:
        """The chat.

        Raises:
            ChatError: there is none of that id.
        """
        with self._lock:
            chat = self._chats.get(check_id(chat_id))
        if chat is None:
            raise ChatError("This chat is no longer there: it was deleted.")
        return chat

    def create(self, messages: tuple[ChatMessage, ...] = (), title: str = "") -> Chat:
        """A new chat on disk. Without a title the first message gives it."""
        now = time.time()
        first = next((m.content for m in messages if m.role == "user"), "")
        chat = Chat(secrets.token_hex(16), clean_title(title or first), now, now, messages)
        with self._lock:
            self._save(chat, revise=True)
        return chat

    def rename(self, chat_id: str, title: str) -> Chat:
        """Give the chat another title."""
        with self._lock:
            chat = replace(self.get(chat_id), title=clean_title(title))
            self._save(chat, revise=True)
        return chat

    def delete(self, chat_id: str) -> None:
        """Remove the chat and its file."""
        with self._lock:
            chat = self.get(chat_id)
            (self._folder / f"{chat.id}.json").unlink(missing_ok=True)
            del self._chats[chat.id]
            self.revision += 1

    def set_messages(self, chat_id: str, messages: tuple[ChatMessage, ...]) -> Chat:
        """Replace the messages: a turn was added, retried or edited."""
        with self._lock:
            chat = self.get(chat_id)
            title = chat.title
            if not chat.messages and title == NEW_TITLE and messages:
                title = clean_title(messages[0].content)
            chat = replace(chat, title=title, messages=messages, updated=time.time())
            self._save(chat, revise=True)
        return chat

    def save_answer(self, chat_id: str, answer: ChatMessage) -> None:
        """Put the answer after the last user message. While it is unfinished (`finish` None) this is a
        safety copy that no list shows.

        Raises:
            ChatError: the chat was deleted.
        """
        with self._lock:
            chat = self.get(chat_id)
            last = chat.last_user_index()
            assert last is not None, "an answer needs a question"
            messages = (*chat.messages[: last + 1], answer)
            chat = replace(chat, messages=messages, updated=time.time())
            self._save(chat, revise=answer.finish is not None)

    def _save(self, chat: Chat, *, revise: bool) -> None:
        try:
            write_json(self._folder / f"{chat.id}.json", {"schema": SCHEMA, **asdict(chat)})
        except OSError as error:
            raise ChatSaveError(
                f"The chat could not be saved in {self._folder}: {error.strerror}. "
                "Make room there and try again."
            ) from error
        self._chats[chat.id] = chat
        if revise:
            self.revision += 1


def _from_json(data: dict[str, Any], chat_id: str) -> Chat:
    if data["schema"] != SCHEMA or data["id"] != chat_id:
        raise ValueError("unknown schema or wrong id")
    return Chat(
        id=chat_id,
        title=clean_title(str(data["title"])),
        created=float(data["created"]),
        updated=float(data["updated"]),
        messages=tuple(_message(item) for item in data["messages"]),
    )


def _message(data: dict[str, Any]) -> ChatMessage:
    if data["role"] not in _ROLES or not isinstance(data["content"], str):
        raise ValueError("not a message")
    if not isinstance(data["stats"], dict):
        raise ValueError("not statistics")
    finish = data["finish"]
    return ChatMessage(
        role=data["role"],
        content=data["content"].encode("utf-8", "replace").decode("utf-8"),  # no lone surrogates
        created=float(data["created"]),
        finish=str(finish) if finish is not None else None,
        error=str(data["error"]),
        stats=data["stats"],
    )
