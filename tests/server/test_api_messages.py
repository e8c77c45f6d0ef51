"""Anthropic's Messages API, asked by its own client: what the engine is told, and what comes back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message as Answer
from anthropic.types import RawMessageStreamEvent
from api_rig import SECRET, Api, ScriptedEngine, event, running, wait_for
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from localmoe.core.config import GenerationRequest
from localmoe.core.errors import ContextLengthError, TransferError
from localmoe.core.stats import GenerationCounters
from localmoe.core.stream import StreamEvent
from localmoe.core.tools import ToolCall
from localmoe.core.types import Message
from localmoe.server.deltas import Delta
from localmoe.server.errors import ApiError
from localmoe.server.messages_form import MessagesForm
from localmoe.server.settings import ServerSettings

PATH = "/v1/messages"
WEATHER: Any = {
    "name": "weather", "description": "What it is like.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}  # fmt: skip
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
HELLO: Any = [{"role": "user", "content": "hello"}]


def script(request: GenerationRequest) -> Iterator[StreamEvent]:
    """What the last message says, texts between bars, one a step; a word in capitals fails."""
    failures: dict[str, Exception] = {
        "TRANSFER": TransferError("A copy failed: try again."), "BUG": RuntimeError(SECRET),
        "LONG": ContextLengthError("It is long: shorten it.", num_tokens=70, context=64),
    }  # fmt: skip
    pieces = request.messages[-1].content.split("|")
    form = "forced" if request.must_call else "json" if request.tools else ""
    for i, piece in enumerate(pieces):
        if piece in failures:
            raise failures[piece]
        end = "length" if piece.endswith("…") else "stop"
        yield event(piece, end if i + 1 == len(pieces) else None, tokens=i + 1, tool_format="" if i else form)


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(script, opened=True)


@pytest.fixture
def client(server: Api) -> Iterator[anthropic.Anthropic]:
    base = f"http://127.0.0.1:{server.port}"
    with anthropic.Anthropic(base_url=base, api_key="-", max_retries=0) as made:
        yield made
    wait_for(lambda: server.desk.counts() == (0, 0))


def ask(client: anthropic.Anthropic, text: str = "hello", **more: Any) -> Answer:
    """The answer to a message that says so, or to `messages`; streamed, it is what the client builds."""
    given: Any = {
        "model": "scripted",
        "max_tokens": 50,
        "messages": [{"role": "user", "content": text}],
        **more,
    }
    if not given.pop("streamed", False):
        found: Answer = client.messages.create(**given)
        return found
    with client.messages.stream(**given) as stream:
        return stream.get_final_message()


def blocks(answer: Answer) -> list[dict[str, Any]]:
    return [block.model_dump(exclude_none=True) for block in answer.content]


def told(engine: ScriptedEngine) -> GenerationRequest:
    assert engine.last is not None
    return engine.last


@pytest.mark.parametrize("streamed", [False, True])
def test_thoughts_text_and_calls_come_as_blocks(
    streamed: bool, client: anthropic.Anthropic, engine: ScriptedEngine
) -> None:
    text = f"<think>Use |it.</think>I |look.\n{CALL}\n{CALL}"
    answer = ask(client, text, tools=[WEATHER], streamed=streamed)
    thoughts, said, first, second = blocks(answer)
    assert thoughts == {"type": "thinking", "thinking": "Use it.", "signature": ""}
    assert (said["type"], said["text"].strip()) == ("text", "I look.")
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "weather", {"city": "Paris"})
    assert first["id"] != second["id"]
    assert (answer.role, answer.model, answer.stop_reason) == ("assistant", "scripted", "tool_use")
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.cache_read_input_tokens) == (3, 3, 0)
    (tool,) = told(engine).tools
    assert tool.as_dict()["function"] == {
        "name": "weather", "description": "What it is like.", "parameters": WEATHER["input_schema"],
    }  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("text", "reason", "sequence"),
    [("a|b", "end_turn", None), ("a|b…", "max_tokens", None), ("a|b STOP c|d", "stop_sequence", "STOP")],
)
def test_why_an_answer_ended_is_said(
    text: str, reason: str, sequence: str | None, streamed: bool, client: anthropic.Anthropic
) -> None:
    answer = ask(client, text, stop_sequences=["STOP", "…!"], streamed=streamed)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)


def test_each_event_is_one_that_the_client_knows(server: Api) -> None:
    body = {"messages": [{"role": "user", "content": f"<think>a</think>b{CALL}"}], "tools": [WEATHER]}
    text = server.client.post(PATH, json={**body, "stream": True}).text
    known: Any = TypeAdapter(RawMessageStreamEvent)
    kinds = []
    for lines in text.strip().split("\n\n"):
        name, data = lines.split("\n")
        found = known.validate_json(data.removeprefix("data: "))
        kinds.append(found.type)
        assert name == f"event: {found.type}"
    begun, more, end = "content_block_start", "content_block_delta", "content_block_stop"
    blocks = [begun, more, more, end, *[begun, more, end] * 2]  # thoughts have their signature too
    assert kinds == ["message_start", *blocks, "message_delta", "message_stop"]
    whole = server.client.post(PATH, json=body).json()
    Answer.model_validate(whole, strict=True)
    assert whole["localmoe"]["prompt_tokens"] == 3


@pytest.mark.parametrize("behind", ["b", "", CALL])
def test_thoughts_in_a_stream_end_with_a_signature(behind: str, client: anthropic.Anthropic) -> None:
    """Some clients, as Vercel's AI SDK, drop thoughts without one from the next request."""
    with client.messages.stream(
        model="scripted", max_tokens=50, tools=[WEATHER],
        messages=[{"role": "user", "content": f"<think>a|b</think>{behind}"}],
    ) as stream:  # fmt: skip
        events = [one for one in stream if one.type in ("content_block_delta", "content_block_stop")]
    signed = [
        one for one in events if one.type == "content_block_delta" and one.delta.type == "signature_delta"
    ]
    (place,) = [events.index(one) for one in signed]
    assert signed[0].delta.signature == "" and signed[0].index == 0
    assert (events[place + 1].type, events[place + 1].index) == ("content_block_stop", 0)


