"""Rules, in llguidance's Lark, of calls as Gemma 4 writes them, `call:NAME{key:value}` with a quote token:
names are the tools', values of their schema (but for bounds of texts and lists, and what is composed of
schemas), and few required keys are all there, once. Chooses no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from localmoe.chat.answer_schema import json_of
from localmoe.chat.gemma_values import QUOTE
from localmoe.chat.parameter_rules import PLAIN_NAME, Order, Parameters, takes_others
from localmoe.core.errors import ConfigError
from localmoe.core.tools import Tool

MARKS = "<|tool_call>", "<tool_call|>", QUOTE
_KEY = "/[^,:{}\\[\\]<>\\n]{1,200}/"
_RULES = (
    'GAP: /[ \\n]{0,2}/\nCOMMA: /[ \\n]{0,2},[ \\n]{0,2}/\nCOLON: /:[ \\n]{0,2}/\nNULL: "null" | "None"\n'
    "NUMBER: /-?[0-9]{1,30}(\\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?/\n"
    f'any: text | NUMBER | "true" | "false" | NULL | any_list | any_object\nKEY: {_KEY}\n'
    'any_list: "[" GAP (any (COMMA any)*)? GAP "]"\n'
    'any_object: "{" GAP (KEY COLON any (COMMA KEY COLON any)*)? GAP "}"\n'
)
# of a schema that has one of these, a value is free
_COMPOSED = frozenset(("anyOf", "oneOf", "allOf", "not", "if", "$ref", "$dynamicRef", "patternProperties"))


def gemma_rules(marks: Sequence[int], tools: Sequence[Tool], ends: Collection[int]) -> str | None:
    """The rule of a `call` and what it needs; None: a name would need escapes.

    Args:
        marks: tokens of MARKS.
        tools: of names without escapes.
        ends: tokens that end an answer, which no value holds.
    """
    begin, end, quote = (f"<[{mark}]>" for mark in marks)
    rules = [_called(i, tool, quote) for i, tool in enumerate(tools)]
    if None in rules:
        return None
    no_text = ",".join(map(str, sorted({marks[2], *ends})))
    names = " | ".join(f"called{i}" for i in range(len(tools)))
    call = f'call: {begin} GAP "call:" ({names}) GAP {end}\ntext: {quote} <[^{no_text}]>* {quote}\n'
    return call + _RULES + "".join(rule or "" for rule in rules)


def _called(number: int, tool: Tool, quote: str) -> str | None:
    parameters, order, rules = Parameters.of(tool), Order(), list[str]()
    if parameters is None:
        return None
    values = _Values(f"v{number}", quote, parameters.schema)
    for place, (name, one) in enumerate(parameters.known.items()):
        rules.append(f"pair{number}_{place}: {json.dumps(name)} COLON {values.of(one)}\n")
        order.add(f"pair{number}_{place}", "pair", held=name in parameters.held)
    if takes_others(parameters.schema):
        rules.append(f"pair{number}: {_other(list(parameters.known), f'K{number}', rules)} COLON any\n")
        order.add(f"pair{number}", "pair", held=False)
    pairs, none = order.rules(f"of{number}", _behind)
    inside = f"of{number}" + "?" * none if pairs else ""
    return (
        f'called{number}: {json.dumps(tool.name + "{")} GAP {inside} GAP "}}"\n'
        f"{pairs}{''.join(rules)}{values.rules()}"
    )


def _behind(kind: str, more: str, ends: bool) -> str:
    return f"(COMMA {more}){'?' * ends}" if more else '""'


def _other(known: Sequence[str], name: str, rules: list[str]) -> str:
    """A key that is none of the known ones."""
    if not known:
        return "KEY"
    names = "|".join(one.replace(".", "\\.") for one in known)
    rules.append(f"{name}: {_KEY} & ~/({names})/\n")
    return name


class _Values:
    """Rules of values by their schemas."""

    def __init__(self, prefix: str, quote: str, root: dict[str, Any]) -> None:
        """prefix: of the rules' names. root: the schema that references begin at."""
        self._prefix, self._quote, self._root = prefix, quote, root
        self._rules: list[str] = []
        self._references: dict[str, str] = {}
        self._count = 0

    def rules(self) -> str:
        """Of all values so far."""
        return "".join(self._rules)

    def of(self, schema: Any) -> str:
        """An expression for a value."""
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            return self._referred(schema["$ref"])
        if not isinstance(schema, dict) or not _COMPOSED.isdisjoint(schema):
            return "any"
        if "const" in schema or isinstance(schema.get("enum"), list):
            return self._one_of([schema["const"]] if "const" in schema else schema["enum"])
        kinds = schema.get("type")
        if isinstance(kinds, list) and kinds:
            return f"({' | '.join(self._typed(kind, schema) for kind in kinds)})"
        return self._typed(kinds, schema)

    def _typed(self, kind: Any, schema: dict[str, Any]) -> str:
        match kind:
            case "string":
                return "text"
            case "boolean":
                return '("true" | "false")'
            case "null":
                return "NULL"
            case "integer" | "number":
                return self._named(_number({**schema, "type": kind}))
            case "array":
                one = self.of(schema.get("items", True))
                return self._named(f'"[" GAP ({one} (COMMA {one})*)? GAP "]"')
            case "object":
                return self._object(schema)
        return "any"

    def _object(self, schema: dict[str, Any]) -> str:
        found = schema.get("properties")
        known = found if isinstance(found, dict) else {}
        if not all(PLAIN_NAME.fullmatch(name) for name in known):
            return "any_object"
        pairs = [f"{json.dumps(name)} COLON {self.of(one)}" for name, one in known.items()]
        if takes_others(schema):
            other = schema.get("additionalProperties")
            key = _other(list(known), self._name().upper(), self._rules)
            pairs.append(f"{key} COLON {self.of(other)}")
        if not pairs:
            return '"{" GAP "}"'
        pair = self._named(" | ".join(pairs))
        return self._named(f'"{{" GAP ({pair} (COMMA {pair})*)? GAP "}}"')

    def _one_of(self, values: Sequence[Any]) -> str:
        ways = []
        for value in values:
            if isinstance(value, str):
                text = f"{json.dumps(value)} " if value else ""  # an empty literal is none to llguidance
                ways.append(f"{self._quote} {text}{self._quote}")
            elif value is None:
                ways.append("NULL")
            elif isinstance(value, bool | int | float):
                ways.append(json.dumps(json.dumps(value)))
            else:
                return "any"
        return f"({' | '.join(ways)})" if ways else "any"

    def _referred(self, path: str) -> str:
        """A part of the root, which may refer to itself."""
        if path not in self._references:
            found: Any = self._root
            for key in path.removeprefix("#/").split("/") if path.startswith("#/") else [""]:
                found = found.get(key) if isinstance(found, dict) else None
            if not isinstance(found, dict):
                return "any"
            name = self._references[path] = self._name()
            self._rules.append(f"{name}: {self.of(found)}\n")
        return self._references[path]

    def _named(self, rule: str) -> str:
        name = self._name()
        self._rules.append(f"{name}: {rule}\n")
        return name

    def _name(self) -> str:
        self._count += 1
        return f"{self._prefix}_{self._count}"


def _number(schema: dict[str, Any]) -> str:
    """As JSON has it, within its bounds."""
    try:
        return json_of(schema)
    except ConfigError:
        return json_of({"type": schema["type"]})
