"""Chats on disk: one JSON file each, replaced atomically. Knows no engine, no page and no JSON of a chat."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from app.chat_file import NEW_TITLE, Chat, NewerChatError, chat_from_json, chat_to_json, clean_title
from app.chat_tree import ChatMessage, MessageTree
from app.files import refused, set_aside, write_json
from localmoe.core.errors import LocalMoeError

__all__ = [
    "AnswerUnsavedError", "Chat", "ChatError", "ChatMessage", "ChatSaveError", "ChatStore", "check_id",
    "clean_title",
]  # fmt: skip
_ID = re.compile(r"[0-9a-f]{32}")
_PICTURE = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class ChatError(LocalMoeError):
    """A chat does not exist, or what was asked of it makes no sense."""


class ChatSaveError(ChatError):
    """The chat is there, but the disk did not take it."""


class AnswerUnsavedError(ChatSaveError):
    """The answer is in the chat, as `node`, and reaches the disk when the chat is saved the next time."""

    def __init__(self, sentence: str, node: int) -> None:
        super().__init__(sentence)
        self.node = node


def check_id(chat_id: object) -> str:
    """The id itself, if it is 32 hex digits; nothing else ever becomes a file name.

    Raises:
        ChatError: otherwise.
    """
    if not isinstance(chat_id, str) or not _ID.fullmatch(chat_id):
        raise ChatError("That is not the id of a chat.")
    return chat_id


class ChatStore:
    """The folder of chats. Safe for several threads of one process; `revision` grows with every change that
    a list of chats or a finished turn would show."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._chats: dict[str, Chat] = {}
        self._unsaved: set[str] = set()  # chats with an answer that the disk refused
        self.revision = 0
        self.reports: list[str] = []  # one sentence for each file that could not be read
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.json")):
            if _ID.fullmatch(path.stem):
                self._read(path)

    def _read(self, path: Path) -> None:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            chat = chat_from_json(data, path.stem)
            if data["id"] != path.stem:
                raise ValueError("a file of another chat")
        except NewerChatError:
            self.reports.append(f"{path.name} was written by a newer version and is not shown.")
        except _DAMAGED:
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
        chats = list(self._chats.values())  # one step for Python: waits for no chat that is being written
        return sorted(chats, key=lambda chat: chat.updated, reverse=True)

    def get(self, chat_id: str) -> Chat:
        """The chat.

        Raises:
            ChatError: there is none of that id.
        """
        chat = self._chats.get(check_id(chat_id))  # likewise
        if chat is None:
            raise ChatError("This chat is no longer there: it was deleted.")
        return chat

    def pictures(self) -> set[str] | None:
        """Ids of the pictures of all chats, also of files that were not read as chats: damaged ones, and a
        newer version's. None: such a file cannot be opened, so nobody knows.
        """
        with self._lock:
            found = {one for chat in self._chats.values() for one in chat.tree.images()}
            try:
                for path in self._folder.iterdir():
                    if path.stem not in self._chats and path.is_file():
                        found.update(one.decode() for one in _PICTURE.findall(path.read_bytes()))
            except OSError:
                return None
        return found

    def create(self, messages: Sequence[ChatMessage] = (), title: str = "") -> Chat:
        """A new chat on disk. Without a title the first message gives it."""
        now = time.time()
        first = next((m.content for m in messages if m.role == "user"), "")
        title = clean_title(title or first)
        return self.keep(Chat(secrets.token_hex(16), title, now, now, MessageTree.line(messages)))

    def keep(self, chat: Chat) -> Chat:
        """Put a chat, as it is, on disk and into the list."""
        with self._lock:
            self._save(chat, revise=True)
        return chat

    def rename(self, chat_id: str, title: str) -> Chat:
        """Give the chat another title."""
        with self._lock:
            return self.keep(replace(self.get(chat_id), title=clean_title(title)))

    def delete(self, chat_id: str) -> None:
        """Remove the chat with all its branches, and its file.

        Raises:
            ChatError: there is none of that id, or the disk refuses.
        """
        with self._lock:
            chat = self.get(chat_id)
            try:
                (self._folder / f"{chat.id}.json").unlink(missing_ok=True)
            except OSError as error:
                raise ChatSaveError(refused("The chat could not be deleted", self._folder, error)) from error
            del self._chats[chat.id]
            self.revision += 1

    def add(self, chat_id: str, message: ChatMessage, parent: int) -> Chat:
        """Another message after `parent` (a node, or ROOT), which is shown."""
        with self._lock:
            chat = self.get(chat_id)
            named = any(m.content for m in chat.tree.nodes if m.role == "user") or chat.title != NEW_TITLE
            title = chat.title if named else clean_title(message.content)
            tree = chat.tree.add(message, parent)
            return self.keep(replace(chat, title=title, tree=tree, updated=time.time()))

    def end_at(self, chat_id: str, node: int) -> Chat:
        """Show the branch up to this node, because an answer is written after it."""
        with self._lock:
            chat = self.get(chat_id)
            return self.keep(replace(chat, tree=chat.tree.ending_at(node), updated=time.time()))

    def show(self, chat_id: str, node: int) -> Chat:
        """Show the newest branch through this node.

        Raises:
            ChatError: the chat has no such message.
        """
        with self._lock:
            chat = self.get(chat_id)
            if not 0 <= node < len(chat.tree.nodes):
                raise ChatError("This version of the message is not there.")
            return self.keep(replace(chat, tree=chat.tree.showing(node)))

    def save_answer(self, chat_id: str, answer: ChatMessage, question: int, node: int | None = None) -> int:
        """Put the answer after its question, or in the place of `node`; its node. While it is unfinished
        (`finish` None) this is a safety copy that no list shows.

        Raises:
            AnswerUnsavedError: the disk refuses; memory keeps the answer, as nobody can ask for it again.
            ChatError: the chat was deleted.
        """
        with self._lock:
            chat = self.get(chat_id)
            if node is None:
                node, tree = len(chat.tree.nodes), chat.tree.add(answer, question)
            else:
                tree = chat.tree.replaced(node, answer).ending_at(node)
            chat = replace(chat, tree=tree, updated=time.time())
            revise = answer.finish is not None
            try:
                self._save(chat, revise=revise)
            except ChatSaveError as error:
                self._take(chat, revise=revise)
                self._unsaved.add(chat_id)
                raise AnswerUnsavedError(str(error), node) from error
            return node

    def save_unsaved(self) -> None:
        """Try once more what the disk refused."""
        with self._lock:
            for chat_id in self._unsaved & self._chats.keys():
                with contextlib.suppress(ChatSaveError):  # it was said when it was refused
                    self._save(self._chats[chat_id], revise=False)

    def _save(self, chat: Chat, *, revise: bool) -> None:
        try:
            write_json(self._folder / f"{chat.id}.json", chat_to_json(chat), compact=True)
        except OSError as error:
            raise ChatSaveError(refused("The chat could not be saved", self._folder, error)) from error
        self._unsaved.discard(chat.id)
        self._take(chat, revise=revise)

    def _take(self, chat: Chat, *, revise: bool) -> None:
        self._chats[chat.id] = chat
        if revise:
            self.revision += 1
