"""A chat as Markdown to read, from which it can be brought back: the branch that is shown. Opens no file.

Comments that no reader of Markdown shows say where a message begins and what its parts are; a line of a
message that looks like one is written with a backslash, which shows the line as it is. Pictures are named,
not held: brought back where they are on the disk, they are there again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from app.chat_file import Chat
from app.chat_tree import ChatMessage
from app.texts import ENGLISH, Texts
from localmoe.chat.reasoning import CLOSE, OPEN, split_reasoning

_MARK = re.compile(r"<!-- localmoe:(user|assistant|thoughts|answer|error|pictures((?: [0-9a-f]{64})+)) -->")
_LIKE_MARK = re.compile(r"^(\\*)(?=<!-- localmoe:)", re.MULTILINE)
_ESCAPED = re.compile(r"^\\(?=\\*<!-- localmoe:)", re.MULTILINE)


def export_markdown(chat: Chat, t: Texts = ENGLISH) -> str:
    """The branch that is shown, with thoughts as quotations."""
    parts = [f"# {chat.title}", *(part for message in chat.messages for part in _parts(message, t))]
    return "\n\n".join(parts) + "\n"


def _parts(message: ChatMessage, t: Texts) -> Iterator[str]:
    name = t("You") if message.role == "user" else t("Answer")
    yield f"{_mark(message.role)}\n## {name}"
    if message.role == "user":
        yield _escaped(message.content)
        if message.images:
            note = t("Pictures, which only an export as JSON holds: {count}", count=len(message.images))
            yield f"{_mark(' '.join(('pictures', *message.images)))}\n*{note}*"
        return
    split = split_reasoning(message.content)
    if split.thoughts:
        yield _mark("thoughts") + "".join(f"\n> {line}".rstrip() for line in split.thoughts.split("\n"))
    if split.answer:
        yield (_mark("answer") + "\n" if split.thoughts else "") + _escaped(split.answer)
    if message.error:
        yield f"{_mark('error')}\n{_escaped(f'*{message.error}*')}"


def _mark(name: str) -> str:
    return f"<!-- localmoe:{name} -->"


def _escaped(text: str) -> str:
    return _LIKE_MARK.sub(r"\1\\", text).strip("\n")


def read_markdown(text: str, now: float) -> dict[str, Any]:
    """What `chat_from_json` takes, of an exported text. now: seconds since 1970.

    Raises:
        ValueError: it was not exported here.
    """
    begin, *marked = re.split(r"^(?=<!-- localmoe:)", text.replace("\r\n", "\n"), flags=re.MULTILINE)
    messages: list[dict[str, Any]] = []
    texts: list[list[str]] = []  # of each message, joined at the end: a file may have many parts of one
    for part in marked:
        found = _MARK.match(part)
        if found is None:
            raise ValueError("an unknown mark")
        name, rest = found[1], part[found.end() :].strip("\n")
        if name in ("user", "assistant"):
            _, _, content = rest.partition("\n")  # its heading
            finish = None if name == "user" else "stop"
            messages.append({"role": name, "created": now, "finish": finish, "error": "", "stats": {}})
            texts.append([_plain(content)])
        elif found[2] and messages and messages[-1]["role"] == "user":
            messages[-1]["images"] = found[2].split()
        elif not messages or messages[-1]["role"] == "user" or found[2]:
            raise ValueError("a part of another message")
        elif name == "thoughts":
            thoughts = "\n".join(line.removeprefix(">").removeprefix(" ") for line in rest.split("\n"))
            texts[-1] = [f"{OPEN}{thoughts}{CLOSE}\n\n"]
        elif name == "answer":
            texts[-1].append(_plain(rest))
        else:
            messages[-1] |= {"error": _plain(rest)[1:-1], "finish": "error"}  # between asterisks
    if not messages:
        raise ValueError("no messages")
    for message, parts in zip(messages, texts, strict=True):
        message["content"] = "".join(parts)
    return {
        "schema": 1, "title": begin.strip().removeprefix("#"), "created": now, "updated": now,
        "messages": messages,
    }  # fmt: skip


def _plain(text: str) -> str:
    return _ESCAPED.sub("", text.strip("\n"))
