"""Answers that may call tools: what is no call is free, and arguments are those of the tool's schema."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from held_calls import TOOLS, accepted, grammar, ids, marked, vocabulary
from small_tokenizers import byte_level, channels

from localmoe.chat.call_grammar import calls_grammar
from localmoe.chat.harmony import HarmonyText, harmony_marks
from localmoe.chat.lenient_grammar import LenientGrammar
from localmoe.chat.tool_formats import find_format, format_of
from localmoe.chat.tool_stream import ToolStream
from localmoe.core.errors import ConfigError
from localmoe.core.tools import Tool, ToolCall

THINKS = "{{ '<think>' }}"
HERMES = '<tool_call>{"name": "x", "arguments": {}}</tool_call>'
JSON = marked(HERMES, "<tool_call>", "</tool_call>")
THINKING = marked(THINKS + HERMES, "<tool_call>", "</tool_call>", "<think>", "</think>")
MISTRAL = marked("[TOOL_CALLS]x[ARGS]{}", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", special=True)


GOOD = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'


@pytest.mark.parametrize("tokenizer", [JSON, THINKING], ids=["plain", "thinking"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('Sure: {"name": 3} </b>\n', 'Sure: {"name": 3} </b>\n.'),
        (f"I look.\n{GOOD}", f"I look.\n{GOOD}."),
        (f"{GOOD}\n{GOOD} and so on", f"{GOOD}\n{GOOD} and so on."),
        ('<tool_call>{"name":"weather_now","arguments":{}}</tool_call>',) * 2,
        ('<tool_call>{"name": "get-any.v1", "arguments": {"x": [1]}}</tool_call>',) * 2,
        ('<tool_call>{"name": "forecast"', '<tool_call>{"name": "'),
        ('<tool_call>{"name": "weather", "arguments": {"days": 0',
         '<tool_call>{"name": "weather", "arguments": {"'),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": 0',
         '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": '),
        ('<tool_call>{"name": "weather", "arguments": {}', '<tool_call>{"name": "weather", "arguments": {'),
        ('<tool_call>{"name": "any", "arguments": {"a": "x", "b": [1]}}</tool_call>',) * 2,
        ("<tool_call>Hello", "<tool_call>"), ("</tool_call>", "</tool_call>."),
    ],
)  # fmt: skip
def test_calls_in_json_are_those_of_the_tools(tokenizer: Any, text: str, expected: str) -> None:
    whole = text == expected
    assert accepted(tokenizer, text) == expected + "." * whole
    if expected.endswith(".") and GOOD in expected:
        stream = ToolStream(format_of("json"), TOOLS)
        parts = (*stream.add(text), *stream.finish())
        calls = [part for part in parts if isinstance(part, ToolCall)]
        assert [one.name for one in calls] == ["weather"] * text.count(GOOD)


def test_thoughts_may_name_the_marks_of_calls() -> None:
    thoughts = "I may write <tool_call>now</tool_call> or not"
    for prompt, opening in (("hi", "<think>"), ("hi<think>\n", "")):
        text = f"{opening}{thoughts}</think>\n"
        assert accepted(THINKING, text + GOOD, prompt) == f"{text}{GOOD}."
        assert accepted(THINKING, f"{opening}{thoughts}", prompt) == f"{opening}{thoughts}."
        assert accepted(THINKING, f"{text}<tool_call>now", prompt) == f"{text}<tool_call>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello", "Hello."),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}.'),
        ("[TOOL_CALLS]weather_now[CALL_ID]a1b2[ARGS]{}[TOOL_CALLS]weather_now[ARGS]{}",
         "[TOOL_CALLS]weather_now[CALL_ID]a1b2[ARGS]{}[TOOL_CALLS]weather_now[ARGS]{}."),
        ('[TOOL_CALLS]get-any.v1[ARGS]{"x": [1]}', '[TOOL_CALLS]get-any.v1[ARGS]{"x": [1]}.'),
        ('[TOOL_CALLS]weather[ARGS]{"city": 3', '[TOOL_CALLS]weather[ARGS]{"city": '),
        ("[TOOL_CALLS]weather[ARGS]Oslo", "[TOOL_CALLS]weather[ARGS]"),
    ],
)  # fmt: skip
def test_calls_of_mistral_are_those_of_the_tools(text: str, expected: str) -> None:
    assert accepted(MISTRAL, text) == expected


FUNCTIONS = marked("<tool_call><function=x></function></tool_call>", "<tool_call>", "</tool_call>")
NAMED = "<parameter=city>\nOslo\n</parameter>\n"
CODE = "a\n</parameter>\n</functions>\n<tool_call\nif x < 3:"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello <function=x>", "Hello <function=x>."),
        (f"<tool_call>\n<function=weather>\n<parameter=city>\n{CODE}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
         "</function>\n</tool_call> done",) * 2,
        ("<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n<parameter=city>\n\n</parameter>\n"
         "</function>\n</tool_call>",) * 2,
        ("<tool_call>\n<function=weather_now>\n</function>\n</tool_call>",) * 2,
        ("<tool_call>\n<function=any>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>",) * 2,
        ("<tool_call>\n<function=get-any.v1>\n<parameter=x>\n[1]\n</parameter>\n</function>\n"
         "</tool_call>",) * 2,
        *((f"<tool_call>\n<function=weather>\n{NAMED}<parameter=exact>\n{word}\n</parameter>\n"
           "</function>\n</tool_call>",) * 2 for word in ("True", "false")),
        ("<tool_call>\n<function=weather>\n</function>", "<tool_call>\n<function=weather>\n<"),
        ("<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n</function>",
         "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n<"),
        (f"<tool_call>\n<function=weather>\n{NAMED}<parameter=city>",
         f"<tool_call>\n<function=weather>\n{NAMED}<parameter="),
        ("<tool_call>\n<function=weather>\n<parameter=exact>\nyes",
         "<tool_call>\n<function=weather>\n<parameter=exact>\n"),
        ("<tool_call>\n<function=forecast>", "<tool_call>\n<function="),
        ("<tool_call>\n<function=weather_now>\n<parameter=", "<tool_call>\n<function=weather_now>\n<"),
        ("<tool_call>\n<function=weather>\n<parameter=days>\n0",
         "<tool_call>\n<function=weather>\n<parameter=days>\n"),
        ("<tool_call>\n<function=weather>\n<parameter=year>", "<tool_call>\n<function=weather>\n<parameter="),
    ],
)  # fmt: skip
def test_calls_with_parameters_in_tags_are_those_of_the_tools(text: str, expected: str) -> None:
    assert find_format(FUNCTIONS) == "functions"
    whole = text == expected
    assert accepted(FUNCTIONS, text) == expected + "." * whole
    if whole:
        stream = ToolStream(format_of("functions"), TOOLS)
        parts = (*stream.add(text), *stream.finish())
        (call,) = (part for part in parts if isinstance(part, ToolCall))
        found = json.loads(call.arguments)
        assert found.keys() == set(re.findall("<parameter=(.*?)>", text)) and found.get("days", 3) == 3
        assert found.get("exact", True) is ("True" in text or "exact" not in found)
        assert found.get("city", CODE) in (CODE, "Oslo", "")


def named(count: int, others: str = "") -> Tool:
    """A tool with so many required texts, and these others."""
    names = [chr(ord("a") + i) for i in range(count)]
    fields = {name: {"type": "string"} for name in [*names, *others]}
    schema = {"type": "object", "properties": fields, "required": names, "additionalProperties": False}
    return Tool("f", json.dumps({"name": "f", "parameters": schema}))


@pytest.mark.parametrize(
    ("tool", "written", "expected"),
    [
        (named(2), "ba", "ba."), (named(2), "b", "b"), (named(2), "aba", "ab"),
        (named(2, "x"), "xbxax", "xbxax."), (named(2, "x"), "xb", "xb"),
        (named(4), "dbca", "dbca."), (named(4), "dbc", "dbc"),
        (named(5), "a", "a."), (named(5), "", "."), (named(0, "x"), "xx", "xx."),
    ],
)  # fmt: skip
def test_few_required_parameters_in_tags_are_all_there_once(tool: Tool, written: str, expected: str) -> None:
    """Of many, any may be missing."""
    hi = ids(FUNCTIONS, "hi")
    lark = calls_grammar(FUNCTIONS, hi, [tool], "functions")
    assert lark is not None
    opening, end = "<tool_call>\n<function=f>\n", "</function>\n</tool_call>"
    pairs = [f"<parameter={name}>\n</b>\n</parameter>\n" for name in written]
    answer = ids(FUNCTIONS, opening + "".join(pairs) + end)
    made = vocabulary(FUNCTIONS).grammar(lark, len(hi))
    taken = FUNCTIONS.decode(answer[: made.valid(hi, answer)])
    assert re.findall("<parameter=(.)>", taken) == list(expected.removesuffix("."))
    assert taken.endswith(end) == expected.endswith(".")


@pytest.mark.parametrize(
    ("kinds", "value", "taken"),
    [
        (["integer", "null"], "3", "3"), (["integer", "null"], "null", "null"),
        (["integer", "null"], "x", ""), (["string", "null"], "x", "x"), (["string", "integer"], "x", "x"),
        (["boolean", "null"], "None", "None"), (["boolean", "null"], "True", "True"),
        (["boolean", "null"], "x", ""), (["boolean", "integer"], "1", "1"), ([], "x", "x"),
        ({"a": 1}, "x", "x"), ("null", "x", "x"),
    ],
)  # fmt: skip
def test_a_parameter_in_tags_may_be_of_several_types(kinds: object, value: str, taken: str) -> None:
    """As what may be null is in OpenAI's strict tools."""
    properties = {"a": {"type": kinds}, "b": {"type": "string"}}
    tool = Tool("f", json.dumps({"name": "f", "parameters": {"type": "object", "properties": properties}}))
    begun = "<tool_call>\n<function=f>\n<parameter=a>\n"
    text = f"{begun}{value}\n</parameter>\n</function>\n</tool_call>"
    found = accepted(FUNCTIONS, text, tools=[tool])
    assert (found == f"{text}.") == bool(taken) and found.startswith(begun + taken)


