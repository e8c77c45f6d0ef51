"""What requests for responses ask of the engine, sent by OpenAI's own client, and what of them is refused."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from api_rig import DEFAULTS, Api, ScriptedEngine, refusal

from localmoe.core.config import GenerationRequest, SamplingConfig
from localmoe.core.tools import ToolCall
from localmoe.core.types import Message
from localmoe.server.errors import ApiError
from localmoe.server.fields import parse
from localmoe.server.responses_requests import responses_order
from localmoe.server.responses_schema import ResponsesRequest
from localmoe.server.settings import ServerSettings

PATH = "/v1/responses"
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
SCHEMA: Any = {"type": "json_schema", "name": "a", "schema": {"enum": [1]}, "strict": True}
USER = Message("user", "hello")


def call(call_id: str, name: str = "f") -> dict[str, str]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": '{"a": 1}'}


def result(call_id: str, output: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def says(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def thought(text: str) -> dict[str, Any]:
    parts = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": parts, "status": "completed"}


def called(*ids: str, content: str = "", thoughts: str = "") -> Message:
    calls = tuple(ToolCall("f", '{"a": 1}', call_id) for call_id in ids)
    return Message("assistant", content, calls, thoughts=thoughts)


def told(call_id: str, name: str = "f", content: str = "done") -> Message:
    return Message("tool", content, tool_name=name, tool_call_id=call_id)


@pytest.fixture
def client(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{api.port}/v1", api_key="-", max_retries=0) as made:
        yield made


def asked(client: openai.OpenAI, engine: ScriptedEngine, said: Any, **more: Any) -> GenerationRequest:
    client.responses.create(model="scripted", input=said, **more)
    assert engine.last is not None
    return engine.last


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hello", [USER]),
        ([says("user", "hello")], [USER]),
        ([{"type": "message", **says("user", [{"type": "input_text", "text": text} for text in "ab"])}],
         [Message("user", "a\nb")]),
        ([says("developer", "Be kind."), says("user", "hello")], [Message("system", "Be kind."), USER]),
        ([says("assistant", [{"type": "output_text", "text": "a", "annotations": []},
                             {"type": "refusal", "refusal": "No."}])], [Message("assistant", "a\nNo.")]),
        ([says("user", "hello"), thought("Use it."), says("assistant", "I look."), call("1"), call("2"),
          result("2"), result("1", [{"type": "input_text", "text": "a"}])],
         [USER, called("1", "2", content="I look.", thoughts="Use it."), told("2"), told("1", content="a")]),
        ([call("1"), says("assistant", "Wait."), result("1")],
         [called("1"), Message("assistant", "Wait."), told("1")]),
        ([call("1"), thought("And?"), call("2")], [called("1", "2", thoughts="And?")]),
        ([thought("a"), call("1"), thought("b"), says("assistant", "c")],
         [called("1", thoughts="a"), Message("assistant", "c", thoughts="b")]),
        ([thought("a"), call("1"), result("1"), thought("b"), call("2"), result("2")],
         [called("1", thoughts="a"), told("1"), called("2", thoughts="b"), told("2")]),
        ([says("assistant", "a"), says("assistant", "b")], [Message("assistant", "a\n\nb")]),
        ([says("user", "hello"), thought("cut"), says("user", "hello")],
         [USER, Message("assistant", "", thoughts="cut"), USER]),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, call("1")],
         [called("1", thoughts="s")]),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}, says("user", "hello")], [USER]),
        ([result("9")], [told("9", "")]),
        ([{**result("9"), "name": "g"}], [told("9", "g")]),
        ([{"type": "function_call", "call_id": "1", "name": "f", "arguments": ""}],
         [Message("assistant", "", (ToolCall("f", "{}", "1"),))]),
    ],
)  # fmt: skip
def test_items_are_messages_of_those_who_say_them(
    items: Any, messages: list[Message], client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    assert asked(client, engine, items).messages == tuple(messages)


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hello", [Message("system", "Be kind."), USER]),
        ([says("developer", "Be brief."), says("system", "Both."), says("user", "hello")],
         [Message("system", "Be kind.\n\nBe brief.\n\nBoth."), USER]),
        ([says("user", "hello"), says("system", "Now."), says("user", "hello")],
         [Message("system", "Be kind."), USER, Message("user", "Now."), USER]),
    ],
)  # fmt: skip
def test_instructions_come_first_and_with_what_the_system_says_there_as_one_and_later_as_the_users(
    items: Any, messages: list[Message], client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    assert asked(client, engine, items, instructions="Be kind.").messages == tuple(messages)


def test_an_answer_goes_back_as_it_came(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    said: list[Any] = [says("user", "<think>|Why?|</think>|So.")]
    answer = client.responses.create(model="scripted", input=said)
    request = asked(client, engine, [*said, *answer.output, says("user", "hello")])
    assert request.messages[1:] == (Message("assistant", "So.", thoughts="Why?"), USER)


def test_what_a_request_leaves_out_is_the_servers_and_what_it_says_is_its_own(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    assert asked(client, engine, "hello") == GenerationRequest(messages=(USER,), sampling=DEFAULTS)
    request = asked(
        client, engine, "hello", max_output_tokens=7, temperature=0, top_p=0.5, reasoning={"effort": "high"},
        extra_body={"seed": 2, "top_k": 3, "policy": "sp-moe", "draft_length": "auto", "strict": True},
        # ignored
        store=True, include=["reasoning.encrypted_content"], metadata={"a": "b"}, truncation="auto",
        parallel_tool_calls=False, user="me", service_tier="flex", prompt_cache_key="k",
        text={"verbosity": "low"}, previous_response_id=None, background=False, tools=[],
    )  # fmt: skip
    assert request == GenerationRequest(
        messages=(USER,), sampling=SamplingConfig(temperature=0, top_p=0.5, top_k=3, seed=2),
        max_new_tokens=7, draft_length="auto", policy="sp-moe", strict=True, thinking="high",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("form", "schema"),
    [(None, None), ({"type": "text"}, None), ({"type": "json_object"}, '{"type": "object"}'),
     (SCHEMA, '{"enum": [1]}')],
)  # fmt: skip
def test_the_form_of_an_answer_is_asked_for_and_repeated(
    form: Any, schema: str | None, client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    answer = client.responses.create(model="scripted", input="hello", text={"format": form})
    assert engine.last is not None and engine.last.json_schema == schema
    assert answer.text is not None and answer.text.format is not None
    assert answer.text.format.to_dict() == (form or {"type": "text"})
    for choice in ("auto", "required"):
        client.responses.create(
            model="scripted", input="hello", text={"format": form}, tools=[TOOL], tool_choice=choice
        )
        assert engine.last.json_schema == (schema if choice == "auto" else None)
        assert bool(engine.last.must_call) == (choice == "required") and engine.last.tools


def test_functions_are_offered_and_tools_of_other_types_left_out(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    others: list[Any] = [
        {"type": "web_search"}, {"type": "custom", "name": "patch"}, {"type": "local_shell"},
        {"type": "namespace", "name": "n", "description": "", "tools": [TOOL]},
    ]  # fmt: skip
    tools = [others[0], {"type": "function", "name": "g", "parameters": None}, *others[1:], TOOL]
    answer = client.responses.create(model="scripted", input="hello", tools=tools)
    assert engine.last is not None
    assert [tool.as_dict()["function"] for tool in engine.last.tools] == [
        {"name": "g", "description": "", "parameters": {"type": "object", "properties": {}}},
        {"name": "f", "description": "", "parameters": {"type": "object"}, "strict": True},
    ]
    assert [tool.to_dict()["name"] for tool in answer.tools] == ["g", "f"]
    assert asked(client, engine, "hello", tools=others).tools == ()
    assert (
        asked(client, engine, "hello", tools=[TOOL], tool_choice="none", text={"format": SCHEMA}).tools == ()
    )


CHOICES = '\'auto\', \'none\', \'required\' or {"type": "function", "name": "..."}'
STORED = "no answer is stored, so send the whole conversation as 'input'"


@pytest.mark.parametrize(
    ("body", "param", "sentence"),
    [
        ({"input": 3}, "input", "it has to be a text or a list of items"),
        ({"input": None}, "input", "it has to be a text or a list of items"),
        ({"input": []}, "input", "give a text or at least one message"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "says nothing"),
        ({"input": ["a"]}, "input.0", "an item has to be an object"),
        ({"input": [says("user", "a"), {"type": "web_search_call"}]}, "input.1",
         "items of type 'web_search_call' are not known"),
        ({"input": [{"type": ["message"]}]}, "input.0", "are not known"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "nothing is stored"),
        ({"input": [{"id": "msg_1"}]}, "input.0", "nothing is stored"),
        ({"input": [{"content": "a"}]}, "input.0.role", "field required"),
        ({"input": [says("tool", "a")]}, "input.0.role", "'user', 'assistant'"),
        ({"input": [{"role": "user"}]}, "input.0.content", "field required"),
        ({"input": [says("user", None)]}, "input.0.content", "it has to be text or a list of parts"),
        ({"input": [says("user", [{"type": "input_image", "image_url": "x"}])]}, "input.0.content",
         "no picture is fetched from elsewhere: send the picture itself, as a data URL"),
        ({"input": [says("user", [{"type": "input_file", "file_id": "x"}])]}, "input.0.content",
         'a part has to be {"type": "input_text", "text": "..."}'),
        ({"input": [says("assistant", [{"type": "refusal"}])]}, "input.0.content", "a part has to be"),
        ({"input": [result("1", [{"type": "input_image"}])]}, "input.0.output", "no picture is fetched"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input.0.output", "field required"),
        ({"input": [{"type": "function_call", "name": "a b"}]}, "input.0.name", "a tool needs a name"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "[]"}]}, "input.0.arguments",
         "the JSON of an object"),
        ({"input": [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}]}, "input.0.content",
         "a part has to be"),
        ({"instructions": [says("user", "a")]}, "instructions", "valid string"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", STORED),
        ({"conversation": {"id": "c"}}, "conversation", STORED),
        ({"prompt": {"id": "p"}}, "prompt", "no prompts are stored"),
        ({"background": True}, "background", "no answer is stored"),
        ({"tools": {}}, "tools", "valid array"), ({"tools": [{}]}, "tools.0", "a tool has to be"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "field required"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", "a tool needs a name"),
        ({"tools": [{"type": "mcp"}, {**TOOL, "parameters": 3}]}, "tools.1.parameters", "be an object"),
        ({"tools": [{**TOOL, "parameters": {"a": 1e999}}]}, "tools.0", "is not finite"),
        ({"tool_choice": 3}, "tool_choice", "it has to be"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice", CHOICES),
        ({"tool_choice": {"type": "web_search"}, "tools": [TOOL]}, "tool_choice", CHOICES),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice", CHOICES),
        ({"tool_choice": {"type": "custom", "name": "f"}, "tools": [TOOL]}, "tool_choice", CHOICES),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]}, "tool_choice",
         "no tool 'g' is"),
        ({"tool_choice": {"type": "function", "name": "f", "a": 1e999}, "tools": [TOOL]}, "tool_choice",
         "is not finite"),
        ({"tool_choice": "required"}, "tool_choice", "no tools are"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "its type has to be"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format",
         '{"type": "json_schema", "name": "...", "schema": {...}}'),
        ({"text": {"format": {**SCHEMA, "schema": {"const": 1e999}}}}, "text.format", "is not finite"),
        ({"text": "json"}, "text", "be an object"),
        ({"reasoning": {"effort": "a lot"}}, "reasoning.effort", "'none'"),
        ({"max_output_tokens": "9"}, "max_output_tokens", "valid integer"),
        ({"max_output_tokens": 0}, None, "at least 1"), ({"temperature": 99}, None, "out of range"),
    ],
)  # fmt: skip
def test_what_is_wrong_or_not_supported_is_named(
    body: dict[str, Any], param: str | None, sentence: str, api: Api, engine: ScriptedEngine
) -> None:
    content = json.dumps({"input": "hello", **body})
    error = refusal(api.client.post(PATH, content=content), 400)
    assert error["param"] == param and sentence in str(error["message"])
    assert engine.asked == []


def test_what_is_not_there_is_said(client: openai.OpenAI, api: Api) -> None:
    refusal(api.client.post(PATH, json={}), 400)
    assert refusal(api.client.post(PATH, json={"input": "a", "model": "gpt-5"}), 404)["param"] == "model"
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.retrieve("resp_1")
    assert f"POST {PATH}" in refused.value.message
    refusal(api.client.get(PATH), 405)


def test_a_clients_own_data_of_another_kind_is_ignored(api: Api) -> None:
    for data in ({"a": 1e999}, [1], 3, None):
        answer = api.client.post(PATH, content=json.dumps({"input": "hello", "metadata": data}))
        assert answer.status_code == 200 and answer.json()["metadata"] == {}


@pytest.mark.parametrize(
    "body",
    [
        {"input": [1] * 300_000}, {"input": "a", "tools": [1] * 300_000},
        {"input": [says("assistant", "a" * 150)] * 40_000}, {"input": [call("1")] * 40_000},
        {"input": [{"type": "reasoning", "content": "a" * 150}] * 40_000},
    ],
)  # fmt: skip
def test_however_many_items_there_are_nobody_else_waits_long(body: dict[str, object]) -> None:
    text, began = json.dumps(body).encode(), time.process_time()
    with contextlib.suppress(ApiError):
        responses_order(parse(ResponsesRequest, text), "m", ServerSettings())
    assert time.process_time() - began < 1
