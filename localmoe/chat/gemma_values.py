"""Objects as Gemma 4 writes them: `{name:<|"|>text<|"|>,list:[1,2],more:{deep:true}}`."""

from __future__ import annotations

import json
from typing import Any

from localmoe.chat.json_numbers import finite

QUOTE = '<|"|>'
_ENDS = ",}]"
_DEEPEST = 64
_WORDS = {"None": None, "True": True, "False": False}  # the template writes null in Python's word


def read_gemma_object(text: str) -> dict[str, Any]:
    """The object that a text consists of.

    Raises:
        ValueError: it is none.
    """
    found, end = _value(text, 0, 0)
    if not isinstance(found, dict) or text[end:].strip():
        raise ValueError("no object")
    return found


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value at a place, and where it ends."""
    if depth > _DEEPEST:
        raise ValueError("too deep")
    at = _skip(text, at)
    if text.startswith(QUOTE, at):
        return _quoted(text, at)
    if text.startswith("{", at):
        return _object(text, at + 1, depth)
    if text.startswith("[", at):
        return _list(text, at + 1, depth)
    end = at
    while end < len(text) and text[end] not in _ENDS:
        end += 1
    bare = text[at:end].strip()
    try:
        return json.loads(bare, parse_float=finite, parse_constant=finite), end
    except ValueError:
        return _WORDS.get(bare, bare), end


def _quoted(text: str, at: int) -> tuple[str, int]:
    begin = at + len(QUOTE)
    end = text.find(QUOTE, begin)
    if end < 0:
        raise ValueError("a text does not end")
    return text[begin:end], end + len(QUOTE)


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = _skip(text, at)
    while not text.startswith("}", at):
        if text.startswith(QUOTE, at):
            name, at = _quoted(text, at)
            at = _skip(text, at)
            if not text.startswith(":", at):
                raise ValueError("a name has no value")
        else:
            end = text.find(":", at)
            if end < 0:
                raise ValueError("a name has no value")
            name, at = text[at:end].strip(), end
        found[name], at = _value(text, at + 1, depth + 1)
        at = _after(text, at, "}")
    return found, at + 1


def _list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    at = _skip(text, at)
    while not text.startswith("]", at):
        value, at = _value(text, at, depth + 1)
        found.append(value)
        at = _after(text, at, "]")
    return found, at + 1


def _after(text: str, at: int, end: str) -> int:
    """Where the next value begins, or the end stands."""
    at = _skip(text, at)
    if text.startswith(",", at):
        return _skip(text, at + 1)
    if not text.startswith(end, at):
        raise ValueError("neither another value nor an end")
    return at


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
