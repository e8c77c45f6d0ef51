"""OpenAI's Responses API, asked by OpenAI's own client: answers whole and in events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from api_rig import DEFAULTS, SECRET, Api, ScriptedEngine, event
from openai.types.responses import Response, ResponseStreamEvent

from localmoe.core.config import GenerationRequest
from localmoe.core.errors import BudgetError
from localmoe.core.stream import StreamEvent

WEATHER: Any = {
    "type": "function", "name": "weather", "description": "What it is like.", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}  # fmt: skip
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


def script(request: GenerationRequest) -> Iterator[StreamEvent]:
    """What the message says: texts between bars, one a step; what ends with … is cut; words in capitals
    fail."""
    failures = {"BUG": RuntimeError(SECRET), "MEMORY": BudgetError("No memory: give less.", budget_bytes=1)}
    *pieces, last = request.messages[-1].content.split("|")
    form = "forced" if request.must_call else "json" if request.tools else ""
    for number, piece in enumerate([*pieces, last]):
        if piece in failures:
            raise failures[piece]
        ended = None if number < len(pieces) else "length" if piece.endswith("…") else "stop"
        yield event(piece, ended, tokens=number + 1, tool_format="" if number else form)


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(script, opened=True)


def ask(client: openai.OpenAI, text: str, **more: Any) -> Any:
    """The answer, which is all that the client's types say."""
    answer = client.responses.create(model="scripted", input=text, **more)
    Response.model_validate(answer.to_dict(), strict=False)
    return answer


def stream(client: openai.OpenAI, text: str, **more: Any) -> list[Any]:
    """Events, each of which is all that its type says, with their numbers in order."""
    events: list[Any] = list(client.responses.create(model="scripted", input=text, stream=True, **more))
    for found in events:
        assert type(EVENT.validate_python(found.to_dict(), strict=False)) is type(found)
    assert [found.sequence_number for found in events] == list(range(len(events)))
    return events


def test_a_text_is_answered_with_a_message_and_numbers(client: openai.OpenAI) -> None:
    answer = ask(client, "It |is |so.", instructions="Be kind.", metadata={"a": "b"}, max_output_tokens=9)
    assert answer.output_text == "It is so." and answer.status == "completed" and answer.error is None
    assert answer.id.startswith("resp_") and answer.object == "response" and answer.model == "scripted"
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (3, 3, 6)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)
    assert answer.to_dict()["localmoe"]["new_tokens"] == 3
    assert (answer.instructions, answer.max_output_tokens, answer.metadata) == ("Be kind.", 9, {"a": "b"})
    assert (answer.temperature, answer.top_p) == (DEFAULTS.temperature, 1.0)
    assert (answer.tools, answer.tool_choice, answer.text.format.type) == ([], "auto", "text")


def test_thoughts_texts_and_calls_are_items_in_their_order(client: openai.OpenAI) -> None:
    answer = ask(client, f"<think>Use it.</think>I look.|{CALL}{CALL}|Done.", tools=[WEATHER])
    thought, said, first, second, more = answer.output
    assert (thought.type, thought.summary, thought.content[0].text) == ("reasoning", [], "Use it.")
    assert (said.content[0].text, more.content[0].text) == ("I look.", "Done.")
    assert (first.type, first.name, first.status) == ("function_call", "weather", "completed")
    assert json.loads(first.arguments) == {"city": "Paris"} and first.call_id != second.call_id
    assert answer.status == "completed" and [tool.to_dict() for tool in answer.tools] == [WEATHER]


