"""Events of the Responses API against its whole answers, whatever comes in which order."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from localmoe.core.config import SamplingConfig
from localmoe.core.stats import GenerationCounters
from localmoe.core.tools import ToolCall
from localmoe.server.deltas import Delta
from localmoe.server.errors import ApiError
from localmoe.server.fields import parse
from localmoe.server.responses_form import ResponsesForm, responses_form
from localmoe.server.responses_schema import ResponsesRequest

STATS = GenerationCounters(prompt_tokens=3, new_tokens=5).freeze()
TEXTS = st.sampled_from(["", "", "a", " b\n", "é\u2028"])
CALLS = st.lists(
    st.builds(ToolCall, st.just("f"), st.sampled_from(["{}", '{"a": 1}']), st.just("x")), max_size=2
)


def delta(thoughts: str, text: str, calls: list[ToolCall], finish: Any = None) -> Delta:
    return Delta(thoughts, text, finish, STATS, 5, tuple(calls))


STEPS = st.lists(st.builds(delta, TEXTS, TEXTS, CALLS), max_size=6)
LAST = st.builds(delta, TEXTS, TEXTS, CALLS, st.sampled_from(["stop", "length", "tool_calls"]))


def form() -> ResponsesForm:
    return responses_form(parse(ResponsesRequest, b'{"input": "a"}'), SamplingConfig(), "m")


def events_of(data: bytes) -> list[dict[str, Any]]:
    lines = data.decode().split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def replayed(events: list[dict[str, Any]]) -> list[Any]:
    """The items that a client has who adds up what the events say; what is done is what was added up."""
    items: list[Any] = []
    for found in events:
        name, index = found["type"].removeprefix("response."), found.get("output_index")
        if name == "output_item.added":
            assert index == len(items) and all(item["status"] != "in_progress" for item in items)
            items.append(deepcopy(found["item"]))
            continue
        assert index == len(items) - 1
        item = items[index]
        assert found.get("item_id", item["id"]) == item["id"]
        if name == "content_part.added":
            item["content"].append(deepcopy(found["part"]))
        elif name == "function_call_arguments.delta":
            item["arguments"] += found["delta"]
        elif name.endswith("text.delta"):
            item["content"][found["content_index"]]["text"] += found["delta"]
        elif name == "content_part.done":
            assert item["content"][found["content_index"]] == found["part"]
        elif name == "output_item.done":
            assert item == {**found["item"], "status": "in_progress"}
            items[index] = found["item"]
        else:
            assert name.endswith(".done")
            assert found.get("text", found.get("arguments")) in (
                item["arguments"] if "arguments" in item else item["content"][0]["text"],
            )
    return items


def plain(output: Any) -> list[Any]:
    """Items as dicts without their ids, of which none is there twice."""
    items = [dict(item) for item in output]
    ids = [item.pop("id") for item in items]
    assert len(set(ids)) == len(ids)
    prefixes = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
    assert all(found.startswith(prefixes[item["type"]]) for found, item in zip(ids, items, strict=True))
    return items


@given(STEPS, LAST)
def test_events_add_up_to_the_whole_answer(steps: list[Delta], last: Delta) -> None:
    deltas, streaming = [*steps, last], form()
    data = streaming.opening(deltas[0]) + b"".join(map(streaming.piece, deltas)) + streaming.closing(last)
    events = events_of(data)
    for number, found in enumerate(events):
        assert found.pop("sequence_number") == number
    *_, final = events
    whole = cast(dict[str, Any], form().whole(deltas))
    assert replayed(events[2:-1]) == final["response"]["output"]
    for answer in (whole, response := final["response"]):
        answer["output"] = plain(answer["output"])
        for name in ("id", "created_at", "completed_at"):
            answer.pop(name)
    assert whole == response and final["type"] == f"response.{whole['status']}"
    said = "".join(step.text for step in deltas)
    assert said == "".join(i["content"][0]["text"] for i in whole["output"] if i["type"] == "message")
    assert all(i["status"] == "completed" for i in whole["output"][:-1])


@given(STEPS)
def test_an_answer_that_fails_has_what_was_written_of_it(steps: list[Delta]) -> None:
    streaming = form()
    begun = b"".join(map(streaming.piece, steps))
    *others, failed = events_of(streaming.failure(ApiError(500, "It failed.")))
    assert [found["type"] for found in others] == (
        [] if begun else ["response.created", "response.in_progress"]
    )
    assert failed["response"]["error"] == {"code": "server_error", "message": "It failed."}
    long = ApiError(400, "It is long.", code="context_length_exceeded", too_long=(9, 8))
    assert events_of(form().failure(long))[-1]["response"]["error"]["code"] == "context_length_exceeded"
    items = replayed(events_of(begun))
    if items and items[-1]["status"] == "in_progress":
        items[-1]["status"] = "incomplete"
    assert failed["response"]["output"] == items
