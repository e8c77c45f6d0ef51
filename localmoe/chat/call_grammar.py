"""The grammar of an answer that may call tools, in llguidance's Lark: a call is of a tool, with arguments of
its schema, and all else is free, or the answer is JSON of a schema in the place of calls. For notations that
write arguments in JSON, parameters in tags (function_grammar), keys and values (keyed_grammar) or as Gemma 4
does (gemma_grammar), between marks that are tokens of their own. Chooses no tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from localmoe.chat.answer_schema import any_object, arguments_of, json_of, knows_thoughts
from localmoe.chat.function_grammar import INVOKES, function_rules
from localmoe.chat.gemma_grammar import MARKS as GEMMA_MARKS
from localmoe.chat.gemma_grammar import gemma_rules
from localmoe.chat.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START, harmony_marks
from localmoe.chat.keyed_grammar import keyed_rules
from localmoe.chat.marked_calls import KIMI_MARKS
from localmoe.chat.parameter_rules import PLAIN_NAME
from localmoe.chat.reasoning import CLOSE, OPEN, opens_reasoning
from localmoe.chat.thought_marks import thought_marks
from localmoe.chat.tool_formats import format_of, template_text
from localmoe.core.errors import ConfigError
from localmoe.core.tools import Tool

# a space, or an indented new line; without a bound a model may write nothing else
_SPACE = "SPACE: /( |\\n[ \\t]{0,8})?/\n"
_WORDS = "/[^<=]{0,60}/"  # of a header, which call nobody
_TO = "to=functions."
_GAP = r"/[ \n]{0,2}/"  # before JSON and calls, where nothing else is free


def calls_grammar(
    tokenizer: Any,
    prompt: Sequence[int],
    tools: Sequence[Tool],
    notation: str,
    ends: Collection[int] = (),
    *,
    schema: str | None = None,
) -> str | None:
    """Of the answer to this prompt; None where its calls cannot be told from the rest, token by token.

    Args:
        notation: of tool_formats.FORMATS.
        ends: tokens that end an answer.
        schema: of the answer behind its thoughts, if it calls nothing; None: any text, also beside calls.

    Raises:
        ConfigError: no answer can be held to the schema.
    """
    if not tools or not all(PLAIN_NAME.fullmatch(tool.name) for tool in tools):
        return None
    if marks := harmony_marks(tokenizer):
        return _in_messages({mark: token for token, mark in marks.items()}, prompt, tools, schema)
    vocabulary: Mapping[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    marks_of_call = _marks(notation, template_text(tokenizer))
    tokens = [vocabulary.get(mark) for mark in marks_of_call]
    thoughts = _thought_tokens(tokenizer, vocabulary)
    found = [token for token in tokens if token is not None]
    if thoughts is None or not found or len(found) < len(tokens):
        return None
    names, begins = [tool.name for tool in tools], found[:1]
    # some configs name others beside
    ends = [token for token in ends if token >= 0 and tokenizer.convert_ids_to_tokens(token) is not None]
    match notation:
        case "functions":
            rules = function_rules(found, tools)
        case "invokes":
            rules = function_rules(found, tools, INVOKES)
        case "python":
            rules = _in_python(found, names)
        case "arguments":
            rules = keyed_rules(found, tools, vocabulary, ends)
        case "gemma":
            rules = gemma_rules(found, tools, ends)
        case "kimi":
            rules, begins = _of_kimi(found, names) + _arguments(tools), [found[0], found[2]]
        case "actions":
            rules = _in_actions(found, names) + _arguments(tools)
        case "json" | "gigachat":
            rules = _in_json(found, names) + _arguments(tools)
        case _:
            rules = _of_mistral(found, names, vocabulary.get("[CALL_ID]")) + _arguments(tools)
    if rules is None:
        return None
    opened = bool(thoughts) and opens_reasoning(tokenizer, prompt)
    calls_inside = format_of(notation).ends_thoughts
    if schema is not None:
        return f"{_instead_of_calls(thoughts, begins, opened, calls_inside)}{_result(schema)}{rules}"
    return f"{_around_thoughts(thoughts, begins, opened, calls_inside)}{rules}"


def _marks(notation: str, template: str) -> tuple[str, ...]:
    """That a call begins with, that ends it or its tool's name, and others; none of other notations."""
    if notation == "kimi":
        return KIMI_MARKS
    if notation == "gemma":
        return GEMMA_MARKS
    if notation == "invokes":
        return "<minimax:tool_call>", "</minimax:tool_call>"
    if notation == "python":
        return "<|tool_call_start|>", "<|tool_call_end|>"
    if notation == "actions":
        return "<|START_ACTION|>", "<|END_ACTION|>"
    if notation == "gigachat":
        return ("<|function_call|>",)
    if notation in ("functions", "arguments"):
        return "<tool_call>", "</tool_call>"
    if notation == "json" and '"arguments"' in template.replace("\\", ""):  # in a text of the template's
        return "<tool_call>", "</tool_call>"
    if notation == "mistral" and "[ARGS]" in template:
        return "[TOOL_CALLS]", "[ARGS]"
    return ()