def test_turns_are_told_as_templates_take_them(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Zürich"}}
    messages: Any = [
        {"role": "user", "content": "How is"},
        {"role": "user", "content": [{"type": "text", "text": "Zürich?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Use it.", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look.", "cache_control": {"type": "ephemeral"}}, call,
        ]},
        {"role": "user", "content": [
            {"type": "text", "text": "Briefly."},
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Sun."}]},
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "More."}},
        ]},
    ]  # fmt: skip
    system: Any = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=4f;"},
        {"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be brief."},
    ]  # fmt: skip
    ask(
        client,
        messages=messages,
        system=system,
        tools=[WEATHER, {"type": "web_search_20250305", "name": "w"}],
    )
    assert told(engine).messages == (
        Message("system", "Be kind.\nBe brief."),
        Message("user", "How is\nZürich?"),
        Message(
            "assistant",
            "I look.",
            (ToolCall("weather", '{"city": "Zürich"}', "toolu_1"),),
            thoughts="Use it.",
        ),
        Message("tool", "Sun.", tool_name="weather", tool_call_id="toolu_1"),
        Message("user", "Briefly.\nMore."),
    )
    assert [tool.name for tool in told(engine).tools] == ["weather"]


def test_an_answer_goes_back_as_it_came(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    answer = ask(client, f"<think>Use it.</think>{CALL}", tools=[WEATHER])
    call = answer.content[-1]
    assert call.type == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny.", "is_error": False}
    messages: Any = [
        {"role": "user", "content": "?"}, answer.to_param(), {"role": "user", "content": [result]}
    ]  # fmt: skip
    ask(client, messages=messages, tools=[WEATHER])
    assert told(engine).messages[1:] == (
        Message("assistant", "", (ToolCall("weather", '{"city": "Paris"}', call.id),), thoughts="Use it."),
        Message("tool", "Sunny.", tool_name="weather", tool_call_id=call.id),
    )


@pytest.mark.parametrize(("said", "continued"), [("The best is (", True), ("", False)])
def test_an_answer_that_is_begun_is_continued(
    said: str, continued: bool, client: anthropic.Anthropic, engine: ScriptedEngine
) -> None:
    begun: Any = [{"role": "assistant", "content": [{"type": "text", "text": said}] if said else []}]
    ask(client, messages=HELLO + begun)
    assert told(engine).continue_answer is continued
    assert told(engine).messages[-1].content == (said or "hello")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_with_half_of_a_pair_is_one_that_goes_back(
    streamed: bool, client: anthropic.Anthropic
) -> None:
    """As a model escapes what it does not end: no text in UTF-8 has it, and no prompt."""
    answer = ask(client, CALL.replace("Paris", "\\ud83d!"), tools=[WEATHER], streamed=streamed)
    (call,) = answer.content
    assert call.type == "tool_use" and call.input == {"city": "\ufffd!"}
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
    ask(client, messages=[*HELLO, answer.to_param(), {"role": "user", "content": [result]}], tools=[WEATHER])


def test_an_answer_that_is_begun_behind_thoughts_is_told_with_them(
    client: anthropic.Anthropic, engine: ScriptedEngine
) -> None:
    thoughts: Any = {"type": "thinking", "thinking": "Which?", "signature": ""}
    said: Any = {"type": "text", "text": "The best is ("}
    ask(client, messages=[*HELLO, {"role": "assistant", "content": [thoughts, said]}])
    assert told(engine).continue_answer
    assert told(engine).messages[-1] == Message("assistant", "The best is (", thoughts="Which?")


@pytest.mark.parametrize(
    ("choice", "must_call", "offered"),
    [
        ({"type": "auto"}, (), 1), ({"type": "any", "disable_parallel_tool_use": True}, ("weather",), 1),
        ({"type": "tool", "name": "weather"}, ("weather",), 1), ({"type": "none"}, (), 0),
    ],
)  # fmt: skip
def test_which_tool_has_to_be_called_is_told(
    choice: Any, must_call: tuple[str, ...], offered: int, client: anthropic.Anthropic, engine: ScriptedEngine
) -> None:
    text = '{"name": "weather", "arguments": {"city": "Paris"}}'
    answer = ask(client, text, tools=[WEATHER], tool_choice=choice)
    assert (told(engine).must_call, len(told(engine).tools)) == (must_call, offered)
    assert answer.content[0].type == ("tool_use" if must_call else "text")


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, "medium"), ({"thinking": {"type": "disabled"}}, "off"),
        ({"thinking": {"type": "adaptive"}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "on"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "high"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, "off"),
    ],
)  # fmt: skip
def test_how_long_it_thinks_is_told(fields: Any, thinking: str, engine: ScriptedEngine) -> None:
    with running(engine, ServerSettings(thinking="medium")) as api:
        assert api.client.post(PATH, json={"messages": HELLO, **fields}).status_code == 200
    assert told(engine).thinking == thinking


