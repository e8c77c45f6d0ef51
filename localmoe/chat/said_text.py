"""What is said in a conversation is text: the name of a control token in it, as `<|im_end|>` in a question or
the `<s>` of HTML, ends no turn. Knows no template; tokenises nothing itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from localmoe.chat.reasoning import CLOSE, OPEN
from localmoe.chat.tool_formats import find_format, format_of
from localmoe.core.types import Message

# Unicode keeps these out of texts, for uses such as this one
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
# how names begin that are for users to type, such as "/nothink"
_TYPED = re.compile(r"[/\w\s]")
Ids = Callable[[str], list[int]]


class SaidText:
    """Of a tokenizer. Tokenizers find their control tokens in whole texts alone: each name in a message gets
    a mark behind its first character, and the template's text is cut there (piece_ids)."""

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        names = {str(one.content) for one in added if getattr(one, "special", False)}
        names |= set(map(str, getattr(tokenizer, "all_special_tokens", ())))
        kept = {OPEN, CLOSE}  # in what the model wrote: its template may look for them
        if notation := find_format(tokenizer):
            kept |= format_of(notation).special()
        self._names = frozenset(name for name in names if len(name) > 1 and not _TYPED.match(name))
        first = re.escape("".join(sorted({name[0] for name in self._names})))
        self._begins = re.compile(f"[{first}]" if first else "(?!)")
        self._names_in_answers = self._names - kept

    def marked(self, messages: Sequence[Message], answer: str) -> tuple[list[Message], str, str]:
        """Messages, and the beginning of an answer, with the mark; and the mark, "" where nothing needs
        one."""
        said = [(answer, "assistant")]
        for message in messages:
            said.append((message.content, message.role))
            said += [(call.arguments, "assistant") for call in message.tool_calls]
        if not any(self._found(text, role) for text, role in said):
            return list(messages), answer, ""
        mark = next((one for one in _MARKS if not any(one in text for text, _ in said)), _MARKS[0])

        def marked(text: str, role: str = "assistant") -> str:
            text = text.replace(mark, "")  # in a conversation that has every one of them
            return _with(mark, text, self._found(text, role))

        turns = []
        for message in messages:
            calls = tuple(replace(call, arguments=marked(call.arguments)) for call in message.tool_calls)
            turns.append(replace(message, content=marked(message.content, message.role), tool_calls=calls))
        return turns, marked(answer), mark

    def _found(self, text: str, role: str) -> list[int]:
        """Where names begin, also of those that overlap."""
        names = self._names_in_answers if role == "assistant" else self._names
        lengths = {len(name) for name in names}
        begins = (one.start() for one in self._begins.finditer(text))
        return [at for at in begins if any(text[at : at + length] in names for length in lengths)]


def _with(mark: str, text: str, places: Sequence[int]) -> str:
    cuts = [0, *(at + 1 for at in places), len(text)]
    return mark.join(text[begin:end] for begin, end in pairwise(cuts))


def piece_ids(text: str, mark: str, ids: Ids) -> list[int]:
    """Token ids of a text that is cut at each mark, by what tokenises one piece."""
    first, *others = text.split(mark) if mark else [text]
    return ids(first) + [token for piece in others for token in _ids_behind(piece, ids)]


def _ids_behind(piece: str, ids: Ids) -> list[int]:
    """Of a text that goes on: some tokenizers write a space before what begins one."""
    before, whole = ids("\n"), ids("\n" + piece)
    return whole[len(before) :] if whole[: len(before)] == before else ids(piece)
