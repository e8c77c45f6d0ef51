"""Parameters of a tool that are written one by one, in llguidance's Lark: which of them may come next, and
values without quotes. Knows no notation."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from localmoe.chat.answer_schema import json_of, parameters_of
from localmoe.core.errors import ConfigError
from localmoe.core.tools import Tool

PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")  # as OpenAI has those of tools; others would need escapes
_TYPES = frozenset(("integer", "number", "boolean", "object", "array"))
_MOST_HELD = 4  # required parameters of which none may be missing: each one doubles the rules
# what follows one of them: its rule, that of more ("" for none), and whether all may end there
Follow = Callable[[str, str, bool], str]


def schema_of(tool: Tool) -> dict[str, Any]:
    """Of its arguments; where an answer cannot be held to that, any object's."""
    try:
        return parameters_of(tool)
    except ConfigError:
        return {"type": "object"}


def properties_of(schema: dict[str, Any]) -> dict[str, Any] | None:
    """Its parameters; None: the name of one would need escapes."""
    found = schema.get("properties")
    known: dict[str, Any] = found if isinstance(found, dict) else {}
    return known if all(PLAIN_NAME.fullmatch(name) for name in known) else None


def takes_others(schema: dict[str, Any]) -> bool:
    """Whether it has parameters beside those that it names."""
    return schema.get("additionalProperties", True) is not False


def held_names(schema: dict[str, Any], names: Collection[str]) -> list[str]:
    """The parameters that may not be missing, unless they are many."""
    required = schema.get("required")
    held = [name for name in names if isinstance(required, list) and name in required]
    return held if len(held) <= _MOST_HELD else []


def in_any_order(rule: str, held: Sequence[str], others: Sequence[str], follow: Follow) -> tuple[str, bool]:
    """Rules of parameters in any order, of which each of `held` comes once; whether there may be none.

    Args:
        rule: the first one's name, and what the others' begin with.
        held, others: the parameters' rules.
    """
    whole, rules = (1 << len(held)) - 1, []
    for missing in range(whole, -1, -1):
        ways = [follow(one, _state(rule, missing, whole), not missing) for one in others]
        for place, one in enumerate(held):
            if missing >> place & 1:
                left = missing & ~(1 << place)
                more = _state(rule, left, whole) if left or others else ""
                ways.append(follow(one, more, not left))
        if ways:
            rules.append(f"{_state(rule, missing, whole)}: {' | '.join(ways)}\n")
    return "".join(rules), not whole


def _state(rule: str, missing: int, whole: int) -> str:
    return rule if missing == whole else f"{rule}_{missing}"


def written(value: Any, schema: dict[str, Any]) -> str | None:
    """A value as JSON; None: it is a text, or may be one, or nobody can be held to its schema.

    Args:
        schema: that it is a part of.
    """
    if not isinstance(value, dict) or value.get("type") not in _TYPES:
        return None
    if value["type"] == "boolean":  # in Python's words too, as templates show the model its own calls
        return '"true" | "false" | "True" | "False"'
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    try:
        return json_of(shared | value)
    except ConfigError:
        return None
