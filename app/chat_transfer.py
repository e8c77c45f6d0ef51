"""Chats as files to take away and bring back: JSON with every version, or Markdown of what is shown (see
chat_markdown). Opens no file."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import replace
from typing import Any

from app.chat_file import Chat, NewerChatError, chat_from_json, chat_to_json, clean_text
from app.chat_markdown import read_markdown
from app.chats import ChatError
from localmoe.core.units import format_bytes

MAX_BYTES = 32 << 20
MAX_MESSAGES = 20_000
_REFUSED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class ChatImportError(ChatError):
    """A file holds no chat that can be taken."""


def export_json(chat: Chat) -> str:
    """All of the chat, in the form that a chat's own file has."""
    return json.dumps(chat_to_json(chat), ensure_ascii=False, indent=1) + "\n"


def import_chat(data: bytes) -> Chat:
    """The chat of an exported file, under a new id, as the latest one. Its texts lose control characters.

    Raises:
        ChatImportError: it is too large, or no chat.
    """
    if len(data) > MAX_BYTES:
        raise ChatImportError(
            f"The file has more than {format_bytes(MAX_BYTES)}, and no more than that can be imported."
        )
    try:
        text = data.decode("utf-8-sig")
        found = json.loads(text) if text.lstrip().startswith("{") else read_markdown(text, time.time())
        _check_size(found)
        chat = chat_from_json(found, secrets.token_hex(16), clean_text)
    except NewerChatError as error:
        raise ChatImportError(
            "The file was exported by a newer version of localmoe: update this one to import it."
        ) from error
    except _REFUSED as error:
        raise ChatImportError(
            "The file is no exported chat: choose a JSON or Markdown file that was exported here."
        ) from error
    return replace(chat, updated=time.time())


def _check_size(found: dict[str, Any]) -> None:
    count = len(found["messages"])
    if count > MAX_MESSAGES:
        raise ChatImportError(
            f"The file has {count:,} messages, and no more than {MAX_MESSAGES:,} can be imported."
        )
