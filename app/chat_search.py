"""Which chats have the words that a user looks for, in their titles or texts of any version. Draws
nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from app.chats import Chat

MAX_QUERY = 200  # characters
_BEFORE, _AFTER = 10, 64  # characters of a text that are shown around what was found


@dataclass(frozen=True, slots=True)
class Found:
    """A chat, and the text around the first word where a message has it; "" where only the title does."""

    chat: Chat
    snippet: str = ""


@dataclass(slots=True)
class ChatSearch:
    """Looks through chats; keeps their texts folded for as long as they do not change."""

    _folded: dict[str, tuple[Chat, str]] = field(default_factory=dict)

    def find(self, chats: Iterable[Chat], query: str) -> list[Found]:
        """The chats that have every word of the query, in their order; all of them for an empty query."""
        words = query[:MAX_QUERY].casefold().split()
        if not words:
            return [Found(chat) for chat in chats]
        listed = {chat.id: chat for chat in chats}
        self._folded = {key: kept for key, kept in self._folded.items() if key in listed}
        return [
            Found(chat, _snippet(chat, words))
            for chat in listed.values()
            if all(word in self._text(chat) for word in words)
        ]

    def _text(self, chat: Chat) -> str:
        kept = self._folded.get(chat.id)
        if kept is None or kept[0] is not chat:  # chats are never changed, only replaced
            texts = [chat.title, *(message.content for message in chat.tree.nodes)]
            kept = self._folded[chat.id] = (chat, "\n".join(texts).casefold())
        return kept[1]


def _snippet(chat: Chat, words: list[str]) -> str:
    for word in words:
        pattern = re.compile(re.escape(word), re.IGNORECASE)
        for message in chat.tree.nodes:
            if match := pattern.search(message.content):
                start, end = max(0, match.start() - _BEFORE), match.end() + _AFTER
                text = " ".join(message.content[start:end].split())
                after = "…" if end < len(message.content) else ""
                return f"{'…' if start else ''}{text}{after}"
    return ""