@pytest.mark.parametrize(
    ("text", "kinds", "statuses"),
    [
        ("", ["message"], ["completed"]),
        (CALL, ["function_call"], ["completed"]),
        ("<think>only |thoughts…", ["reasoning"], ["incomplete"]),
        ("<think>a</think>b…", ["reasoning", "message"], ["completed", "incomplete"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_has_the_items_that_were_written_and_at_least_a_message(
    text: str, kinds: list[str], statuses: list[str], streamed: bool, client: openai.OpenAI
) -> None:
    more: Any = {"tools": [WEATHER]}
    answer = stream(client, text, **more)[-1].response if streamed else ask(client, text, **more)
    assert [item.type for item in answer.output] == kinds
    assert [item.status for item in answer.output] == statuses
    assert answer.status == statuses[-1]
    cut = answer.incomplete_details
    assert (cut and cut.reason) == ("max_output_tokens" if statuses[-1] == "incomplete" else None)


def test_a_stream_tells_of_each_item_from_its_beginning_to_its_end(client: openai.OpenAI) -> None:
    events = stream(client, f"<think>Use| it.</think>I |look.|{CALL}", tools=[WEATHER])
    text = ["content_part.added", "{0}.delta", "{0}.delta", "{0}.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    names = ["created", "in_progress"]
    for parts in (
        [part.format("reasoning_text") for part in text],
        [part.format("output_text") for part in text],
        call,
    ):
        names += ["output_item.added", *parts, "output_item.done"]
    assert [found.type for found in events] == [f"response.{name}" for name in [*names, "completed"]]
    begun, last = events[0].response, events[-1].response
    assert (begun.id, begun.status, begun.output, begun.usage) == (last.id, "in_progress", [], None)
    done = [found.item for found in events if found.type == "response.output_item.done"]
    assert done == last.output and last.output_text == "I look."
    whole = ask(client, f"<think>Use| it.</think>I |look.|{CALL}", tools=[WEATHER])
    ours, theirs = (
        [{**item.to_dict(), "id": "", "call_id": ""} for item in items] for items in (done, whole.output)
    )
    assert ours == theirs


def test_events_are_named_and_nothing_comes_behind_the_last(server: Api) -> None:
    answer = server.client.post("/v1/responses", json={"input": "é", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in answer.text.removesuffix("\n\n").split("\n\n")]
    for name, data in blocks:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert blocks[-1][0] == "event: response.completed"


def test_the_clients_own_reader_of_streams_takes_texts_calls_and_forms(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    class City(pydantic.BaseModel):
        city: str

    with client.responses.stream(
        model="scripted", input='<think>a</think>{"city"|: "Paris"}', text_format=City
    ) as events:
        final = events.get_final_response()
    assert final.output_parsed == City(city="Paris")
    assert final.text is not None and final.text.format is not None
    assert final.text.format.type == "json_schema" and final.text.format.name == "City"
    assert engine.last is not None and json.loads(engine.last.json_schema or "")["required"] == ["city"]
    with client.responses.stream(model="scripted", input=f"I look.{CALL}", tools=[WEATHER]) as events:
        deltas = [
            found.snapshot for found in events if found.type == "response.function_call_arguments.delta"
        ]
        said, call = events.get_final_response().output
    assert said.type == "message" and call.type == "function_call"
    assert deltas == [call.arguments] and call.parsed_arguments == {"city": "Paris"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_that_has_to_be_is_asked_for_and_comes_as_one(
    choice: Any, client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    text = '{"name": "weather", "arguments": {"city": "Paris"}}'
    answer = ask(client, text, tools=[WEATHER], tool_choice=choice)
    (call,) = answer.output
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    chosen = answer.tool_choice
    assert (chosen if isinstance(chosen, str) else chosen.to_dict()) == choice
    assert engine.last is not None and engine.last.must_call == ("weather",)


@pytest.mark.usefixtures("kept_waiting")
def test_the_client_waits_for_a_stream_that_is_kept_open(client: openai.OpenAI) -> None:
    with client.responses.stream(model="scripted", input="a|b") as events:
        assert events.get_final_response().output_text == "ab"


@pytest.mark.parametrize(
    ("failing", "sentence"),
    [("MEMORY", "No memory: give less."),
     ("BUG", "The server failed inside (RuntimeError): its log has the place.")],
)  # fmt: skip
def test_what_fails_behind_the_first_text_is_the_last_event(
    failing: str, sentence: str, client: openai.OpenAI
) -> None:
    last = stream(client, f"<think>a</think>b|c|{failing}")[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert (last.response.error.code, last.response.error.message) == ("server_error", sentence)
    assert [item.status for item in last.response.output] == ["completed", "incomplete"]
    assert last.response.output_text == "bc"
    with pytest.raises(openai.APIStatusError) as refused:
        stream(client, failing)
    assert sentence in refused.value.message
