"""Chats as files to take away and bring back: JSON with every version and all pictures, or Markdown of what
is shown (see chat_markdown). Opens no file."""

from __future__ import annotations

import base64
import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from app.chat_file import Chat, NewerChatError, chat_from_json, chat_to_json, clean_text
from app.chat_markdown import read_markdown
from app.chats import ChatError
from app.pictures import picture_id
from localmoe.core.errors import ConfigError
from localmoe.core.units import format_bytes
from localmoe.vision.image_file import check_image

MAX_BYTES = 32 << 20  # without pictures
MAX_WITH_PICTURES = 160 << 20
PICTURES = "pictures"  # beside what a chat's own file has: id -> bytes in Base64
MAX_MESSAGES = 20_000
_BASE64 = re.compile(rb'"[A-Za-z0-9+/]{64,}={0,2}"')
_REFUSED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class ChatImportError(ChatError):
    """A file holds no chat that can be taken."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A chat, and those of its pictures that came with it, by id."""

    chat: Chat
    pictures: dict[str, bytes]


def export_json(chat: Chat, pictures: Mapping[str, bytes] = MappingProxyType({})) -> str:
    """All of the chat, in the form that a chat's own file has, with its pictures, by id.

    Raises:
        ChatError: the file would be too large to be imported.
    """
    found, size = chat_to_json(chat), sum(len(data) * 4 // 3 for data in pictures.values())
    if size > MAX_WITH_PICTURES - MAX_BYTES:
        raise ChatError(
            f"The pictures of this chat would take {format_bytes(size)} in its file, and no more than "
            f"{format_bytes(MAX_WITH_PICTURES - MAX_BYTES)} can be imported again: export it as Markdown."
        )
    if pictures:
        found[PICTURES] = {one: base64.b64encode(data).decode() for one, data in pictures.items()}
    return json.dumps(found, ensure_ascii=False, indent=1) + "\n"


def import_chat(data: bytes) -> Imported:
    """The chat of an exported file, under a new id, as the latest one. Its texts lose control characters.

    Raises:
        ChatImportError: it is too large, or no chat, or a picture of it is none.
    """
    _check_bytes(len(data), MAX_WITH_PICTURES)
    if len(data) > MAX_BYTES:
        # before it is read, as what is no picture then takes up to thirty times its size in memory
        encoded = sum(found.end() - found.start() for found in _BASE64.finditer(data))
        _check_bytes(len(data) - encoded, MAX_BYTES)
    try:
        text = data.decode("utf-8-sig")
        is_json = text.lstrip().startswith("{")
        _check_bytes(len(data), MAX_WITH_PICTURES if is_json else MAX_BYTES)
        found = json.loads(text) if is_json else read_markdown(text, time.time())
        given = found.pop(PICTURES, {})
        _check_bytes(len(data) - sum(map(len, given.values())), MAX_BYTES)
        _check_size(found)
        chat = chat_from_json(found, secrets.token_hex(16), clean_text)
        pictures = {
            one: _picture(one, given[one]) for one in dict.fromkeys(chat.tree.images()) if one in given
        }
    except NewerChatError as error:
        raise ChatImportError(
            "The file was exported by a newer version of localmoe: update this one to import it."
        ) from error
    except _REFUSED as error:
        raise ChatImportError(
            "The file is no exported chat: choose a JSON or Markdown file that was exported here."
        ) from error
    return Imported(replace(chat, updated=time.time()), pictures)


def _picture(name: str, text: str) -> bytes:
    data = base64.b64decode(text, validate=True)
    if picture_id(data) != name:
        raise ValueError("another picture")
    try:
        check_image(data)
    except ConfigError as error:
        raise ChatImportError(f"A picture of the file cannot be imported. {error}") from error
    return data


def _check_bytes(count: int, limit: int) -> None:
    if count > limit:
        raise ChatImportError(
            f"The file has more than {format_bytes(limit)}, and no more than that can be imported."
        )


def _check_size(found: dict[str, Any]) -> None:
    count = len(found["messages"])
    if count > MAX_MESSAGES:
        raise ChatImportError(
            f"The file has {count:,} messages, and no more than {MAX_MESSAGES:,} can be imported."
        )
