"""What is said in a conversation is text: the name of a control token in it, as `<|im_end|>` in a question or
the `<s>` of HTML, ends no turn. Knows no template; tokenises nothing itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from localmoe.chat.image_parts import rewritten
from localmoe.chat.reasoning import CLOSE, OPEN
from localmoe.chat.tool_formats import find_format, format_of
from localmoe.core.tools import Tool, ToolCall
from localmoe.core.types import Message

# Unicode keeps these out of texts, for uses such as this one
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
# how names begin that are for users to type, such as "/nothink"
_TYPED = re.compile(r"[/\w\s]")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)")  # of JSON
_BEFORE = ("\n", "0", "a", "=")
Ids = Callable[[str], list[int]]
Write = Callable[[str, frozenset[str]], str]


@dataclass(frozen=True, slots=True)
class Said:
    """All that a template gets. begun: an answer that is continued, which comes behind what it makes."""

    messages: tuple[Message, ...]
    begun: Message | None
    tools: tuple[Tool, ...]


class SaidText:
    """Of a tokenizer. Tokenizers find their control tokens in whole texts alone: each name in a message gets
    a mark behind its first character, and the template's text is cut there (piece_ids)."""

    def __init__(self, tokenizer: Any, more: Iterable[str] = ()) -> None:
        """more: tokens that mean something, whatever the tokenizer has them for, as a picture's place."""
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        names = {str(one.content) for one in added if getattr(one, "special", False)}
        names |= {*map(str, getattr(tokenizer, "all_special_tokens", ())), *more}
        kept = {OPEN, CLOSE}  # in what the model wrote: its template may look for them
        if notation := find_format(tokenizer):
            kept |= format_of(notation).special()
        self._names = frozenset(name for name in names if len(name) > 1 and not _TYPED.match(name))
        pairs = sorted({name[:2] for name in self._names})  # of thousands of names, a few
        begins = [rf"{re.escape(pair[0])}(?={re.escape(pair[1])})" for pair in pairs]
        self._begins = re.compile("|".join(begins) or "(?!)")
        self._lengths = {len(name) for name in self._names}
        self._names_in_answers = self._names - kept

    def marked(
        self, messages: Sequence[Message], begun: Message | None, tools: Sequence[Tool] = ()
    ) -> tuple[Said, str]:
        """What is said, with the mark; and the mark, "" where nothing needs one."""
        said = Said(tuple(messages), begun, tuple(tools))
        texts: list[str] = []
        named: list[int] = []

        def look(text: str, names: frozenset[str]) -> str:
            texts.append(text)
            named.extend(self._found(text, names))
            return text

        self._written(said, look)
        if not named:
            return said, ""
        mark = next((one for one in _MARKS if not any(one in text for text in texts)), _MARKS[0])

        def marked(text: str, names: frozenset[str]) -> str:
            text = text.replace(mark, "")  # in a conversation that has every one of them
            return _with(mark, text, self._found(text, names))

        return self._written(said, marked), mark

    def _written(self, said: Said, write: Write) -> Said:
        """With what `write` makes of each text, by the names that are broken in it."""

        def plain(text: str) -> str:
            return write(text, self._names)

        def json(text: str) -> str:
            spelt = _unescaped(text)
            return plain(spelt if self._found(spelt, self._names) else text)

        def turn(message: Message) -> Message:
            names = self._names_in_answers if message.role == "assistant" else self._names
            calls = tuple(
                ToolCall(plain(call.name), json(call.arguments), plain(call.id))
                for call in message.tool_calls
            )
            return replace(
                rewritten(message, lambda text: write(text, names)), tool_calls=calls,
                tool_name=plain(message.tool_name), tool_call_id=plain(message.tool_call_id),
                thoughts=plain(message.thoughts),
            )  # fmt: skip

        begun = said.begun and turn(said.begun)
        tools = tuple(Tool(tool.name, json(tool.definition)) for tool in said.tools)
        return Said(tuple(map(turn, said.messages)), begun, tools)

    def _found(self, text: str, names: frozenset[str]) -> list[int]:
        """Where names begin, also of those that overlap."""
        begins = (one.start() for one in self._begins.finditer(text))
        return [at for at in begins if any(text[at : at + length] in names for length in self._lengths)]


def _unescaped(json: str) -> str:
    """JSON without the escapes that it needs not: templates read it, and write what these stand for. Go's
    encoder has `<` as one, PHP's `/`, Python's what is not ASCII."""
    return _ESCAPE.sub(_character, json) if "\\" in json else json


def _character(escape: re.Match[str]) -> str:
    character = chr(int(escape[1], 16)) if escape[1] else escape[0][1:]
    needless = character == "/" or (escape[1] and character.isprintable() and character not in '"\\')
    return character if needless else escape[0]


def _with(mark: str, text: str, places: Sequence[int]) -> str:
    cuts = [0, *(at + 1 for at in places), len(text)]
    return mark.join(text[begin:end] for begin, end in pairwise(cuts))


def piece_ids(text: str, mark: str, ids: Ids) -> list[int]:
    """Token ids of a text that is cut at each mark, by what tokenises one piece."""
    first, *others = text.split(mark) if mark else [text]
    found = ids(first)
    if others:
        befores = [(before, ids(before)) for before in _BEFORE]
        for piece in others:
            found += _ids_behind(piece, befores, ids)
    return found


def _ids_behind(piece: str, befores: Sequence[tuple[str, list[int]]], ids: Ids) -> list[int]:
    """Of a text that goes on: some tokenizers write a space before what begins one. befores: texts that it
    may go on from, with theirs; in some tokens both run together."""
    for before, known in befores:
        whole = ids(before + piece)
        if known and whole[: len(known)] == known:  # none of a line break that is stripped
            return whole[len(known) :]
    return ids(piece)
