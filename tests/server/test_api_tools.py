"""Tools over the API, asked for by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from api_rig import ScriptedEngine, event

from localmoe.core.config import GenerationRequest
from localmoe.core.stream import StreamEvent
from localmoe.core.tools import Tool, ToolCall
from localmoe.core.types import Message
from localmoe.server.deltas import write_deltas

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather", "description": "What it is like.", "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}  # fmt: skip
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def script(request: GenerationRequest) -> Iterator[StreamEvent]:
    """What the message says, a letter a step; calls in JSON where tools are offered."""
    *pieces, last = request.messages[-1].content or "none"
    form = "forced" if request.must_call else "json" if request.tools else ""
    for number, piece in enumerate(pieces):
        yield event(piece, tokens=number + 1, tool_format="" if number else form)
    yield event(last, "length" if last == "…" else "stop", tool_format="" if pieces else form)


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(script, opened=True)


def ask(client: openai.OpenAI, text: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="scripted", messages=messages, tools=[WEATHER], **more)


def test_a_call_comes_apart_from_thoughts_and_text(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    (choice,) = ask(client, f"<think>Use <tool_call>.</think>I look.\n{CALL}\n{CALL}").choices
    assert choice.finish_reason == "tool_calls"
    message = choice.message
    assert (message.content, message.reasoning_content) == ("I look.", "Use <tool_call>.")
    first, second = message.tool_calls
    assert (first.type, first.function.name) == ("function", "weather")
    assert json.loads(first.function.arguments) == {"city": "Paris"}
    assert first.id != second.id and len(first.id) == 9 and first.id.isalnum()
    assert engine.last is not None
    (tool,) = engine.last.tools
    assert tool.name == "weather" and tool.as_dict() == WEATHER


class City(pydantic.BaseModel):
    name: str


class Weather(pydantic.BaseModel):
    city: str


def test_a_type_for_the_result_goes_with_tools(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    tool: Any = openai.pydantic_function_tool(Weather)
    made = CALL.replace("weather", "Weather")
    for text, name, city in (('{"name": "Oslo"}', "Oslo", None), (made, None, "Paris")):
        messages: Any = [{"role": "user", "content": text}]
        message = client.chat.completions.parse(
            model="scripted", messages=messages, response_format=City, tools=[tool]
        ).choices[0].message  # fmt: skip
        found: Any = message.parsed
        assert (found and found.name) == name
        called: Any = [call.function.parsed_arguments for call in message.tool_calls or ()]
        assert [arguments.city for arguments in called] == ([city] if city else [])
        assert engine.last is not None and engine.last.tools
        assert json.loads(engine.last.json_schema or "")["properties"].keys() == {"name"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_that_has_to_be_is_asked_for_and_comes_as_one(
    choice: Any, streamed: bool, client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    text = '<think>{"a": 1}</think>\n{"name": "weather", "arguments": {"city": "Paris"}}'
    answer = ask(client, text, tool_choice=choice, stream=streamed)
    parts = [part.choices[0] for part in answer] if streamed else [answer.choices[0]]
    said = [part.delta if streamed else part.message for part in parts]
    (call,) = [call for piece in said for call in piece.tool_calls or ()]
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    assert not "".join(piece.content or "" for piece in said)
    assert parts[-1].finish_reason == "tool_calls"
    assert engine.last is not None and engine.last.must_call == ("weather",)


def test_a_call_that_was_cut_is_text_and_no_stop_ends_it(client: openai.OpenAI) -> None:
    (choice,) = ask(client, '{"name": "weather", "argu…', tool_choice="required", stop=["name"]).choices
    assert choice.finish_reason == "length" and not choice.message.tool_calls
    assert choice.message.content == '{"name": "weather", "argu…'
    (choice,) = ask(
        client, '{"name": "weather", "arguments": {}}', tool_choice="required", stop=["name"]
    ).choices
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1


def test_a_call_alone_has_no_content(client: openai.OpenAI) -> None:
    (choice,) = ask(client, CALL).choices
    assert choice.message.content is None and len(choice.message.tool_calls) == 1


def test_a_stream_has_whole_calls_with_their_numbers(client: openai.OpenAI) -> None:
    chunks = [chunk.choices[0] for chunk in ask(client, f"I look.\n{CALL}{CALL}", stream=True)]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [call.index for call in calls] == [0, 1] and len({call.id for call in calls}) == 2
    assert all(json.loads(call.function.arguments) == {"city": "Paris"} for call in calls)
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "I look."
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


@pytest.mark.parametrize(
    ("text", "more", "finish", "content"),
    [
        (CALL, {"tool_choice": "none"}, "stop", CALL),  # the model was told of no tools
        ("just text", {}, "stop", "just text"),
        ("<tool_call>{…", {}, "length", "<tool_call>{…"),  # cut short: what there is of it
        (f"a STOP {CALL}", {"stop": ["STOP"]}, "stop", "a "),
    ],
)
def test_where_no_tool_is_called_it_is_an_answer_like_any_other(
    text: str, more: Any, finish: str, content: str, client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    (choice,) = ask(client, text, **more).choices
    assert (choice.finish_reason, choice.message.content) == (finish, content)
    assert not choice.message.tool_calls
    assert engine.last is not None and bool(engine.last.tools) == ("tool_choice" not in more)


@pytest.mark.parametrize("kinds", [[{}], ["string", ["null"]], 3, None])
def test_a_parameter_of_no_known_type_ends_no_answer(kinds: Any, client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": kinds}}}
    odd: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    messages: Any = [{"role": "user", "content": CALL}]
    answer = client.chat.completions.create(model="scripted", messages=messages, tools=[odd])
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function" and json.loads(call.function.arguments) == {"city": "Paris"}


def test_a_call_without_arguments_may_have_an_empty_text(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": ""}}
    messages: Any = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "and?"}]
    client.chat.completions.create(model="scripted", messages=messages)
    assert engine.last is not None and engine.last.messages[0].tool_calls == (ToolCall("now", "{}", "a"),)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_results_go_back_with_the_names_of_what_was_called_and_the_thoughts_before_it(
    name: str, client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    (choice,) = ask(client, f"<think>Use it.</think>{CALL}").choices
    call = choice.message.tool_calls[0]
    answer = choice.message.model_dump(exclude_none=True)
    answer[name] = answer.pop("reasoning_content")
    messages: Any = [
        {"role": "user", "content": "How is Paris?"},
        answer,
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny."},
    ]
    client.chat.completions.create(model="scripted", messages=messages, tools=[WEATHER])
    assert engine.last is not None
    assert engine.last.messages == (
        Message("user", "How is Paris?"),
        Message("assistant", "", (ToolCall("weather", '{"city": "Paris"}', call.id),), thoughts="Use it."),
        Message("tool", "Sunny.", tool_name="weather", tool_call_id=call.id),
    )


@pytest.mark.parametrize("size", [1, 3, 7, 400])
@pytest.mark.parametrize("closing", ["", "</think>"])
def test_a_call_of_kimis_ends_thoughts_that_were_not(closing: str, size: int) -> None:
    """It writes so at times."""
    call = (
        f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{json.dumps({'city': 'Paris'})}"
    )
    text = f"<think>Use <|tool </b> {closing}"
    text += f"<|tool_calls_section_begin|>{call}<|tool_call_end|><|tool_calls_section_end|>"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    events = [event(piece, tool_format="" if at else "kimi") for at, piece in enumerate(pieces)]
    events.append(event("", "stop"))
    tool = Tool("weather", json.dumps(WEATHER["function"]))
    deltas = list(write_deltas(events, (), split_thoughts=True, tools=(tool,)))
    assert "".join(delta.thoughts for delta in deltas) == "Use <|tool </b>"
    (found,) = [call for delta in deltas for call in delta.calls]
    assert json.loads(found.arguments) == {"city": "Paris"} and deltas[-1].finish == "tool_calls"
    assert "".join(delta.text for delta in deltas) == ""


@pytest.mark.parametrize("size", [1, 3, 7, 400])
def test_a_call_before_a_stop_string_comes_whatever_pieces_the_text_comes_in(size: int) -> None:
    """A step that keeps drafts brings both at once."""
    text = f"I look.\n{CALL}\nObservation: none {CALL}"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    events = [event(piece, tool_format="" if at else "json") for at, piece in enumerate(pieces)]
    events.append(event("", "stop"))
    tool = Tool("weather", json.dumps(WEATHER["function"]))
    deltas = list(write_deltas(events, ("Observation:",), split_thoughts=True, tools=(tool,)))
    assert "".join(delta.text for delta in deltas).strip() == "I look."
    (call,) = [call for delta in deltas for call in delta.calls]
    assert json.loads(call.arguments) == {"city": "Paris"} and deltas[-1].finish == "tool_calls"
