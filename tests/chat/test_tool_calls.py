"""Calls of tools in the notations of models: told apart from text, however it comes in, and nothing lost."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_level

from localmoe.chat.gemma_values import read_gemma_object
from localmoe.chat.marked_text import MarkedText
from localmoe.chat.text_stream import text_stream
from localmoe.chat.tool_formats import FORMATS, find_format
from localmoe.chat.tool_stream import ToolStream
from localmoe.core.tools import Tool, ToolCall

WEATHER = Tool(
    "weather",
    json.dumps(
        {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"}, "zip": {"type": ["string", "null"]},
                    "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}, "places": {"type": "array"},
                    "exact": {"type": "boolean"},
                },
            },
        }
    ),
)  # fmt: skip
NOW = Tool("now", '{"name": "now"}')
PARIS = {"city": "Paris, 5", "days": 3, "exact": True, "places": [{"x": 1.5}, None], "zip": "75001"}
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis, 5\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n<parameter=exact>\ntrue\n</parameter>\n<parameter=places>\n[{\"x\": 1.5}, null]\n"
    "</parameter>\n<parameter=zip>\n75001\n</parameter>\n</function>\n</tool_call>"
)  # fmt: skip
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris, 5</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value><arg_key>exact</arg_key><arg_value>true</arg_value>\n<arg_key>places</arg_key>"
    '<arg_value>[{"x": 1.5}, null]</arg_value><arg_key>zip</arg_key><arg_value>75001</arg_value></tool_call>'
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris, 5</parameter>\n'
    '<parameter name="days">3</parameter><parameter name="exact">true</parameter>\n<parameter name="places">'
    '[{"x": 1.5}, null]</parameter>\n<parameter name="zip">75001</parameter>\n</invoke>\n</minimax:tool_call>'
)
GEMMA = (
    '<|tool_call>call:weather{city:<|"|>Paris, 5<|"|>,days:3,exact:true,places:[{x:1.5},null],'
    'zip:<|"|>75001<|"|>}<tool_call|>'
)
PYTHON = (
    '<|tool_call_start|>[weather(city="Paris, 5", days=3, exact=True, places=[{"x": 1.5}, None], '
    'zip="75001")]<|tool_call_end|>'
)
JSON = f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(PARIS)}}}\n</tool_call>'
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    f"{json.dumps(PARIS)}<|tool_call_end|><|tool_calls_section_end|>"
)
KIMI_NOW = "<|tool_call_begin|>functions.now:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
WRITTEN = {
    "functions": XML, "arguments": GLM, "invokes": MINIMAX, "gemma": GEMMA, "python": PYTHON, "json": JSON,
    "kimi": KIMI,
    "listed": f"<tool_calls>[\n{json.dumps({'name': 'weather', 'arguments': PARIS})}\n]</tool_calls>",
    "actions": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
    f"{json.dumps(PARIS)}}}\n]<|END_ACTION|>",
    "gigachat": f'<|function_call|>{json.dumps({"name": "weather", "arguments": PARIS})}',
    "mistral": f"[TOOL_CALLS]weather[ARGS]{json.dumps(PARIS)}",
}  # fmt: skip


def split(name: str, pieces: list[str], tools: tuple[Tool, ...] = (WEATHER, NOW)) -> tuple[str, list[Any]]:
    """Text and (name, arguments) of an answer that comes in pieces."""
    stream = ToolStream(FORMATS[name], tools)
    found = [part for piece in pieces for part in stream.add(piece)] + [*stream.finish()]
    calls = [part for part in found if isinstance(part, ToolCall)]
    assert all((call.name + call.arguments).encode() for call in calls)
    text = "".join(part for part in found if isinstance(part, str))
    return text, [(call.name, json.loads(call.arguments)) for call in calls]


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@settings(max_examples=25)
@given(places=st.lists(st.integers(0, 2000), max_size=12))
@pytest.mark.parametrize("name", FORMATS)
def test_a_call_is_found_however_its_text_comes_in(name: str, places: list[int]) -> None:
    text = f"I look. \n\n{WRITTEN[name]}\n"
    assert split(name, cut(text, places)) == ("I look.", [("weather", PARIS)])
    assert split(name, list(text)) == ("I look.", [("weather", PARIS)])


@pytest.mark.parametrize("name", FORMATS)
def test_calls_follow_each_other_and_text_may_stand_behind(name: str) -> None:
    text, calls = split(name, [f"{WRITTEN[name]}\n{WRITTEN[name]}"])
    assert (text, calls) == ("", [("weather", PARIS)] * 2)
    if FORMATS[name].frames[0][1]:  # else a block ends with the answer
        assert split(name, [f"{WRITTEN[name]} Done. \n"]) == (" Done.", [("weather", PARIS)])


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_ends_with_the_answer_instead_of_its_mark_counts(name: str) -> None:
    closing = FORMATS[name].frames[0][1]
    if name in ("functions", "kimi"):
        closing = ""  # its inner mark ends it as well
    begun = WRITTEN[name].removesuffix(closing).rstrip()
    assert split(name, [begun])[1] == [("weather", PARIS)]
    if closing or name in ("mistral", "gigachat"):  # but where it was cut, arguments may be missing
        stream = ToolStream(FORMATS[name], [WEATHER])
        found = [*stream.add(begun), *stream.finish(cut=True)]
        assert all(isinstance(part, str) for part in found) and "".join(map(str, found)) == begun


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("json", '<tool_call>{"name": "now"}</tool_call>', [("now", {})]),
        ("json", '<tool_call>[{"name": "now", "arguments": "{}"},'
         '{"name": "now", "parameters": {"a": 1}}]</tool_call>',
         [("now", {}), ("now", {"a": 1})]),
        ("json", '<tool_call>{"function": {"name": "now", "arguments":'
         '{"s": "a\nb </tool_call> c"}}}</tool_call>',
         [("now", {"s": "a\nb </tool_call> c"})]),
        ("json", '<tool_call>{"name": "now", "arguments": {"a": "\\ud83d", "b": "é"}}</tool_call>',
         [("now", {"a": "\ufffd", "b": "é"})]),
        ("functions", "<function=now>\n</function>", [("now", {})]),
        ("functions", "<tool_call>\n<function=now>\n<parameter=s>\n a\n\nb </parameter> c\n</parameter>\n"
         "</function>\n<function=weather>\n<parameter=days>\nmany\n</parameter>\n</function>\n</tool_call>",
         [("now", {"s": " a\n\nb </parameter> c"}), ("weather", {"days": "many"})]),
        ("functions", "<tool_call>\n<function=now>\n<parameter=a>\nNaN\n</parameter>\n<parameter=b>\n1e999\n"
         "</parameter>\n</function>\n</tool_call>", [("now", {"a": "NaN", "b": "1e999"})]),
        ("functions", "<tool_call>\n<function=weather>\n<parameter=exact>\nTrue\n</parameter>\n"
         "<parameter=city>\nNone\n</parameter>\n<parameter=days>\nNone\n</parameter>\n</function>\n</tool_call>",
         [("weather", {"exact": True, "city": "None", "days": None})]),
        ("arguments", "<tool_call>now<arg_key>a</arg_key><arg_value>[-Infinity]</arg_value></tool_call>",
         [("now", {"a": "[-Infinity]"})]),
        ("gemma", "<|tool_call>call:now{a:NaN,b:[1e999,2.5]}<tool_call|>",
         [("now", {"a": "NaN", "b": ["1e999", 2.5]})]),
        ("gemma", "<|tool_call>call:now{a:None,b:[True]}<tool_call|>", [("now", {"a": None, "b": [True]})]),
        ("arguments", "<tool_call>now\n</tool_call>", [("now", {})]),
        ("arguments", "<tool_call>weather<arg_key>unit</arg_key><arg_value>C</arg_value></tool_call>",
         [("weather", {"unit": "C"})]),
        ("python", "<|tool_call_start|>[now(), lib.now(a=-1, b=true, c=[null, {'k': false}])]"
         "<|tool_call_end|>",
         [("now", {}), ("lib.now", {"a": -1, "b": True, "c": [None, {"k": False}]})]),
        ("python", '<|tool_call_start|>[{"name": "now", "arguments": {}}]<|tool_call_end|>', [("now", {})]),
        ("python", "<|tool_call_start|>[now(from=-1, max-n=2, s='it's \n\"here\", isn't it'), "
         "get-any.v1(s='a, b'), now(s='print('hi')\\n')]<|tool_call_end|>",
         [("now", {"from": -1, "max-n": 2, "s": 'it\'s \n"here", isn\'t it'}),
          ("get-any.v1", {"s": "a, b"}), ("now", {"s": "print('hi')\n"})]),
        ("python", "<|tool_call_start|>[now(o={\"a\": ['it's', \"b\"], 'c': null}, l=[], "
         "s='''a\n'b'\n''')]<|tool_call_end|>",
         [("now", {"o": {"a": ["it's", "b"], "c": None}, "l": [], "s": "a\n'b'\n"})]),
        ("gemma", "<|tool_call>call:now{}<tool_call|><|tool_call>call:now{a:{b:[]},c:bare words}<tool_call|>",
         [("now", {}), ("now", {"a": {"b": []}, "c": "bare words"})]),
        ("kimi", f"<|tool_calls_section_begin|>{KIMI_NOW.format(3)}{KIMI_NOW.format(4)}"
         "<|tool_calls_section_end|>",
         [("now", {}), ("now", {})]),
        ("kimi", f"<|tool_calls_section_begin|>\n{KIMI_NOW.format(0)}\n<|tool_calls_section_end|>",
         [("now", {})]),
        ("kimi", KIMI_NOW.format(0), [("now", {})]),
        ("actions", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "now", "parameters": {}}, '
         '{"tool_call_id": "1", "tool_name": "now", "parameters": {"a": 1}}]<|END_ACTION|>',
         [("now", {}), ("now", {"a": 1})]),
        ("gigachat", 'function call<|role_sep|>\n{"name": "now", "arguments": {}}', [("now", {})]),
        ("kimi", '<|tool_call_begin|>lib.now<|tool_call_argument_begin|> {"t": "a<|tool_call_end|>b"}\n'
         "<|tool_call_end|>", [("lib.now", {"t": "a<|tool_call_end|>b"})]),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "a"}, '
         '{"name": "now", "arguments": {"a": 1}}]',
         [("now", {}), ("now", {"a": 1})]),
        ("mistral", '[TOOL_CALLS]now[CALL_ID]ab1[ARGS]{"t": "[TOOL"}[TOOL_CALLS]now[ARGS]{}',
         [("now", {"t": "[TOOL"}), ("now", {})]),
    ],
)  # fmt: skip
def test_other_forms_of_a_notation_are_read(name: str, text: str, calls: list[Any]) -> None:
    assert split(name, [text]) == ("", calls)
    assert split(name, list(text)) == ("", calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json", "a <tool_call>not JSON</tool_call> b"), ("json", "<tool_call>"), ("json", "x <tool_c"),
        ("json", '<tool_call>{"name": 3}</tool_call>'), ("json", '<tool_call>{"name": "a", "arguments": 1}'),
        ("json", "<tool_call>" + "[" * 100_000), ("json", " \n "),
        ("json", '<tool_call>{"arguments": {}}</tool_call>'),
        ("functions", "if a <function> b"), ("functions", "<tool_call>\n<function=now>\n<parameter=a>"),
        ("arguments", '<tool_call>{"name": "now"}</tool_call>'), ("arguments", "<tool_call>\n\n</tool_call>"),
        ("python", "<|tool_call_start|>now(1)<|tool_call_end|>"),
        ("python", "<|tool_call_start|>__import__('os').system(a=open('x'))<|tool_call_end|>"),
        *(("python", f"<|tool_call_start|>[now(a={value})]<|tool_call_end|>")
          for value in ("'a", "{'a' 1}", "{'a': 1", "[1 2]", "'a'b", "{1, 2}",
                        "b'x'", "{[1]: 2}", "{(1, 2): 3}", "1 + 2j", "...", "1e999", "x")),
        ("json", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>'),
        ("json", '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'),
        ("python", "<|tool_call_start|>" + "(" * 5000 + "<|tool_call_end|>"),
        ("gemma", "<|tool_call>call:now{a:<|\"|>b}<tool_call|>"),
        ("gemma", "<|tool_call>call:now{a}<tool_call|>"),
        ("gemma", "<|tool_call>call:now" + "{a:" * 500 + "<tool_call|>"), ("mistral", "[TOOL_CALLS]"),
        ("kimi", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("kimi", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>noon<|tool_call_end|>"),
        ("actions", "<|START_ACTION|>[]<|END_ACTION|>"), ("listed", "<tool_calls>[]</tool_calls>"),
        ("gigachat", "<|function_call|>now"), ("gigachat", "function call"),
        ("mistral", "[TOOL_CALLS]now{}"), ("invokes", "<minimax:tool_call></minimax:tool_call>"),
    ],
)  # fmt: skip
def test_what_is_no_call_stays_text(name: str, text: str) -> None:
    assert split(name, [text]) == (text, [])
    if len(text) < 1000:
        assert split(name, list(text)) == (text, [])


@settings(max_examples=60)
@given(
    parts=st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", "a ", " \n", JSON]), max_size=8),
    places=st.lists(st.integers(0, 1000), max_size=6),
)
@example(parts=["<tool_call>", JSON], places=[])
def test_nothing_is_lost_or_depends_on_the_pieces(parts: list[str], places: list[int]) -> None:
    text = "".join(parts)
    whole, calls = split("json", [text])
    assert split("json", cut(text, places)) == (whole, calls)
    assert len(calls) == parts.count(JSON)
    assert "".join(whole.split()) == "".join(text.replace(JSON, "").split())


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_characters="<|")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc_é", min_size=1), inner),
    max_leaves=6,
)


def as_gemma(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{as_gemma(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_gemma, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


@settings(max_examples=40)
@given(st.dictionaries(st.text("abc_é", min_size=1), values, max_size=4))
def test_gemma_s_objects_are_read_as_they_were_written(value: dict[str, Any]) -> None:
    assert read_gemma_object(as_gemma(value)) == value


@pytest.mark.parametrize("text", ["", "1", "[1]", "{a:1", "{a:1}b", "{a:1 b:2", '{<|"|>a<|"|>}'])
def test_what_is_no_object_of_gemma_s_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_gemma_object(text)


class Special:
    """The demo model's tokenizer, of which some tokens are special marks."""

    all_special_ids = (5, 6)
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    def __init__(self, template: Any, marks: dict[str, int]) -> None:
        self.chat_template, self._marks = template, marks

    def get_added_vocab(self) -> dict[str, int]:
        return self._marks

    def decode(self, tokens: list[int], **options: Any) -> str:
        kept = [token for token in tokens if token not in self.all_special_ids]
        return str(byte_level().decode(kept, **options))