ASKED = "<|start|>user<|message|>hi<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>{a} to=functions.no<|end|><|start|>assistant"
ARGUMENTS = '<|message|>{"city": "oslo"}<|call|>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THOUGHT}<|channel|>final<|message|>it is cold<|return|>",) * 2,
        (f"{THOUGHT}<|channel|>commentary to=functions.weather <|constrain|>json{ARGUMENTS}",) * 2,
        (f"<|channel|>commentary to=functions.weather{ARGUMENTS}",) * 2,
        (f" to=functions.weather<|channel|>commentary json{ARGUMENTS}",) * 2,
        (f"{THOUGHT}<|channel|>commentary<|message|>i look<|end|><|start|>assistant to=functions.weather"
         f"<|channel|>commentary <|constrain|>json{ARGUMENTS}",) * 2,
        ("<|channel|>commentary to=functions.weather<|message|>oslo",
         "<|channel|>commentary to=functions.weather<|message|>"),
        ("<|channel|>commentary to=functions.weather<|message|>{}",
         "<|channel|>commentary to=functions.weather<|message|>{"),
        ("<|channel|>commentary to=functions.forecast<|message|>{}",
         "<|channel|>commentary to=functions."),
        ("<|channel|>commentary to=functions.weather<|message|>{<|call|>",
         "<|channel|>commentary to=functions.weather<|message|>{"),
    ],
)  # fmt: skip
def test_calls_of_gpt_oss_are_those_of_the_tools(text: str, expected: str) -> None:
    assert accepted(channels(), text, ASKED) == expected
    if text == expected and "functions.weather" in text:
        found = HarmonyText(channels(), harmony_marks(channels()), ids(channels(), ASKED), calls=True)
        stream = ToolStream(format_of("json"), TOOLS)
        shown = found.add(ids(channels(), text)) + found.finish()
        assert any(isinstance(part, ToolCall) for part in (*stream.add(shown), *stream.finish()))