def _in_json(marks: Sequence[int], names: Sequence[str]) -> str:
    """marks: the latter is missing where the end of an answer is that of a call."""
    end = "".join(f" SPACE <[{mark}]>" for mark in marks[1:])
    return f"call: <[{marks[0]}]> SPACE one{end}\n{_object(names, 'name', 'arguments', '')}"


def _in_actions(marks: Sequence[int], names: Sequence[str]) -> str:
    """Cohere's, which begin with a count."""
    begin, end = (f"<[{mark}]>" for mark in marks)
    count = '("\\"tool_call_id\\"" SPACE ":" SPACE /"[A-Za-z0-9_-]{1,40}"/ SPACE "," SPACE)? '
    return (
        f'call: {begin} SPACE "[" SPACE one (SPACE "," SPACE one)* SPACE "]" SPACE {end}\n'
        f"{_object(names, 'tool_name', 'parameters', count)}"
    )


def _object(names: Sequence[str], name: str, arguments: str, before: str) -> str:
    """Rules of `one` call in JSON. name, arguments: its keys. before: rules of what stands before them."""
    field = f'SPACE "," SPACE "\\"{arguments}\\"" SPACE ":" SPACE'
    each = (f"{json.dumps(json.dumps(one))} {field} arguments{i}" for i, one in enumerate(names))
    opening = f'"{{" SPACE {before}"\\"{name}\\"" SPACE ":" SPACE'
    return f'one: {opening} called SPACE "}}"\ncalled: {" | ".join(each)}\n'


def _in_python(marks: Sequence[int], names: Sequence[str]) -> str:
    """LFM2's. The first call's name alone is held: texts stand between quotes that they may hold as well, so
    that all of a call says where they end; and asked in words for JSON, the model writes that."""
    name = " | ".join(json.dumps(f"{name}(") for name in names)
    begin, end = (f"<[{mark}]>" for mark in marks)
    return f'call: {begin} SPACE "["? SPACE ({name} | "{{") /(?s:.*)/ {end}\n{_SPACE}'


def _of_kimi(marks: Sequence[int], names: Sequence[str]) -> str:
    section, section_end, begin, before_arguments, end = (f"<[{mark}]>" for mark in marks)
    each = (
        f"{json.dumps(f'functions.{name}:')} COUNT SPACE {before_arguments} SPACE arguments{i}"
        for i, name in enumerate(names)
    )
    return (
        f"call: {section} SPACE (one SPACE)+ {section_end} | one\n"
        f"one: {begin} SPACE called SPACE {end}\ncalled: {' | '.join(each)}\nCOUNT: /[0-9]{{1,4}}/\n"
    )


def _of_mistral(marks: Sequence[int], names: Sequence[str], made: int | None) -> str:
    """made: the token before a call's id."""
    named = "" if made is None else f"(<[{made}]> /[A-Za-z0-9]{{1,40}}/)? "
    each = (f"{json.dumps(name)} {named}<[{marks[1]}]> SPACE arguments{i}" for i, name in enumerate(names))
    return f"call: <[{marks[0]}]> SPACE called\ncalled: {' | '.join(each)}\n"


def _thought_tokens(tokenizer: Any, vocabulary: Mapping[str, int]) -> tuple[int, ...] | None:
    """Of the marks before and behind thoughts; () where there are no thoughts, None where marks are text."""
    if not knows_thoughts(tokenizer):
        return ()
    if known := thought_marks(tokenizer):
        return known.tokens
    both = OPEN in vocabulary and CLOSE in vocabulary
    return (vocabulary[OPEN], vocabulary[CLOSE]) if both else None


