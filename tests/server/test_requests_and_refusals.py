"""Real sockets, an engine whose steps are given: order, disconnects, errors, thoughts, who is let in."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from api_rig import CHAT, HELLO, TEXT, Api, ScriptedEngine, event, running, wait_for

from localmoe.core.config import GenerationRequest, SamplingConfig
from localmoe.core.errors import BudgetError, ConfigError, TransferError
from localmoe.core.stream import StreamEvent
from localmoe.core.types import Message
from localmoe.server.settings import MAX_BODY_BYTES, ServerSettings

DEFAULTS = SamplingConfig(temperature=0.5, top_k=7, seed=1)
SECRET = "what the user wrote"
Script = Callable[[GenerationRequest], Iterator[StreamEvent]]


def script(request: GenerationRequest) -> Iterator[StreamEvent]:
    """What the message says: texts between bars, one a step; a word in capitals fails."""
    failures: dict[str, Exception] = {
        "TRANSFER": TransferError("A copy failed: try again."), "BUG": RuntimeError(SECRET),
        "MEMORY": BudgetError("The GPU's memory ran out: give less.", budget_bytes=1),
    }  # fmt: skip
    pieces = request.messages[-1].content.split("|")
    for i, piece in enumerate(pieces):
        if piece in failures:
            raise failures[piece]
        yield event(
            piece, "stop" if i + 1 == len(pieces) else None, opens=piece.startswith("opened"), tokens=i + 1
        )


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(script)


@pytest.fixture(scope="module")
def server(engine: ScriptedEngine) -> Iterator[Api]:
    with running(engine, ServerSettings(max_waiting=2, sampling=DEFAULTS)) as api:
        yield api


@pytest.fixture
def api(server: Api, engine: ScriptedEngine) -> Iterator[Api]:
    engine.asked.clear()
    engine.left.clear()
    engine.open.set()
    yield server
    engine.open.set()
    wait_for(lambda: server.desk.counts() == (0, 0))


def test_what_a_request_leaves_out_is_the_servers_and_what_it_says_is_its_own(
    api: Api, engine: ScriptedEngine
) -> None:
    message = (Message("user", "hello"),)
    assert api.post(temperature=None, stop=None, n=1, draft_length=None).status_code == 200
    assert engine.last == GenerationRequest(messages=message, sampling=DEFAULTS)
    given = {"strict": True, "policy": "sp-moe", "draft_length": "auto", "max_tokens": 7, "temperature": 0}
    assert api.post(**given, seed=2, user="me", tools=[{}], tool_choice="auto").status_code == 200
    assert engine.last == GenerationRequest(
        messages=message, sampling=SamplingConfig(temperature=0, top_k=7, seed=2), max_new_tokens=7,
        draft_length="auto", policy="sp-moe", strict=True,
    )  # fmt: skip


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def refusal(answer: httpx.Response, status: int) -> dict[str, str | None]:
    """The error object, of OpenAI's shape, in one sentence."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert (
        "\n" not in error["message"]
        and "Traceback" not in error["message"]
        and error["message"].endswith(".")
    )
    return error