def test_where_calls_cannot_be_told_all_is_free() -> None:
    hi = [5, 6]
    escaped = marked(HERMES.replace('"', '\\"'), "<tool_call>", "</tool_call>")
    assert calls_grammar(escaped, hi, TOOLS, find_format(escaped)) is not None
    assert calls_grammar(JSON, hi, (), "json") is None
    assert calls_grammar(JSON, hi, [Tool("odd name", '{"name": "odd name"}')], "json") is None
    assert calls_grammar(byte_level(), hi, TOOLS, "json") is None, "its marks are no tokens"
    assert calls_grammar(JSON, hi, TOOLS, "gemma") is None
    odd = Tool("f", json.dumps({"name": "f", "parameters": {"properties": {"a b": {"type": "string"}}}}))
    assert calls_grammar(FUNCTIONS, hi, [odd], "functions") is None
    assert calls_grammar(marked(HERMES.replace("arguments", "p"), "<tool_call>"), hi, TOOLS, "json") is None
    assert calls_grammar(marked(THINKS + HERMES, "<tool_call>", "</tool_call>"), hi, TOOLS, "json") is None
    middle = ids(channels(), ASKED + "<|channel|>final<|message|>it")
    assert calls_grammar(channels(), middle, TOOLS, "json") is None


def test_a_vocabulary_is_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of 150,000 tokens takes a tenth of a second, which each answer waited for that may call tools."""
    tokenizer, listed = marked.__wrapped__(HERMES, "<tool_call>", "</tool_call>"), list[None]()
    kind = type(tokenizer)
    found = kind.get_vocab
    monkeypatch.setattr(kind, "get_vocab", lambda one: listed.append(None) or found(one))
    for _ in range(3):
        assert calls_grammar(tokenizer, [5, 6], TOOLS, "json") is not None
    assert len(listed) <= 1


def test_a_grammar_that_takes_more_than_it_may_leaves_the_rest_free(monkeypatch: pytest.MonkeyPatch) -> None:
    made, hi = grammar(JSON, [5, 6]), [5, 6]
    lenient, (mark,) = LenientGrammar(made), ids(JSON, "<tool_call>")
    text, wrong = [*hi, mark], ids(JSON, "no JSON")
    assert lenient.valid(text, wrong) == 0 and not lenient.free(text)
    allowed = lenient.allowed(text, len(JSON))
    assert allowed is not None and not allowed.all()

    def refuse() -> None:
        raise ConfigError("No answer can be held to this schema: it takes too long.")

    monkeypatch.setattr(made, "_refuse_errors", refuse)
    assert lenient.valid(text, wrong) == len(wrong)
    monkeypatch.undo()
    assert lenient.free(text) and lenient.forced(text) == [] and lenient.valid(text, wrong) == len(wrong)
    allowed = lenient.allowed(text, len(JSON))
    assert allowed is not None and allowed.all()


@pytest.mark.parametrize("tokenizer", [JSON, THINKING], ids=["plain", "thinking"])
def test_any_token_may_come_but_in_a_call(tokenizer: Any) -> None:
    made, hi = grammar(tokenizer, [5, 6]), [5, 6]
    text = [*hi, *ids(tokenizer, f"Sure.{GOOD} And")]
    begin, end = (tokenizer.convert_tokens_to_ids(mark) for mark in ("<tool_call>", "</tool_call>"))
    called = range(text.index(begin) + 1, text.index(end) + 1)
    assert [made.free(text[:at]) for at in range(2, len(text))] == [
        at not in called for at in range(2, len(text))
    ]
    if tokenizer is THINKING:
        assert made.free([*hi, *ids(tokenizer, "<think>So <tool_call> x")])
    assert not made.free([*hi, begin, begin])


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_chosen_among_the_allowed_tokens_every_call_can_be_read(seed: int) -> None:
    chance, text = random.Random(seed), ids(JSON, "hi")
    made, begins = grammar(JSON, text), len(text)
    call, size = JSON.convert_tokens_to_ids("<tool_call>"), len(JSON)
    for at in range(150):
        allowed = made.allowed(text, size)
        assert allowed is not None
        choices = allowed.nonzero().flatten().tolist()
        chosen = call if at % 50 == 0 and call in choices else chance.choice(choices)
        if chosen == JSON.eos_token_id:
            break
        text.append(chosen)
    written = JSON.decode(text[begins:], skip_special_tokens=False)
    stream = ToolStream(format_of("json"), TOOLS)
    parts = (*stream.add(written), *stream.finish(cut=True))
    closed = written.count("</tool_call>")
    calls = [part for part in parts if isinstance(part, ToolCall)]
    assert len(calls) <= closed + 1 and all(one.name in {tool.name for tool in TOOLS} for one in calls)
