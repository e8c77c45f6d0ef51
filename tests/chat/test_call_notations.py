"""Calls in the notations of GLM, Kimi and others: held to the tools, and to nothing that is no call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from held_calls import accepted, calls_in, marked

from localmoe.core.tools import Tool

GLM_MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
KEYS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
GLM = marked("<think><tool_call>x<arg_key>", *GLM_MARKS, *KEYS)
SPELT = marked("<think><tool_call>x<arg_key>", *GLM_MARKS)
LINE = "\n"
CODE = "if x <= 3:\n</tool_call> </arg_key>\n"


def pair(name: str, value: Any, between: str = "") -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"<arg_key>{name}</arg_key>{between}<arg_value>{text}</arg_value>"


@pytest.mark.parametrize("tokenizer", [GLM, SPELT], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello <arg_key> and 3 < 4", None),
        (f"<tool_call>weather\n{pair('city', 'Oslo', LINE)}\n{pair('days', 3, LINE)}\n</tool_call>", None),
        (f"<tool_call>weather{pair('days', 3)}{pair('city', 'Oslo')}</tool_call>", None),
        (f"I look.<tool_call>weather\n{pair('city', '')}{pair('exact', True)}\n</tool_call>\nDone", None),
        ("<tool_call>weather_now</tool_call><tool_call>weather_now\n\n</tool_call>", None),
        (f"<tool_call>get-any.v1{pair('x', [1])}</tool_call>", None),
        (f"<tool_call>any{pair('a', 'no number')}</tool_call>", None),
        (f"<think>a <tool_call>b</think><tool_call>weather{pair('city', 'Rome')}</tool_call>", None),
        ("<tool_call>forecast", "<tool_call>"),
        ("<tool_call>weather</tool_call>", "<tool_call>weather"),
        (f"<tool_call>weather{pair('days', 3)}</tool_call>", f"<tool_call>weather{pair('days', 3)}"),
        (f"<tool_call>weather{pair('city', 'a')}{pair('city', 'b')}",
         f"<tool_call>weather{pair('city', 'a')}<arg_key>"),
        ("<tool_call>weather<arg_key>days</arg_key><arg_value>0",
         "<tool_call>weather<arg_key>days</arg_key><arg_value>"),
        ("<tool_call>weather<arg_key>year", "<tool_call>weather<arg_key>"),
    ],
)  # fmt: skip
def test_calls_with_keys_and_values_are_those_of_the_tools(
    tokenizer: Any, text: str, expected: str | None
) -> None:
    assert accepted(tokenizer, text) == (expected or f"{text}.")
    if expected is None and "<think>" not in text:
        calls = calls_in("arguments", text)
        assert len(calls) == text.count("</tool_call>")
        for call in calls:
            arguments = json.loads(call.arguments)
            assert all(
                pair(name, value).partition("<arg_value>")[2] in text for name, value in arguments.items()
            )


def test_a_value_may_hold_any_token_but_those_that_end_it() -> None:
    begun = f"<tool_call>weather<arg_key>city</arg_key><arg_value>{CODE}"
    assert accepted(GLM, f"{begun}</arg_value></tool_call>") == f"{begun}</arg_value></tool_call>."
    assert accepted(GLM, begun) == begun, "it ends with no answer"


KIMI_MARKS = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
KIMI = marked("".join(KIMI_MARKS), *KIMI_MARKS, special=True)
NOW = "<|tool_call_begin|>functions.weather_now:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
OSLO = '<|tool_call_begin|>functions.weather:1<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello functions.x:0", None),
        (f"I look.<|tool_calls_section_begin|>{NOW.format(0)}{OSLO}<|tool_calls_section_end|>", None),
        (f"<|tool_calls_section_begin|>\n{NOW.format(12)}\n<|tool_calls_section_end|>", None),
        (OSLO, None),
        ("<|tool_calls_section_begin|>Hello", "<|tool_calls_section_begin|>"),
        ("<|tool_calls_section_begin|><|tool_calls_section_end|>", "<|tool_calls_section_begin|>"),
        ("<|tool_call_begin|>functions.forecast", "<|tool_call_begin|>functions."),
        ("<|tool_call_begin|>call_a1", "<|tool_call_begin|>"),
        ("<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{}",
         "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"),
        ("<|tool_call_begin|>functions.weather_now:0<|tool_call_end|>",
         "<|tool_call_begin|>functions.weather_now:0"),
    ],
)  # fmt: skip
def test_calls_of_kimi_are_those_of_the_tools(text: str, expected: str | None) -> None:
    assert accepted(KIMI, text) == (expected or f"{text}.")
    if expected is None:
        assert len(calls_in("kimi", text)) == text.count("<|tool_call_end|>")


KIMI_THINKING = marked("<think>" + "".join(KIMI_MARKS), *KIMI_MARKS, "<think>", "</think>", special=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<think>Use it.</think>I look.{OSLO}", None),
        (f"<think>Use it.{OSLO}", None),
        (f"<think>Use it.<|tool_calls_section_begin|>{OSLO}<|tool_calls_section_end|>", None),
        ("<think>Use it.<|tool_call_begin|>x", "<think>Use it.<|tool_call_begin|>"),
        ("<think>Use it.", None),
    ],
)
def test_a_call_of_kimis_may_end_its_thoughts_and_is_held_then_too(text: str, expected: str | None) -> None:
    assert accepted(KIMI_THINKING, text) == (expected or f"{text}.")
    begun = text.removeprefix("<think>")
    assert accepted(KIMI_THINKING, begun, "hi<think>") == ((expected or f"{text}.").removeprefix("<think>"))


GEMMA = marked(
    "<|tool_call>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", special=True
)
BEGUN = "<|tool_call>call:"
CITY = 'city:<|"|>Oslo, "{N}" <|"|>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('Hello call:x{ <|"|> {a:1}', None),
        (f"I look.{BEGUN}weather{{{CITY},days:3,exact:false}}<tool_call|>", None),
        (f"{BEGUN}weather_now{{}}<tool_call|>{BEGUN}weather_now{{}}<tool_call|>", None),
        (f"{BEGUN}weather{{days: 3, {CITY}}}<tool_call|>Done", None),
        (BEGUN + 'weather{city:<|"|><|channel><tool_call|><|"|>}<tool_call|>', None),
        (BEGUN + 'get-any.v1{x:[1,-2.5e-3,{a:None,b c:<|"|>t<|"|>}],y:true}<tool_call|>', None),
        (f"<|channel>thought\n{BEGUN}no<channel|>{BEGUN}weather_now{{}}<tool_call|>", None),
        (f"{BEGUN}forecast{{", BEGUN),
        (f"{BEGUN}weather{{}}", f"{BEGUN}weather{{"),
        (f"{BEGUN}weather{{days:0", f"{BEGUN}weather{{days:"),
        (f"{BEGUN}weather{{days:3}}", f"{BEGUN}weather{{days:3"),
        (f"{BEGUN}weather{{{CITY},city", f"{BEGUN}weather{{{CITY},"),
        (f"{BEGUN}weather{{city:Oslo", f"{BEGUN}weather{{city:"),
        (f"{BEGUN}weather{{year:", f"{BEGUN}weather{{"),
    ],
)  # fmt: skip
def test_calls_of_gemma_are_those_of_the_tools(text: str, expected: str | None) -> None:
    assert accepted(GEMMA, text) == (expected or f"{text}.")
    if expected is None and "thought" not in text:
        assert len(calls_in("gemma", text)) == text.count("}<tool_call|>")


DEEP = {
    "type": "object", "additionalProperties": False, "required": ["tree"],
    "properties": {
        "tree": {"$ref": "#/$defs/node"}, "unit": {"type": ["string", "null"], "enum": ["C", "a b", None, 2]},
        "lines": {"type": "array", "items": {"type": "object", "required": ["n"], "properties": {
            "n": {"type": "integer", "maximum": 9}, "t.t": {"type": ["string", "null"]}}}},
        "free": {"anyOf": [{"type": "string"}]}, "lost": {"$ref": "#/$defs/none"}, "two": {"const": 2},
    },
    "$defs": {"node": {"type": "object", "additionalProperties": False, "properties": {
        "name": {"type": "string"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}},
}  # fmt: skip
TREE = 'tree:{name:<|"|>a<|"|>,kids:[{name:<|"|>b<|"|>},{kids:[]},{}]}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TREE, None), (f'unit:<|"|>a b<|"|>,{TREE}', None), (f"unit:None,{TREE},two:2,unit:2", None),
        (f'{TREE},lines:[{{n:9,t.t:<|"|>x<|"|>,more:[{{}}]}},{{t.t:null}}]', None),
        (f'{TREE},free:[1,<|"|>a<|"|>],lost:{{b:{{}}}}', None),
        ("unit:C", "unit:"), ('unit:<|"|>D', 'unit:<|"|>'), ("tree:{x", "tree:{"), ("tree:[", "tree:"),
        ("tree:{kids:[3", "tree:{kids:["), (f"{TREE},lines:[{{n:10", f"{TREE},lines:[{{n:1"),
        (f"{TREE},lines:[{{n:<", f"{TREE},lines:[{{n:"), (f"{TREE},two:3", f"{TREE},two:"),
    ],
)  # fmt: skip
def test_values_of_gemma_are_those_of_their_schema(text: str, expected: str | None) -> None:
    tool = Tool("f", json.dumps({"name": "f", "parameters": DEEP}))
    whole = f"{BEGUN}f{{{text}}}<tool_call|>"
    assert accepted(GEMMA, whole, tools=[tool]) == (f"{BEGUN}f{{{expected}" if expected else f"{whole}.")


COHERE = marked(
    "<|START_ACTION|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>"
)
GIGACHAT = marked("<|role_sep|><|function_call|>", "<|function_call|>", special=True)
ACTION = '{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo"}}'
NOTHING = '{"tool_name": "weather_now", "parameters": {}}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello [", None),
        ("<|START_THINKING|><|START_ACTION|>x<|END_THINKING|>"
         f"<|START_ACTION|>[\n    {ACTION}\n]<|END_ACTION|>", None),
        (f"<|START_ACTION|>[{ACTION},\n    {NOTHING}]<|END_ACTION|>", None),
        ("<|START_ACTION|>[]", "<|START_ACTION|>["),
        ('<|START_ACTION|>[{"tool_name": "forecast', '<|START_ACTION|>[{"tool_name": "'),
        (f"<|START_ACTION|>[{ACTION[:-17]}{{}}", f"<|START_ACTION|>[{ACTION[:-17]}{{"),
    ],
)  # fmt: skip
def test_calls_of_cohere_are_those_of_the_tools(text: str, expected: str | None) -> None:
    assert accepted(COHERE, text) == (expected or f"{text}.")
    if expected is None and "THINKING" not in text:
        assert len(calls_in("actions", text)) == text.count("tool_name")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello {", None),
        ('I look.<|function_call|>{"name": "weather", "arguments": {"city": "Oslo"}}', None),
        ('<|function_call|>{"name": "forecast', '<|function_call|>{"name": "'),
        ('<|function_call|>{"name": "weather", "arguments": {}',
         '<|function_call|>{"name": "weather", "arguments": {'),
    ],
)  # fmt: skip
def test_calls_of_gigachat_are_those_of_the_tools(text: str, expected: str | None) -> None:
    assert accepted(GIGACHAT, text) == (expected or f"{text}.")
    if expected is None:
        assert len(calls_in("gigachat", text)) == text.count("<|function_call|>")


INVOKES = marked("<minimax:tool_call><invoke>", "<minimax:tool_call>", "</minimax:tool_call>")
OSLO_INVOKED = '<invoke name="weather">\n<parameter name="city">{}</parameter>\n</invoke>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello <invoke>", None),
        (f"\n<minimax:tool_call>\n{OSLO_INVOKED.format(CODE)}\n</minimax:tool_call>", None),
        ('<minimax:tool_call><invoke name="weather"><parameter name="days">3</parameter>'
         '<parameter name="exact">true</parameter><parameter name="city"></parameter></invoke>'
         "</minimax:tool_call> Done", None),
        (f'<minimax:tool_call>\n{OSLO_INVOKED.format("Oslo")}\n<invoke name="weather_now">\n</invoke>\n'
         "</minimax:tool_call>", None),
        ('<minimax:tool_call><invoke name="get-any.v1"><parameter name="x">[1]</parameter></invoke>'
         "</minimax:tool_call>", None),
        ('<minimax:tool_call><invoke name="forecast', '<minimax:tool_call><invoke name="'),
        ('<minimax:tool_call><invoke name="weather"></invoke', '<minimax:tool_call><invoke name="weather"><'),
        ('<minimax:tool_call><invoke name="weather"><parameter name="days">x',
         '<minimax:tool_call><invoke name="weather"><parameter name="days">'),
    ],
)  # fmt: skip
def test_calls_of_minimax_are_those_of_the_tools(text: str, expected: str | None) -> None:
    assert accepted(INVOKES, text) == (expected or f"{text}.")
    if expected is None:
        assert len(calls_in("invokes", text)) == text.count("</invoke>")


LFM = marked("", "<|tool_call_start|>", "<|tool_call_end|>", special=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello [now()]", None),
        ("<|tool_call_start|>[weather(city='it's\n\"x\"', days=2), weather_now()]<|tool_call_end|>So", None),
        ("<|tool_call_start|>[weather_now()]<|tool_call_end|>", None),
        ("<|tool_call_start|>get-any.v1(x=[1, None])<|tool_call_end|>", None),
        ('<|tool_call_start|>[{"name": "weather_now", "arguments": {}}]<|tool_call_end|>', None),
        ("<|tool_call_start|>[forecast(", "<|tool_call_start|>["),
        ("<|tool_call_start|>Hi", "<|tool_call_start|>"),
        ("<|tool_call_start|>[weather(city='a", "<|tool_call_start|>[weather(city='a"),
    ],
)  # fmt: skip
def test_calls_of_lfm2_begin_with_the_name_of_a_tool(text: str, expected: str | None) -> None:
    assert accepted(LFM, text) == (expected or f"{text}.")
    if expected is None:
        calls = calls_in("python", text)
        assert len(calls) == ("<|tool_call_start|>" in text) + (", weather_now" in text)


WORDS = Tool("f", json.dumps({"name": "f", "parameters": {"type": "object", "properties": {
    "u": {"type": "string", "enum": ["C", 'a "é"']}, "any": {"enum": ["x", "</b>"]},
    "one": {"type": "string", "const": "k"},
}}}))  # fmt: skip


@pytest.mark.parametrize(
    ("tokenizer", "begun", "between", "end"),
    [
        (GLM, "<tool_call>f<arg_key>{}</arg_key><arg_value>", "", "</arg_value></tool_call>"),
        (SPELT, "<tool_call>f<arg_key>{}</arg_key><arg_value>", "", "</arg_value></tool_call>"),
        (marked("<tool_call><function=", "<tool_call>", "</tool_call>"),
         "<tool_call>\n<function=f>\n<parameter={}>", "\n", "</parameter>\n</function>\n</tool_call>"),
        (INVOKES, '<minimax:tool_call><invoke name="f"><parameter name="{}">', "",
         "</parameter></invoke></minimax:tool_call>"),
    ],
    ids=["tokens", "text", "tags", "invokes"],
)  # fmt: skip
def test_a_text_that_is_one_of_some_words_is_one_of_them(
    tokenizer: Any, begun: str, between: str, end: str
) -> None:
    for name, word, held in (
        ("u", "C", "C"), ("u", 'a "é"', 'a "é"'), ("u", "D", ""), ("u", "C C", "C"), ("one", "x", ""),
        ("one", "k", "k"), ("any", "whatever", "whatever"),
    ):  # fmt: skip
        opening = begun.format(name) + between
        expected = f"{opening}{word}{between}{end}." if held == word else opening + held
        assert accepted(tokenizer, f"{opening}{word}{between}{end}", tools=[WORDS]) == expected
