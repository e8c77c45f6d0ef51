"""The grammar of an answer that is JSON of a schema, or a call of a tool, in llguidance's Lark: what a model
may think before it, in its own marks, is free. Chooses no tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from localmoe.chat.harmony import CHANNEL, END, MESSAGE, START, harmony_marks
from localmoe.chat.reasoning import CLOSE, OPEN, opens_reasoning
from localmoe.chat.schema_limits import check_multiples, check_texts, with_known_formats
from localmoe.chat.thought_marks import thought_marks
from localmoe.core.errors import ConfigError
from localmoe.core.tools import Tool

# between JSON's tokens: a space, or an indented new line; without a bound a model may write nothing else
_WHITE_SPACE = r"( |\n[ \t]{0,40})?"
_BEHIND_THOUGHTS = r"/[ \n]{0,2}/"
_COMPOSED = frozenset(("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "patternProperties"))
# the closing mark spelt in letters would end thoughts for whoever reads the text
_CLOSED = CLOSE.replace("/", "\\/")
_THOUGHTS = f"ANYTHING: /(?s:.*)/ & ~/(?s:.*){_CLOSED}(?s:.*)/\n"
# each character is written in one way: else a key could be spelt past the schema of its value
_ESCAPES = '"\\bfnrt'


def answer_grammar(tokenizer: Any, prompt: Sequence[int], rules: str) -> str:
    """Of the answer to this prompt.

    Args:
        rules: of `json`, what it has to be.
    """
    value = f"{rules}value: {_BEHIND_THOUGHTS} json\n"
    marks = {mark: f"<[{token}]>" for token, mark in harmony_marks(tokenizer).items()}
    if marks:
        return _in_channels(marks) + value
    thoughts = _thoughts(tokenizer)
    if opens_reasoning(tokenizer, prompt):
        return f"start: thoughts value\n{thoughts}{value}"
    if not knows_thoughts(tokenizer):
        return f'start: " "? json\n{value}'
    return f"start: (open thoughts)? value\n{thoughts}{value}"


def schema_rules(schema: str) -> str:
    """JSON of a schema, which is the JSON of an object."""
    return f"json: {json_of(json.loads(schema))}\n"


def call_rules(tools: Sequence[Tool]) -> str:
    """A call of one of these tools, as tool_formats.FORCED reads it. Each one's arguments are a schema of
    their own, whose references begin at its own root."""
    calls, rules = [], []
    for number, tool in enumerate(tools):
        opening = f'{{"name": {json.dumps(tool.name)}, "arguments": '
        calls.append(f'{json.dumps(opening)} arguments{number} "}}"')
        rules.append(f"arguments{number}: {arguments_of(tool)}\n")
    return f"json: {' | '.join(calls)}\n{''.join(rules)}"


def arguments_of(tool: Tool) -> str:
    """JSON of a tool's schema, as call_rules has it. Raises ConfigError: no answer can be held to it."""
    return json_of(parameters_of(tool))


def any_object() -> str:
    """JSON of any object."""
    return json_of({"type": "object"})


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which has to be an object; they are those that it names, and any
    where it is but said to be an object, unless it says otherwise. Of a tool without a schema they are none.
    """
    found = tool.as_dict()["function"].get("parameters") or {}
    if not isinstance(found, dict) or found.get("type", "object") != "object":
        raise ConfigError(f"The parameters of tool '{tool.name}' are no schema of an object: mend them.")
    if not _COMPOSED.isdisjoint(found) or (found and "properties" not in found):
        return {"type": "object", **found}
    return {"type": "object", "properties": {}, "additionalProperties": False, **found}


def json_of(schema: dict[str, Any]) -> str:
    """
    Raises:
        ConfigError: a grammar of it would take too long to make, or be of other texts.
    """
    check_multiples(schema)
    check_texts(schema)
    options = {"whitespace_pattern": _WHITE_SPACE, "json_allowed_escapes": _ESCAPES}
    return f"%json {json.dumps({**with_known_formats(schema), 'x-guidance': options})}"


def knows_thoughts(tokenizer: Any) -> bool:
    """Whether a model with this tokenizer may think before it answers, in marks other than channels."""
    if thought_marks(tokenizer):
        return True
    template = getattr(tokenizer, "chat_template", None)
    return OPEN in json.dumps(template or "") or _has_opening(tokenizer)


# of each tokenizer: to list 150,000 tokens takes a tenth of a second
_FOUND = WeakKeyDictionary[Any, bool]()


def _has_opening(tokenizer: Any) -> bool:
    if tokenizer not in _FOUND:
        _FOUND[tokenizer] = OPEN in getattr(tokenizer, "get_vocab", dict)()
    return _FOUND[tokenizer]


def _thoughts(tokenizer: Any) -> str:
    """Rules of the opening mark, and of all up to the closing one. A token of its own, special or not, is no
    text to llguidance."""
    if marks := thought_marks(tokenizer):
        opening, closing = (f"<[{token}]>" for token in marks.tokens)
        return f"open: {opening}\nthoughts: ANYTHING {closing}\n{_THOUGHTS}"
    vocabulary: Mapping[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    opening = f"<[{vocabulary[OPEN]}]>" if OPEN in vocabulary else f'"{OPEN}"'
    if CLOSE in vocabulary:
        return f"open: {opening}\nthoughts: ANYTHING <[{vocabulary[CLOSE]}]>\n{_THOUGHTS}"
    return f"open: {opening}\nthoughts[lazy]: /(?s:.*){_CLOSED}/\n"


def _in_channels(marks: dict[str, str]) -> str:
    """gpt-oss's: the prompt ends in a message's header."""
    channel, message = marks[CHANNEL], marks[MESSAGE]
    constrained = f'({marks["<|constrain|>"]} "json")?' if "<|constrain|>" in marks else ""
    return (
        "start: analysis* final\n"
        f'analysis: {channel} "analysis" {message} ANYTHING {marks[END]} {marks[START]} "assistant"\n'
        f'final: {channel} "final" " "? {constrained} {message} value\n'
        f"{_THOUGHTS}"
    )
