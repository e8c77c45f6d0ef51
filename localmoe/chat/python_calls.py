"""Calls in Python, as LFM2 writes them: `[weather(city="Oslo", days=2), now()]`. They are read as Python
where they are that; LFM2.5's template writes texts without escapes between quotes, and any name.

Sources: the models' chat templates.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from localmoe.chat.call_values import JSON, call_of, some
from localmoe.core.tools import ToolCall

_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_DEEPEST = 64
_NAME = re.compile(r"\s*([^\s=,:()\[\]{}'\"]+)\s*")
_WORD = re.compile(r"[^\s,)\]}:]+")
_SPACE = re.compile(r"\s*")
# what stands behind the quote that ends a text, which may hold quotes: the end of a call, or another value
_BEHIND = r"(?=\s*(?:\)\s*(?:,|\]?\s*\Z)|[\]}:]|,\s*(?:[\w.-]+\s*=|[\w.-]+\s*\(|['\"\[{\d-]|\Z)))"
_TEXTS = {
    quote: re.compile(rf"{quote}((?:[^\\]|\\.)*?){quote}{_BEHIND}", re.DOTALL)
    for quote in ("'''", '"""', "'", '"')
}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""} | {c: c for c in "\\'\"/"}


def read_python(text: str) -> list[ToolCall]:
    """
    Raises:
        ValueError: it is no list of calls.
    """
    try:
        return _as_python(text)
    except ValueError:
        return _as_written(text)


def write_python(calls: Sequence[ToolCall]) -> str:
    """As LFM2's documentation has them."""
    return f"[{', '.join(f'{call.name}({_pairs(call.arguments)})' for call in calls)}]"


def _pairs(arguments: str) -> str:
    values = json.loads(arguments)
    return ", ".join(f"{name}={_literal(value)}" for name, value in values.items())


def _literal(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


class _AsPython(ast.NodeTransformer):
    """JSON's words as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def _as_python(text: str) -> list[ToolCall]:
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("no calls in Python") from error
    nodes = tree.elts if isinstance(tree, ast.List) else [tree]
    calls = []
    for node in nodes:
        if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
            raise ValueError("no call with named arguments")
        try:
            values = {
                str(word.arg): ast.literal_eval(_AsPython().visit(word.value)) for word in node.keywords
            }
        except (TypeError, SyntaxError, MemoryError) as error:  # keys that cannot be any
            raise ValueError("no values") from error
        calls.append(call_of(ast.unparse(node.func), values))
    return some(calls)


def _as_written(text: str) -> list[ToolCall]:
    text = text.strip()
    whole = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    calls, at = [], 0
    while at < len(whole):
        name, at = _name(whole, at, "(")
        values, at = _arguments(whole, at)
        calls.append(call_of(name, values))
        at = _skip(whole, at)
        if at < len(whole):
            at = _skip(whole, _past(whole, at, ","))
    return some(calls)


def _arguments(text: str, at: int) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    at = _skip(text, at)
    while not text.startswith(")", at):
        name, at = _name(text, at, "=")
        values[name], at = _value(text, at, 0)
        at = _after(text, at, ")")
    return values, at + 1


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    at = _skip(text, at)
    if depth > _DEEPEST:
        raise ValueError("too deep")
    for quote, pattern in _TEXTS.items():
        if text.startswith(quote, at) and (found := pattern.match(text, at)):
            return _ESCAPE.sub(_character, found[1]), found.end()
    if text.startswith("{", at):
        return _object(text, at + 1, depth + 1)
    if text.startswith("[", at):
        return _list(text, at + 1, depth + 1)
    word = _WORD.match(text, at)
    if word is None:
        raise ValueError("no value")
    return (_WORDS[word[0]] if word[0] in _WORDS else JSON.decode(word[0])), word.end()


def _list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    at = _skip(text, at)
    while not text.startswith("]", at):
        value, at = _value(text, at, depth)
        found.append(value)
        at = _after(text, at, "]")
    return found, at + 1


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = _skip(text, at)
    while not text.startswith("}", at):
        name, at = _value(text, at, depth)
        if not isinstance(name, str):
            raise ValueError("no name of a value")
        found[name], at = _value(text, _past(text, _skip(text, at), ":"), depth)
        at = _after(text, at, "}")
    return found, at + 1


def _name(text: str, at: int, behind: str) -> tuple[str, int]:
    found = _NAME.match(text, at)
    if found is None:
        raise ValueError("no name")
    return found[1], _past(text, found.end(), behind)


def _after(text: str, at: int, end: str) -> int:
    """Where the next value begins, or the end stands."""
    at = _skip(text, at)
    return at if text.startswith(end, at) else _skip(text, _past(text, at, ","))


def _past(text: str, at: int, sign: str) -> int:
    if not text.startswith(sign, at):
        raise ValueError(f"no {sign}")
    return at + 1


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _character(escape: re.Match[str]) -> str:
    if code := escape[1] or escape[2]:
        return chr(int(code, 16))
    return _ESCAPED.get(escape[3], escape[0])