def test_sampling_schema_and_the_engines_own_fields_are_told(
    client: anthropic.Anthropic, engine: ScriptedEngine
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    ask(
        client, max_tokens=7,
        output_config={"format": {"type": "json_schema", "schema": schema}},
        extra_body={
            "temperature": 0.5, "top_p": 0.9, "top_k": 3, "draft_length": 2, "strict": True,
            "metadata": {"user_id": "u"}, "unknown": 1,
        },
    )  # fmt: skip
    request = told(engine)
    assert (request.max_new_tokens, request.draft_length, request.strict) == (7, 2, True)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.9, 3)
    assert request.json_schema is not None and json.loads(request.json_schema) == schema


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORM = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({"output_format": FORM}, SCHEMA), ({"output_format": None}, None),
        ({"output_config": {"format": FORM}, "output_format": {**FORM, "schema": {"type": "null"}}}, SCHEMA),
        ({"output_config": {"effort": "low"}, "output_format": FORM}, SCHEMA),
    ],
)  # fmt: skip
def test_the_older_name_of_a_schema_is_known_too(
    fields: dict[str, Any], schema: Any, server: Api, engine: ScriptedEngine
) -> None:
    """Clients of 2025 send it."""
    assert server.client.post(PATH, json={"messages": HELLO, **fields}).status_code == 200
    asked = told(engine).json_schema
    assert (None if asked is None else json.loads(asked)) == schema
    for choice in ("auto", "any"):
        body = {"messages": HELLO, **fields, "tools": [WEATHER], "tool_choice": {"type": choice}}
        assert server.client.post(PATH, json=body).status_code == 200
        request = told(engine)
        assert request.json_schema == (asked if choice == "auto" else None)
        assert bool(request.must_call) == (choice == "any") and request.tools


def test_names_that_clients_have_built_in_are_answered_by_the_loaded_model(
    client: anthropic.Anthropic,
) -> None:
    assert ask(client, model="claude-haiku-4-5").model == "scripted"
    with pytest.raises(anthropic.NotFoundError, match="the one that is loaded is 'scripted'"):
        ask(client, model="gpt-7")


def test_the_model_is_listed_as_the_client_takes_it(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.display_name, model.type) == ("scripted", "scripted", "model")
    assert abs(model.created_at.timestamp() - time.time()) < 600
    assert client.models.retrieve("scripted").id == "scripted"