def test_marks_that_decoding_drops_are_in_the_text_where_tools_may_be_called() -> None:
    tokenizer = Special("{% if tools %}<tool_call>{% endif %}", {"<tool_call>": 5, "</tool_call>": 6})
    assert find_format(tokenizer) == "json"
    ids = [5, *byte_level()('{"name": "now"} é', add_special_tokens=False)["input_ids"], 6]
    for name, text in (("", '{"name": "now"} é'), ("json", '<tool_call>{"name": "now"} é</tool_call>')):
        stream = text_stream(tokenizer, [1], name)
        assert isinstance(stream, MarkedText) == bool(name)
        assert "".join([*(stream.add([token]) for token in ids), stream.finish()]) == text


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, ""), ("{{ messages }}", ""), ("... <tool_call>{{ tool_call.function | tojson }}", "json"),
        ("<tool_call>\n<function=example>", "functions"), ("<tool_call>{name}<arg_key>", "arguments"),
        ({"default": "a", "tool_use": "[TOOL_CALLS]"}, "mistral"), ("<|tool_call>call:", "gemma"),
        ("a<|role_sep|>\n<|function_call|>", "gigachat"), ("<|START_ACTION|>[", "actions"),
        ("<tool_calls>[", "listed"), ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi"),
        ("<|tool_call_start|>", "python"),
        ("{%- set t = '<minimax:tool_call>' %}", "invokes"),
    ],
)  # fmt: skip
def test_a_template_shows_its_notation(template: Any, name: str) -> None:
    assert find_format(Special(template, {})) == name