def _arguments(tools: Sequence[Tool]) -> str:
    """Rules of all tools' in JSON, and of the space in them."""
    return _SPACE + "".join(f"arguments{i}: {_arguments_of(tool)}\n" for i, tool in enumerate(tools))


def _arguments_of(tool: Tool) -> str:
    """A schema that nobody can be held to leaves them free, but for being an object."""
    try:
        return arguments_of(tool)
    except ConfigError:
        return any_object()


def _but(tokens: Collection[int]) -> str:
    """Any token but these."""
    return f"<[^{','.join(map(str, sorted(tokens)))}]>"


def _around_thoughts(thoughts: Sequence[int], begins: Sequence[int], opened: bool, calls_inside: bool) -> str:
    """Rules of the whole answer: thoughts may name the marks of calls, and call nothing. No two rules take
    one token in one place, as llguidance would follow one of them alone.

    Args:
        thoughts: tokens of their marks, or none. begins: of a call. opened: the answer begins with thoughts.
        calls_inside: a call ends thoughts, whose mark they cannot name.
    """
    if not thoughts:
        return f"start: (free | call)*\nfree: {_but(begins)}\n"
    opening, closing = (f"<[{token}]>" for token in thoughts)
    named = begins if calls_inside else ()
    rules = f"free: {_but([*begins, *thoughts[:1]])}\nhidden: {_but([*thoughts[1:], *named])}*\n"
    end = f"({closing} | call)" if calls_inside else closing
    answer = f"(free | call | {opening} hidden {end})* ({opening} hidden)?"  # it may end in thoughts
    start = f"hidden ({end} rest)?" if opened else "rest"
    return f"start: {start}\nrest: {answer}\n{rules}"


def _instead_of_calls(
    thoughts: Sequence[int], begins: Sequence[int], opened: bool, calls_inside: bool
) -> str:
    """As `_around_thoughts`, of an answer that is JSON or calls, which thoughts may come before."""
    turn = f"turn: {_GAP} (result | calls)\ncalls: call ({_GAP} call)*\n"
    if not thoughts:
        return f"start: turn\n{turn}"
    opening, closing = (f"<[{token}]>" for token in thoughts)
    hidden = f"hidden: {_but([*thoughts[1:], *(begins if calls_inside else ())])}*\n"
    end = f"({closing} turn | calls)" if calls_inside else f"{closing} turn"
    return f"start: {f'hidden {end}' if opened else f'turn | {opening} hidden {end}'}\n{turn}{hidden}"


def _result(schema: str) -> str:
    return f"result: {json_of(json.loads(schema))}\n"


def _in_messages(
    marks: Mapping[str, int], prompt: Sequence[int], tools: Sequence[Tool], schema: str | None
) -> str | None:
    """gpt-oss's: whom a message is for stands in its header, before or behind the channel's name."""
    last = next((token for token in reversed(prompt) if token in marks.values()), None)
    if last != marks[START] or CALL not in marks:
        return None  # it goes on in the middle of a message
    start, channel, message, end = (f"<[{marks[mark]}]>" for mark in (START, CHANNEL, MESSAGE, END))
    form = f"(<[{marks[CONSTRAIN]}]> {_WORDS})? " if CONSTRAIN in marks else ""
    calls, names = [], []
    for i, tool in enumerate(tools):
        names.append(f"TO{i}: /[^<=]{{0,40}}{re.escape(_TO + tool.name)}( [^<=]{{0,20}})?/\n")
        behind = f"{form}{message} arguments{i}"
        calls.append(f"WORDS {channel} TO{i} {behind} | TO{i} {channel} WORDS {behind}")
    rules = f"text: {_but(marks.values())}*\nWORDS: {_WORDS}\n{''.join(names)}{_arguments(tools)}"
    if schema is None:
        return (
            f'start: message ({end} {start} "assistant" message)*\n'
            f"message: WORDS {channel} WORDS {form}{message} text | {' | '.join(calls)}\n{rules}"
        )
    return (
        f'start: (aside {end} {start} "assistant")* (final | {" | ".join(calls)})\n'
        f"aside: {channel} ASIDE {form}{message} text\nASIDE: /(analysis|commentary)[^<=]{{0,40}}/\n"
        f"final: {channel} FINAL {form}{message} {_GAP} result\nFINAL: /final ?/\n{_result(schema)}{rules}"
    )