def test_what_the_system_says_first_is_one_message_and_later_the_users(
    client: anthropic.Anthropic, engine: ScriptedEngine
) -> None:
    messages: Any = [
        {"role": "system", "content": "b"}, *HELLO, {"role": "assistant", "content": "c"},
        {"role": "system", "content": "d"}, {"role": "user", "content": "e"},
    ]  # fmt: skip
    ask(client, messages=messages, system="a")
    assert told(engine).messages == (
        Message("system", "a\n\nb"), Message("user", "hello"), Message("assistant", "c"),
        Message("user", "d\ne"),
    )  # fmt: skip


def test_tokens_of_a_prompt_are_counted_also_where_they_do_not_fit(client: anthropic.Anthropic) -> None:
    text = "x" * 5_000  # the context holds 64
    counted = client.messages.count_tokens(model="scripted", messages=[{"role": "user", "content": text}])
    assert counted.input_tokens == len(text)


@pytest.mark.parametrize("streamed", [False, True])
def test_of_a_prompt_that_is_too_long_clients_know_that_they_have_to_shorten_it(
    streamed: bool, client: anthropic.Anthropic
) -> None:
    words = r"It is long: shorten it\. prompt is too long: 70 tokens > 64 maximum"
    with pytest.raises(anthropic.BadRequestError, match=words):
        ask(client, "LONG", streamed=streamed)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": []}, "The field 'messages' is empty"),
        ({}, "The field 'messages' cannot be used: field required"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "it is no picture that can be read"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a",
                                                      "content": [IMAGE]}]}]}, "it is no picture"),
        ({"messages": [{"role": "user", "content": [{"type": "odd"}]}]}, 'a block of type "odd" is not read'),
        ({"messages": [{"role": "user", "content": [7]}]}, "a block of type null is not read here"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}, "a part has to be"),
        ({"messages": [{"role": "user", "content": 7}]}, "it has to be text or a list of blocks"),
        ({"messages": [{"role": "user", "content": []}]}, "Message 1 has no content: give a text."),
        ({"messages": [{"role": "tool", "content": "a"}]}, "The field 'messages.0.role' cannot be used"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}]},
         "of documents only plain text is read"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
         "Message 1 has thoughts, which no message of the role 'user' has."),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
         "Message 1 has results of tools, which no message of the role 'assistant' has."),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b c",
                                                           "input": {}}]}]}, "a tool needs a name without"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b",
                                                           "input": "{}"}]}]}, "'input' has to be an object"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "b", "input": {}}]}]},
         "needs a text as its 'id'"),
        ({"messages": [{"role": "system", "content": "a"}]}, "The field 'messages' has no question"),
        ({"messages": [{"role": "assistant", "content": []}]}, "The field 'messages' has no question"),
        ({"messages": HELLO, "system": 7}, "The field 'system' cannot be used"),
        ({"messages": HELLO, "tools": [{"name": "a"}]}, "The field 'tools.0.input_schema' cannot be used"),
        ({"messages": HELLO, "tools": [{"name": "a b", "input_schema": {}}]}, "a tool needs a name without"),
        ({"messages": HELLO, "tool_choice": {"type": "any"}}, "no tools are in 'tools'"),
        ({"messages": HELLO, "tools": [WEATHER], "tool_choice": {"type": "tool"}}, "it names no tool"),
        ({"messages": HELLO, "tools": [WEATHER], "tool_choice": {"type": "tool", "name": "b"}},
         "no tool 'b' is in 'tools'"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "So"}],
          "output_config": {"format": {"type": "json_schema", "schema": {}}}}, "does not go with an answer"),
        ({"messages": HELLO, "max_tokens": 0}, "give at least 1"),
        ({"messages": HELLO, "temperature": -1}, "emperature"),
        ({"messages": HELLO, "stop_sequences": [""]}, "none of them empty"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
def test_what_cannot_be_done_is_refused_in_one_sentence(path: str, body: Any, says: str, server: Api) -> None:
    error = refusal(server.client.post(path, json=body), 400, "invalid_request_error")
    assert says in error


def refusal(answer: httpx.Response, status: int, kind: str) -> str:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"} and body["error"]["type"] == kind
    message: str = body["error"]["message"]
    assert "\n" not in message and message.endswith(".") and "Traceback" not in message
    return message


def test_errors_have_anthropics_form_wherever_they_come_from(engine: ScriptedEngine) -> None:
    with running(engine, ServerSettings(api_key="secret")) as api:
        post = api.client.post
        body = {"messages": [{"role": "user", "content": "a"}]}
        refusal(post(PATH, json=body), 401, "authentication_error")
        refusal(post(PATH, json=body, headers={"x-api-key": "other"}), 401, "authentication_error")
        ours = {"x-api-key": "secret"}
        assert post(PATH, json=body, headers=ours).status_code == 200
        assert post(PATH, json=body, headers=ours | {"Authorization": "Bearer other"}).status_code == 200
        assert post(PATH, json=body, headers={"Authorization": "Bearer secret"}).status_code == 200
        refusal(post(f"{PATH}/nothing", json=body, headers=ours), 404, "not_found_error")
        refusal(post(PATH, content=b"{", headers=ours), 400, "invalid_request_error")
        large = json.dumps(body).encode() + b" " * (9 << 20)
        refusal(post(PATH, content=large, headers=ours), 413, "request_too_large")
        failed = {"messages": [{"role": "user", "content": "BUG"}]}
        assert SECRET not in refusal(post(PATH, json=failed, headers=ours), 500, "api_error")
        chat = post("/v1/messagesX", json=body, headers=ours).json()
        assert set(chat["error"]) == {"message", "type", "param", "code"}, "others have OpenAI's"


@pytest.mark.usefixtures("kept_waiting")
def test_the_client_waits_for_a_stream_that_is_kept_open(client: anthropic.Anthropic) -> None:
    assert blocks(ask(client, "a|b", streamed=True)) == [{"type": "text", "text": "ab"}]


def test_what_fails_after_the_first_text_is_an_event(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.APIStatusError, match="A copy failed: try again"):
        ask(client, "a|TRANSFER", streamed=True)


PARTS = st.lists(
    st.builds(
        lambda thoughts, text, calls: (thoughts, text, calls),
        st.sampled_from(["", "hm", "\n"]), st.sampled_from(["", "so", " "]), st.integers(0, 2),
    ),
    min_size=1, max_size=8,
)  # fmt: skip


@given(PARTS)
@settings(max_examples=150)
def test_a_stream_builds_the_message_that_is_sent_whole(parts: list[tuple[str, str, int]]) -> None:
    stats, deltas, called = GenerationCounters(prompt_tokens=9, reused_tokens=4).freeze(), [], 0
    for number, (thoughts, text, calls) in enumerate(parts):
        found = tuple(ToolCall("f", json.dumps({"n": called + i}), f"id{called + i}") for i in range(calls))
        finish: Any = None if number + 1 < len(parts) else "tool_calls" if called + calls else "stop"
        deltas.append(Delta(thoughts, text, finish, stats, number + 1, found, called))
        called += calls
    whole = MessagesForm("m").whole(deltas)
    form = MessagesForm("m")
    sent = form.opening(deltas[0]) + b"".join(map(form.piece, deltas)) + form.closing(deltas[-1])
    events = [json.loads(lines.split(b"\n")[1][6:]) for lines in sent.strip().split(b"\n\n")]
    built, pieces = events[0]["message"], dict[int, str]()
    for one in events[1:]:
        match one["type"]:
            case "content_block_start":
                assert one["index"] == len(built["content"]) and one["index"] - 1 in {-1, *pieces}
                built["content"].append(one["content_block"])
                pieces[one["index"]] = ""
            case "content_block_delta":
                (more,) = [value for key, value in one["delta"].items() if key != "type"]
                assert one["index"] == len(built["content"]) - 1
                pieces[one["index"]] += more
            case "message_delta":
                built |= one["delta"] | {"usage": one["usage"], "localmoe": one["localmoe"]}
    for index, block in enumerate(built["content"]):
        name = {"thinking": "thinking", "text": "text", "tool_use": "input"}[block["type"]]
        block[name] = json.loads(pieces[index]) if name == "input" else pieces[index]
    assert [one["type"] for one in events].count("content_block_stop") == len(built["content"])
    assert events[-1] == {"type": "message_stop"}
    assert built | {"id": ""} == whole | {"id": ""}
    assert built["usage"]["input_tokens"] + built["usage"]["cache_read_input_tokens"] == 9


def test_an_error_event_is_anthropics() -> None:
    data = MessagesForm("m").failure(ApiError(503, "The server ends: start it again."))
    assert data.startswith(b"event: error\n")
    body = json.loads(data.split(b"data: ")[1])
    assert body == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "The server ends: start it again."},
    }