def test_where_a_template_shows_no_calls_tokens_do() -> None:
    """As of LFM2, whose template only says which tools there are."""
    marks = {"<|tool_call_start|>": 5, "<|tool_call_end|>": 6}
    assert find_format(Special("List of tools: {{ tools }}", marks)) == "python"
    assert find_format(Special("<tool_call>{{ tools }}", marks)) == "json"
    assert find_format(Special("{{ tools }}", {"<tool_call>": 5, "</tool_call>": 6})) == ""


@pytest.mark.parametrize(
    ("name", "begins", "repeated"),
    [
        ("json", "<tool_call>", "</tool_call>"),
        ("functions", "<tool_call>", "</tool_call>\n<function=f>"),
        ("arguments", "<tool_call>f", "<arg_key>a</arg_key></tool_call>"),
        ("json", "", "<tool_call>x</tool_call>"),
        ("invokes", "<minimax:tool_call>", '<invoke name="f"></minimax:tool_call>'),
        ("gemma", "<|tool_call>call:f{", "<tool_call|>"),
        ("kimi", "<|tool_calls_section_begin|>", "<|tool_call_begin|>f:0<|tool_call_end|>"),
    ],
)
def test_marks_that_a_model_repeats_without_end_hold_nobody_up(name: str, begins: str, repeated: str) -> None:
    """As models do that have lost their way; each token of such an answer took longer than the one before."""
    stream, times = ToolStream(FORMATS[name], ()), 1500
    started = time.process_time()
    found = [part for text in [begins, *[repeated] * times] for part in stream.add(text)] + [*stream.finish()]
    assert time.process_time() - started < 10
    assert "".join(str(part) for part in found) == begins + repeated * times
