"""Parameters of a tool that are written one by one, in llguidance's Lark: which of them may come next, and
values without quotes. Knows no notation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from localmoe.chat.answer_schema import json_of, parameters_of
from localmoe.core.errors import ConfigError
from localmoe.core.tools import Tool

PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")  # as OpenAI has those of tools; others would need escapes
_TYPES = frozenset(("integer", "number", "boolean", "object", "array", "null"))
# in Python's words too, as templates show the model its own calls
_WORDS = {"boolean": '"true" | "false" | "True" | "False"', "null": '"null" | "None"'}
_MOST_HELD = 4  # required parameters of which none may be missing: each one doubles the rules
# what stands behind a parameter of a kind: the rule of more ("" for none), and whether all may end there
Behind = Callable[[str, str, bool], str]


@dataclass(frozen=True, slots=True)
class Parameters:
    """A tool's.

    Attributes:
        schema: of all together; where an answer cannot be held to the tool's, any object's.
        known: name -> schema, of those that it names.
        held: names of those that may not be missing; none where they are many.
    """

    schema: dict[str, Any]
    known: dict[str, Any]
    held: Collection[str]

    @classmethod
    def of(cls, tool: Tool) -> Parameters | None:
        """None: the name of one would need escapes."""
        try:
            schema = parameters_of(tool)
        except ConfigError:
            schema = {"type": "object"}
        found, required = schema.get("properties"), schema.get("required")
        known: dict[str, Any] = found if isinstance(found, dict) else {}
        if not all(PLAIN_NAME.fullmatch(name) for name in known):
            return None
        held = [name for name in known if isinstance(required, list) and name in required]
        return cls(schema, known, held if len(held) <= _MOST_HELD else [])


def takes_others(schema: dict[str, Any]) -> bool:
    """Whether an object has parameters beside those that its schema names."""
    return schema.get("additionalProperties", True) is not False


class Order:
    """Parameters in any order, of which some come once."""

    def __init__(self) -> None:
        self._held: list[tuple[str, str]] = []
        self._others: dict[str, list[str]] = {}

    def add(self, rule: str, kind: str, *, held: bool) -> None:
        """A parameter's rule. kind: of what stands behind it. held: it comes once; others may be missing."""
        if held:
            self._held.append((rule, kind))
        else:
            self._others.setdefault(kind, []).append(rule)

    def rules(self, name: str, behind: Behind) -> tuple[str, bool]:
        """All rules, of which the first one has this name and the others' begin with it; whether there may be
        no parameters. Where a tool has none, there are no rules."""
        whole, rules, needed = (1 << len(self._held)) - 1, [], set[tuple[str, int]]()
        for missing in range(whole, -1, -1):
            ways = [f"{name}{kind} {name}{kind}{missing}" for kind in self._others]
            needed |= {(kind, missing) for kind in self._others}
            for place, (rule, kind) in enumerate(self._held):
                if missing >> place & 1:
                    left = missing & ~(1 << place)
                    ways.append(f"{rule} {name}{kind}{left}")
                    needed.add((kind, left))
            if ways:
                rules.append(f"{_state(name, missing, whole)}: {' | '.join(ways)}\n")
        for kind, left in sorted(needed):
            more = _state(name, left, whole) if left or self._others else ""
            rules.append(f"{name}{kind}{left}: {behind(kind, more, not left)}\n")
        rules += [f"{name}{kind}: {' | '.join(of_kind)}\n" for kind, of_kind in self._others.items()]
        return "".join(rules), not whole


def _state(name: str, missing: int, whole: int) -> str:
    return name if missing == whole else f"{name}_{missing}"


def words_of(value: Any) -> str | None:
    """A text that is one of some, without quotes; None: it may be any, or one that looks like an end."""
    found = (
        value.get("enum", [value["const"]] if "const" in value else None) if isinstance(value, dict) else None
    )
    if not isinstance(found, list) or not found or not all(map(_is_plain, found)):
        return None
    return " | ".join(map(json.dumps, found))


def _is_plain(word: Any) -> bool:
    return isinstance(word, str) and word.strip() == word != "" and "<" not in word and word.isprintable()


def written(value: Any, schema: dict[str, Any]) -> str | None:
    """A value as JSON; None: it is a text, or may be one, or nobody can be held to its schema.

    Args:
        schema: that it is a part of.
    """
    kinds: Any = value.get("type") if isinstance(value, dict) else None
    named: list[Any] = (
        kinds if isinstance(kinds, list) else [kinds]
    )  # as OpenAI's strict tools have of what may be null
    if named in ([], ["null"]) or not all(isinstance(kind, str) and kind in _TYPES for kind in named):
        return None
    if "boolean" in named and set(named) <= _WORDS.keys():
        return " | ".join(_WORDS[kind] for kind in named)
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    try:
        return json_of(shared | value)
    except ConfigError:
        return None
