"""Real sockets, an engine whose steps are given: what is asked, order, disconnects, errors, thoughts."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import httpx
import pytest
from api_rig import CHAT, DEFAULTS, HELLO, Api, ScriptedEngine, event, refusal, running, wait_for

from localmoe.core.config import GenerationRequest, SamplingConfig
from localmoe.core.types import Message
from localmoe.server import answers, serving
from localmoe.server.settings import ServerSettings


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_what_a_request_leaves_out_is_the_servers_and_what_it_says_is_its_own(
    api: Api, engine: ScriptedEngine
) -> None:
    message = (Message("user", "hello"),)
    assert api.post(temperature=None, stop=None, n=1, draft_length=None).status_code == 200
    assert engine.last == GenerationRequest(messages=message, sampling=DEFAULTS)
    given = {"strict": True, "policy": "sp-moe", "draft_length": "auto", "max_tokens": 7, "temperature": 0}
    assert api.post(**given, seed=2, user="me", tools=[], tool_choice="auto").status_code == 200
    assert engine.last == GenerationRequest(
        messages=message, sampling=SamplingConfig(temperature=0, top_k=7, seed=2), max_new_tokens=7,
        draft_length="auto", policy="sp-moe", strict=True,
    )  # fmt: skip


@pytest.mark.parametrize(("given", "held"), [(1e-8, 0.0), (9e-4, 0.0), (1e-3, 1e-3), (0, 0), (-0.0, 0)])
def test_a_temperature_of_next_to_nothing_is_none(
    given: float, held: float, api: Api, engine: ScriptedEngine
) -> None:
    """Ragas asks for 1e-8 where it wants the likeliest answer."""
    assert api.post(temperature=given).status_code == 200
    assert engine.last is not None and engine.last.sampling.temperature == held


@pytest.mark.parametrize(
    ("body", "thinking"),
    [
        ({}, "auto"), ({"reasoning_effort": None}, "auto"), ({"reasoning_effort": "none"}, "off"),
        ({"reasoning_effort": "minimal"}, "low"), ({"reasoning_effort": "medium"}, "medium"),
        ({"reasoning_effort": "xhigh"}, "high"), ({"chat_template_kwargs": {"other": 1}}, "auto"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "off"),
        ({"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "none"}, "on"),
    ],
)  # fmt: skip
def test_thoughts_are_chosen_as_clients_do_it(
    body: dict[str, object], thinking: str, api: Api, engine: ScriptedEngine
) -> None:
    assert api.post(**body).status_code == 200
    assert engine.last is not None and engine.last.thinking == thinking


def test_a_server_answers_where_the_system_gives_no_thread_to_prepare_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str, run: object) -> None:
        raise RuntimeError("no thread")

    monkeypatch.setattr(serving, "begin_thread", refuse)
    engine = ScriptedEngine(lambda request: iter([event("done", "stop")]), opened=True)
    with running(engine) as api:
        assert api.post().status_code == 200 and not engine.prepared.is_set()


def test_an_answer_that_was_begun_goes_on_if_that_is_asked_for(api: Api, engine: ScriptedEngine) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "So", "reasoning_content": "I see."}]
    for asked in (True, False, None):
        assert api.post(messages=begun, continue_final_message=asked).status_code == 200
        assert engine.last is not None and engine.last.continue_answer == bool(asked)
        assert engine.last.messages[-1] == Message("assistant", "So", thoughts="I see.")
    refused = api.post(continue_final_message=True)
    assert refused.status_code == 400 and "no answer to continue" in refused.json()["error"]["message"]
    held = api.post(messages=begun, continue_final_message=True, response_format={"type": "json_object"})
    assert held.status_code == 400 and "an answer to continue" in held.json()["error"]["message"]


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        (None, None), ({}, None), ({"type": "text"}, None), ({"type": "json_object"}, '{"type": "object"}'),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1]}, "strict": True}},
         '{"enum": [1]}'),
    ],
)  # fmt: skip
def test_the_form_of_an_answer_is_asked_for_as_openai_has_it(
    form: object, schema: str | None, api: Api, engine: ScriptedEngine
) -> None:
    assert api.post(response_format=form).status_code == 200
    assert engine.last is not None and engine.last.json_schema == schema
    tools = [{"type": "function", "function": {"name": name}} for name in "ab"]
    for choice in ("auto", "required", {"type": "function", "function": {"name": "b"}}, "none"):
        assert api.post(response_format=form, tools=tools, tool_choice=choice).status_code == 200
        has_to = choice not in ("auto", "none")
        assert engine.last.json_schema == (None if has_to else schema), "a call has a schema of its own"
        assert bool(engine.last.tools) == (choice != "none") and bool(engine.last.must_call) == has_to


def test_where_a_request_says_nothing_of_thoughts_the_servers_choice_holds(engine: ScriptedEngine) -> None:
    engine.open.set()
    with running(engine, ServerSettings(thinking="off")) as api:
        for body, thinking in (({}, "off"), ({"reasoning_effort": "high"}, "high")):
            assert api.post(**body).status_code == 200
            assert engine.last is not None and engine.last.thinking == thinking


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


def test_the_engine_prepares_for_what_comes_once_it_is_served_and_whenever_nobody_waits() -> None:
    engine = ScriptedEngine(lambda request: iter([event("done", "stop")]))
    with running(engine, ServerSettings(sampling=DEFAULTS)) as api:
        assert engine.captured == [DEFAULTS]
        assert engine.prepared.wait(10), "no agent waits for its tokenizer to be looked at"
        threads = [threading.Thread(target=api.post) for _ in range(2)]
        threads[0].start()
        wait_for(lambda: api.desk.counts() == (1, 0))
        threads[1].start()
        wait_for(lambda: api.desk.counts() == (1, 1))
        engine.open.set()
        for thread in threads:
            thread.join()
        wait_for(lambda: len(engine.captured) == 2)
        assert engine.captured == [DEFAULTS, None]  # between the two, one waited


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


def test_a_stream_that_has_to_wait_is_kept_open_and_then_goes_on(
    api: Api, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients give up what has said nothing for minutes; whoever reads events skips comments."""
    monkeypatch.setattr(answers, "QUIET_S", 0.03)
    engine.open.clear()
    first = api.begin(messages=says("first|answer"), stream=True)
    wait_for(lambda: api.desk.counts() == (1, 0))
    others = [api.begin(messages=says(text), stream=True) for text in ("second", "MEMORY")]
    got = [b"", b"", b""]
    for number, sock in enumerate((first, *others)):
        while got[number].count(b": waiting\n\n") < 2:
            got[number] += sock.recv(4096)
        assert got[number].startswith(b"HTTP/1.1 200 OK") and b"data:" not in got[number]
    engine.open.set()
    for number, sock in enumerate((first, *others)):
        while b"data: [DONE]" not in got[number]:
            got[number] += sock.recv(4096)
        sock.close()
    assert b'"content":"first"' in got[0] and b'"content":"second"' in got[1]
    assert b"The GPU's memory ran out: give less." in got[2], "its status was sent already"


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


@pytest.mark.parametrize("number", [1, 12, 63])
def test_a_list_of_stop_strings_may_be_as_long_as_editors_send_it(number: int, api: Api) -> None:
    """Continue sends the marks of a model's template and what begins a declaration in a language."""
    stops = [*(f"\nword{i} " for i in range(number)), "STOP"]
    choice = api.post(messages=says("a|b ST|OP|c"), stop=stops).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ab ", "stop")


def test_the_servers_end_says_nothing_of_where_it_waited_for_the_rest_of_a_request(
    engine: ScriptedEngine, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_GRACE_S", 0.2)
    with contextlib.ExitStack() as open_still, running(engine) as api:
        half = open_still.enter_context(socket.create_connection(("127.0.0.1", api.port), timeout=10))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1:{api.port}\r\nContent-Length: 500\r\n\r\n"
        half.sendall(head.encode() + b"{")
        assert api.client.get("/health").status_code == 200  # by then it has been read
    err = capfd.readouterr().err
    assert "Cancel 1 running task" in err and "Traceback" not in err
