"""Rules, in llguidance's Lark, of calls that are written as functions with parameters in tags, whose values
have no quotes (Qwen3-Coder's, Qwen3.5's and Nemotron 3's): names are those of the tool, and values that are
no texts are JSON of their schema. Which parameters there are is the model's choice. Chooses no tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from localmoe.chat.answer_schema import json_of, parameters_of
from localmoe.core.errors import ConfigError
from localmoe.core.tools import Tool

_TYPES = frozenset(("integer", "number", "boolean", "object", "array"))
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")  # as OpenAI has those of tools; others would need escapes
# a value may hold what ends one, so it ends where another one begins, or all of them end
_RULES = (
    'GAP: /[ \\n]{0,2}/\nmore: GAP "<parameter="\nlast: GAP "</function>"\n'
    "text_more[lazy]: /(?s:.*)<\\/parameter>[ \\n]{0,2}<parameter=/\n"
    "text_last[lazy]: /(?s:.*)<\\/parameter>[ \\n]{0,2}<\\/function>/\n"
)


def function_rules(marks: Sequence[int], tools: Sequence[Tool]) -> str | None:
    """The rule of a `call` and what it needs; None: a name would need escapes.

    Args:
        marks: tokens before and behind a call.
        tools: of names without escapes.
    """
    rules = [_function(i, tool) for i, tool in enumerate(tools)]
    if None in rules:
        return None
    names = " | ".join(f"function{i}" for i in range(len(tools)))
    call = f"call: <[{marks[0]}]> GAP ({names}) GAP <[{marks[1]}]>\n"
    return call + _RULES + "".join(rule or "" for rule in rules)


def _function(number: int, tool: Tool) -> str | None:
    try:
        schema = parameters_of(tool)
    except ConfigError:
        schema = {"additionalProperties": True}
    properties = schema.get("properties")
    known: dict[str, Any] = properties if isinstance(properties, dict) else {}
    if not all(PLAIN_NAME.fullmatch(name) for name in known):
        return None
    these, opening = f"of{number}", json.dumps(f"<function={tool.name}>")
    ways, rules = [], []
    for place, (name, value) in enumerate(known.items()):
        written = None if name in tool.texts else _written(value, schema)
        tag = json.dumps(f"{name}>")
        if written is None:
            ways.append(f'{tag} "\\n"? (text_more {these} | text_last)')
        else:
            ways.append(f'{tag} GAP value{number}_{place} GAP "</parameter>" (more {these} | last)')
            rules.append(f"value{number}_{place}: {written}\n")
    if schema.get("additionalProperties", True) is not False:
        ways.append(f"/[^<>\\n]{{1,200}}>/ (text_more {these} | text_last)")
    if not ways:
        return f"function{number}: {opening} last\n"
    function = f"function{number}: {opening} (more {these} | last)\n{these}: {' | '.join(ways)}\n"
    return function + "".join(rules)


def _written(value: Any, schema: dict[str, Any]) -> str | None:
    """JSON of a value; None: it is a text, or may be one, or nobody can be held to its schema."""
    if not isinstance(value, dict) or value.get("type") not in _TYPES:
        return None
    if value["type"] == "boolean":  # in Python's words too, as templates show the model its own calls
        return '"true" | "false" | "True" | "False"'
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    try:
        return json_of(shared | value)
    except ConfigError:
        return None