def test_requests_are_answered_in_order_and_refused_when_too_many_wait(
    api: Api, engine: ScriptedEngine
) -> None:
    engine.open.clear()
    answers: list[httpx.Response] = []
    threads = []
    for i in range(3):
        threads.append(
            threading.Thread(target=lambda i=i: answers.append(api.post(messages=says(f"answer {i}"))))
        )
        threads[-1].start()
        wait_for(lambda i=i: api.desk.counts() == (1, i))
    refused = api.post()
    assert refusal(refused, 503)["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
    health = api.client.get("/health").json()  # the event loop is free while the engine works
    assert (health["running"], health["waiting"]) == (1, 2)
    engine.open.set()
    for thread in threads:
        thread.join()
    texts = ["answer 0", "answer 1", "answer 2"]
    assert engine.asked == texts
    assert sorted(answer.json()["choices"][0]["message"]["content"] for answer in answers) == texts


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_its_answer_or_leaves_the_row(
    stream: bool, api: Api, engine: ScriptedEngine
) -> None:
    engine.open.clear()
    first = api.begin(messages=says("first"), stream=stream)
    wait_for(lambda: api.desk.counts() == (1, 0))
    second, third = (api.begin(messages=says(name), stream=stream) for name in ("second", "third"))
    wait_for(lambda: api.desk.counts() == (1, 2))
    second.close()
    wait_for(lambda: api.desk.counts() == (1, 1))
    first.close()
    gone_at = time.monotonic()
    wait_for(lambda: engine.left == ["first"])
    assert time.monotonic() - gone_at < 0.3
    engine.open.set()
    got = b""
    while b"third" not in got:
        got += third.recv(4096)
    third.close()
    assert engine.asked == ["first", "third"]


@pytest.mark.parametrize(
    ("text", "status", "sentence"),
    [
        ("TRANSFER", 500, "A copy failed: try again."),
        ("MEMORY", 503, "The GPU's memory ran out: give less."),
        ("BUG", 500, "The server failed inside (RuntimeError): its log has the place."),
    ],
)  # fmt: skip
def test_what_fails_is_told_in_one_sentence_and_the_next_is_answered(
    text: str, status: int, sentence: str, api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    assert refusal(api.post(messages=says(text)), status)["message"] == sentence
    assert refusal(api.post(messages=says(f"a|b|{text}")), status)["message"] == sentence
    assert refusal(api.post(messages=says(text), stream=True), status)["message"] == sentence
    events = api.events(messages=says(f"a|{text}"), stream_options={"include_usage": True})
    assert events[1]["choices"][0]["delta"] == {"content": "a"}
    assert [found["error"]["message"] for found in events if "error" in found] == [sentence]
    assert "error" in events[-1], "nothing comes after an error"
    assert api.post(messages=says("well")).json()["choices"][0]["finish_reason"] == "stop"
    assert bool(caplog.records) == (text == "BUG")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        "<think>|I thi|nk </|thi|nk>|\n\nTh|us| END|more",
        "opened think </think>|Thus END more",
        "<think>END</think>Thus END",
    ],
)
def test_thoughts_have_a_field_of_their_own_and_stop_strings_are_of_the_answer(
    text: str, stream: bool, api: Api
) -> None:
    if stream:
        deltas = [found["choices"][0] for found in api.events(messages=says(text), stop="END")]
        got = [
            "".join(delta["delta"].get(key, "") for delta in deltas)
            for key in ("reasoning_content", "content")
        ]
        finish = deltas[-1]["finish_reason"]
    else:
        choice = api.post(messages=says(text), stop="END").json()["choices"][0]
        got, finish = (
            [choice["message"][key] for key in ("reasoning_content", "content")],
            choice["finish_reason"],
        )
    assert (got[1], finish) == ("Thus ", "stop")
    assert "think>" not in got[0] and got[0] in ("I think", "opened think", "END")


def test_a_stop_string_ends_the_engines_work_and_other_text_is_held_back_no_longer_than_needed(
    api: Api, engine: ScriptedEngine
) -> None:
    texts = [
        found["choices"][0]["delta"].get("content")
        for found in api.events(messages=says("ab|S|b|ST|OP|never"), stop=["STOP"])
    ]
    assert texts == ["", "ab", "Sb", None]
    assert api.events(messages=says("a|ST"), stop="STOP")[-2]["choices"][0]["delta"] == {"content": "ST"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": "hello"}, "messages"), ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
        ({"temperature": "hot"}, "temperature"), ({"temperature": True}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"), ({"max_tokens": "9"}, "max_tokens"),
        ({"stream": "yes"}, "stream"), ({"stop": [""]}, "stop"), ({"stop": ["a"] * 5}, "stop"),
        ({"stop": 3}, "stop"), ({"n": 2}, "n"), ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"), ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"logprobs": True}, "logprobs"), ({"response_format": {"type": "json_object"}}, "response_format"),
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
    refusal(api.client.get(CHAT), 405)


def test_small_answers_on_an_open_connection_are_sent_at_once(api: Api) -> None:
    times_s = [api.client.get("/v1/models").elapsed.total_seconds() for _ in range(6)]
    assert min(times_s[1:]) < 0.03  # 0.04 s at least where each waits for the client to confirm the last


def test_a_request_has_a_largest_size(api: Api) -> None:
    half = b" " * (MAX_BODY_BYTES // 2 + 1)
    refusal(api.client.post(CHAT, content=half * 2), 413)
    refusal(api.client.post(CHAT, content=iter([half, half])), 413)  # in chunks, of no declared size


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
        {"api_key": ""}, {"api_key": " a"}, {"max_waiting": -1}, {"cors": ("*",)}, {"cors": ("null",)},
        {"cors": ("localhost:3000",)}, {"cors": ("http://a.example/",)}, {"cors": ("http://[",)}, {"cors": ("http://A.example",)},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ServerSettings(**settings)
