"""Names and values that models write in calls of tools, as calls. Knows no notation."""

from __future__ import annotations

import json
import re
from typing import Any

from localmoe.chat.json_numbers import finite
from localmoe.core.tools import ToolCall

_NAME = re.compile("[^\\s<>{}\ud800-\udfff]+")
_HALVES = re.compile("[\ud800-\udfff]")
# models write line breaks into strings as they are
JSON = json.JSONDecoder(strict=False, parse_float=finite, parse_constant=finite)


def is_tool_name(name: str) -> bool:
    """Whether a call of such a name can be read."""
    return _NAME.fullmatch(name) is not None


def call_of(name: Any, arguments: Any) -> ToolCall:
    """Raises ValueError: it is none."""
    if isinstance(arguments, str):
        arguments = JSON.decode(arguments or "{}")
    if not isinstance(name, str) or not _NAME.fullmatch(name.strip()) or not isinstance(arguments, dict):
        raise ValueError("no call of a tool")
    return ToolCall(name.strip(), _as_json(arguments))


def _as_json(arguments: dict[str, Any]) -> str:
    """Raises ValueError: JSON has no such value, as Python's sets and what is not finite."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError("no arguments") from error
    # half of a pair, which a model wrote as an escape: many readers of JSON refuse it, and so does the prompt
    # that the call goes back in
    return _HALVES.sub("\ufffd", text)


def _object(found: Any) -> ToolCall:
    if not isinstance(found, dict):
        raise ValueError("no call of a tool")
    found = found.get("function", found) if isinstance(found.get("function"), dict) else found
    name = found.get("name", found.get("tool_name"))
    return call_of(name, found.get("arguments", found.get("parameters", {})))


def calls_in_json(text: str) -> list[ToolCall]:
    """Of one object, or a list of them. Raises ValueError: it is none."""
    return calls_of(JSON.decode(text.strip()))


def calls_of(found: Any) -> list[ToolCall]:
    """As calls_in_json, of what the JSON says."""
    return [_object(one) for one in (found if isinstance(found, list) else [found])]


def some(calls: list[ToolCall]) -> list[ToolCall]:
    """Raises ValueError: there are none."""
    if not calls:
        raise ValueError("no call of a tool")
    return calls


def inside(block: str, opening: str, closing: str) -> str:
    """What stands between marks, of which either may be missing."""
    return block.removeprefix(opening).removesuffix(closing)
