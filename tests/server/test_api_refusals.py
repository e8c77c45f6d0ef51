"""Requests that are refused, each in one sentence; who is let in; settings that make no sense."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import time

import pytest
from api_rig import CHAT, HELLO, TEXT, Api, ScriptedEngine, refusal, running

from localmoe.core.errors import ConfigError
from localmoe.server.completions_requests import chat_order
from localmoe.server.completions_schema import ChatRequest
from localmoe.server.errors import ApiError
from localmoe.server.fields import MAX_PARTS, parse
from localmoe.server.pictures import Said
from localmoe.server.settings import MAX_BODY_BYTES, MAX_TEXT_BYTES, ServerSettings


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": "hello"}, "messages"), ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}]},
         "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]},
         "messages.0.tool_calls.0.function.arguments"),
        ({"reasoning_effort": "a lot"}, "reasoning_effort"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"thinking": "on"}}, "chat_template_kwargs.thinking"),
        ({"tools": [{}]}, "tools.0.type"), ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]}, "tools.0.function"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}},
          "tools": [{"type": "function", "function": {"name": "a"}}]}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"), ({"tool_choice": []}, "tool_choice"),
        *(({"tools": [{"type": "function", "function": {"name": name}}]}, "tools.0.function")
          for name in ("a{b}", "<x>", "f}", "")),
        ({"tool_choice": "any"}, "tool_choice"), ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"temperature": "hot"}, "temperature"), ({"temperature": True}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"), ({"max_tokens": "9"}, "max_tokens"),
        ({"stream": "yes"}, "stream"), ({"stop": [""]}, "stop"), ({"stop": ["a"] * 65}, "stop"),
        ({"stop": 3}, "stop"), ({"n": 2}, "n"), ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"), ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"logprobs": True}, "logprobs"), ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"), ({"draft_length": "long"}, "draft_length"),
        ({"strict": 1}, "strict"), ({"temperature": -1}, None), ({"temperature": 1e999}, None),
        ({"top_p": 0}, None), ({"seed": -1}, None), ({"max_tokens": 0}, None),
        ({"max_completion_tokens": -1}, None), ({"draft_length": 65}, None),
        ({"repetition_penalty": 0}, None), ({"min_p": 2}, None),
    ],
)  # fmt: skip
def test_fields_that_are_wrong_or_not_supported_are_named(
    body: dict[str, object], param: str | None, api: Api, engine: ScriptedEngine
) -> None:
    content = json.dumps({"messages": HELLO, **body})
    assert refusal(api.client.post(CHAT, content=content), 400)["param"] == param
    assert engine.asked == []


@pytest.mark.parametrize("field", ["seed", "top_k"])
def test_the_largest_number_that_a_refusal_names_is_taken(field: str, api: Api) -> None:
    sentence = refusal(api.post(**{field: 2**64}), 400)["message"]
    largest = json.loads(str(sentence).removesuffix(".").split()[-1])
    assert api.post(**{field: largest}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"), ({"prompt": ["a", "b"]}, "prompt"), ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": []}, "prompt"), ({"prompt": {"a": 1}}, "prompt"), ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"), ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "logprobs": 0}, "logprobs"),
    ],
)  # fmt: skip
def test_completions_are_checked_too(body: dict[str, object], param: str, api: Api) -> None:
    assert refusal(api.post(TEXT, **body), 400)["param"] == param


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b'{"messages": "\\ud800"}']
)
def test_a_body_that_is_no_json_object_gets_one_sentence(body: bytes, api: Api) -> None:
    refusal(api.client.post(CHAT, content=body), 400)


def test_what_is_not_there_is_said(api: Api) -> None:
    assert refusal(api.post(model="gpt-4"), 404)["code"] == "model_not_found"
    refusal(api.client.get("/v1/models/gpt-4"), 404)
    refusal(api.client.get("/docs"), 404)
    wrong = api.client.get(CHAT)
    refusal(wrong, 405)
    assert wrong.headers["allow"] == "POST"


def test_what_is_read_can_be_asked_for_without_its_body(api: Api) -> None:
    for path in ("/health", "/v1/models", "/v1/models/scripted"):
        answer = api.client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"] == "application/json"
    assert api.client.head("/v1/models/gpt-4").status_code == 404


def test_a_slash_at_the_end_of_a_path_changes_nothing(api: Api) -> None:
    get = api.client.get
    assert get("/v1/models/").json() == get("/v1/models").json()
    assert get("/v1/models/scripted/").json() == get("/v1/models/scripted").json()


def test_small_answers_on_an_open_connection_are_sent_at_once(api: Api) -> None:
    times_s = [api.client.get("/v1/models").elapsed.total_seconds() for _ in range(6)]
    assert min(times_s[1:]) < 0.03  # 0.04 s at least where each waits for the client to confirm the last


@pytest.mark.slow
def test_a_connection_outlives_the_pause_of_a_client_that_asks_every_five_seconds(api: Api) -> None:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", api.port, timeout=10)) as connection:
        connection.connect()
        connection.auto_open = 0  # not a new one in its place
        for pause_s in (0, 5.5):
            time.sleep(pause_s)
            connection.request("GET", "/health")
            answer = connection.getresponse()
            assert (answer.status, json.loads(answer.read())["status"]) == (200, "ready")


def test_a_request_has_a_largest_size(api: Api) -> None:
    half = b" " * (MAX_BODY_BYTES // 2 + 1)
    refusal(api.client.post(CHAT, content=half * 2), 413)
    refusal(api.client.post(CHAT, content=iter([half, half])), 413)  # in chunks, of no declared size
    hello = json.dumps({"messages": HELLO}).encode()
    for filler in (b" " * MAX_TEXT_BYTES, b"," * MAX_TEXT_BYTES, b'"' * MAX_TEXT_BYTES):
        refusal(api.client.post(CHAT, content=hello + filler), 413)  # of text alone


@pytest.mark.parametrize("part", ['{"role":"user","content":""}', '{"role":"user","content":[{}]}', "[]"])
def test_a_request_has_a_most_of_parts(api: Api, part: str) -> None:
    some = MAX_PARTS // (part.count("{") + part.count("[")) + 1
    text = refusal(api.client.post(CHAT, content=f'{{"messages":[{",".join([part] * some)}]}}'), 400)
    assert "more than 50,000 lists and objects" in str(text["message"])


def test_what_a_message_says_has_as_many_brackets_as_it_likes() -> None:
    said = '\\"{[\\' * MAX_PARTS
    body = json.dumps({"messages": [{"role": "user", "content": said}, *HELLO]}).encode()
    assert parse(ChatRequest, body).messages[0].content == Said((said,))


PIXEL = f"data:image/gif;base64,{base64.b64encode(b'GIF89a' + bytes([1, 0, 1] + [0] * 20)).decode()}"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [1] * 300_000}, {"messages": HELLO, "tools": [1] * 300_000},
        {"messages": [{"role": "assistant", "tool_calls": [1] * 300_000}]},
        {"messages": HELLO, "logit_bias": {str(token): "a" for token in range(300_000)}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": PIXEL}] * 16_000}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": PIXEL}]}] * 10_000},
    ],
)  # fmt: skip
def test_what_is_wrong_300_000_times_costs_no_more_than_what_is_wrong_once(body: dict[str, object]) -> None:
    text, began = json.dumps(body).encode(), time.process_time()
    with contextlib.suppress(ApiError):
        chat_order(parse(ChatRequest, text), "m", ServerSettings())
    assert time.process_time() - began < 0.5


def test_other_names_and_pages_of_other_origins_are_refused(api: Api) -> None:
    get = api.client.get
    for host in (
        "evil.example",
        f"evil.example:{api.port}",
        "127.0.0.1",
        f"127.0.0.1:{api.port + 1}",
        f"0.0.0.0:{api.port}",
    ):
        refusal(get("/v1/models", headers={"host": host}), 403)
        refusal(get("/health", headers={"host": host}), 403)
    for host in (f"localhost:{api.port}", f"LOCALHOST:{api.port}", f"[::1]:{api.port}"):
        assert get("/v1/models", headers={"host": host}).status_code == 200
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{api.port}"):
        assert "--cors" in str(refusal(get("/v1/models", headers={"origin": origin}), 403)["message"])
    preflight = {"origin": "http://a.example", "access-control-request-method": "POST"}
    assert api.client.options(CHAT, headers=preflight).status_code == 403


def test_who_comes_through_a_tunnel_from_another_port_is_told_which_one_it_takes(api: Api) -> None:
    """As by ssh -L 9000:127.0.0.1:8080."""
    told = refusal(api.client.get("/v1/models", headers={"host": "127.0.0.1:9"}), 403)["message"]
    assert told is not None and "'127.0.0.1:9'" in told and "tunnel" in told
    named = told.partition("such as ")[2].partition(",")[0]
    assert api.client.get("/v1/models", headers={"host": named}).status_code == 200


@pytest.mark.parametrize("origin", ["null", "file://", "http://localhost:3000", "app://obsidian.md"])
def test_what_a_refused_page_is_told_to_start_the_server_with_lets_it_in(
    origin: str, api: Api, engine: ScriptedEngine
) -> None:
    """Pages of files and of sandboxes have no origin that --cors could name."""
    told = refusal(api.client.get("/v1/models", headers={"origin": origin}), 403)["message"]
    assert told is not None
    wanted = re.findall(r"--cors '?([^ ']+)", told)
    settings = ServerSettings("key" if "--api-key" in told else None, tuple(wanted))
    with running(engine, settings) as other:
        headers = {"origin": origin, "authorization": "Bearer key"}
        answer = other.client.get("/v1/models", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] in ("*", origin)


def test_a_key_and_the_origins_of_pages_are_what_lets_in(engine: ScriptedEngine) -> None:
    page = {"origin": "http://localhost:3000"}
    engine.open.set()
    with running(engine, ServerSettings("kéy", ("http://localhost:3000",))) as api:
        for header in (None, "Bearer", "Bearer key", "Basic kéy", "kéy", "Bearer kéyy"):
            headers = {} if header is None else {"authorization": header.encode()}
            answer = api.client.get("/v1/models", headers={**headers, **page})
            assert refusal(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["access-control-allow-origin"] == page["origin"]
        key = {"authorization": "Bearer kéy".encode()}
        assert api.client.post(CHAT, json={"messages": HELLO}, headers={**key, **page}).status_code == 200
        assert api.client.get("/health").status_code == 200
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        preflight = api.client.options(CHAT, headers={**page, **asks})
        assert preflight.status_code == 200 and "POST" in preflight.headers["access-control-allow-methods"]
        refusal(api.client.options(CHAT, headers={"origin": "http://evil.example", **asks}), 403)


@pytest.mark.parametrize(
    "settings",
    [
        {"api_key": ""}, {"api_key": " a"}, {"api_key": "a\udcff"}, {"api_key": "a\nb"}, {"api_key": "a\x7f"},
        {"max_waiting": -1}, {"cors": ("*",)}, {"cors": ("null",)},
        {"cors": ("localhost:3000",)}, {"cors": ("http://a.example/",)}, {"cors": ("http://[",)}, {"cors": ("http://A.example",)},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ServerSettings(**settings)
