"""The API on the embedded model, over real sockets, by OpenAI's own client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import openai
import pytest
from api_rig import CHAT, TEXT, Api, running, wait_for
from support.engines import ask

from localmoe.cli.main import main
from localmoe.core.config import EngineConfig, SamplingConfig
from localmoe.core.stats import GenerationStats
from localmoe.core.types import Message
from localmoe.engine import Engine

STORY = "Tell me a story about a dog."
MESSAGES: Any = [{"role": "user", "content": STORY}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("demo", EngineConfig(device="cpu")) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def api(engine: Engine) -> Iterator[Api]:
    with running(engine) as found:
        yield found


@pytest.fixture(scope="module")
def client(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{api.port}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_an_answer_is_what_generate_writes(client: openai.OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "demo", "--prompt", STORY, "--json", "--max-new-tokens", "30", "--device", "cpu"]
    assert main(argv) == 0
    written = json.loads(capsys.readouterr().out)
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=30)
    choice, numbers = answer.choices[0], answer.usage
    assert (choice.message.content, choice.finish_reason) == (written["text"], "length")
    assert choice.message.role == "assistant" and answer.object == "chat.completion"
    assert numbers is not None and numbers.completion_tokens == len(written["token_ids"]) == 30
    assert numbers.prompt_tokens == len(written["prompt_token_ids"])
    assert numbers.total_tokens == numbers.prompt_tokens + 30
    assert answer.model_dump()["localmoe"].keys() == written["stats"].keys()


@pytest.mark.parametrize("draft_length", [0, 3])
def test_settings_of_a_request_reach_the_engine(
    draft_length: int, client: openai.OpenAI, engine: Engine
) -> None:
    sampling = SamplingConfig(
        temperature=0.9, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.1, seed=5
    )
    same = ask(
        engine, [Message("system", "Be kind."), Message("user", "hello"), Message("tool", "3\n4")], 12,
        sampling=sampling, draft_length=draft_length,
    )  # fmt: skip
    answer = client.chat.completions.create(
        model="demo",
        messages=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": t} for t in "34"]},
        ],
        max_completion_tokens=12,
        max_tokens=99,
        temperature=0.9,
        top_p=0.9,
        seed=5,
        extra_body={
            "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "draft_length": draft_length,
            "policy": "on-demand", "strict": True, "unknown": [1],
        },
    )  # fmt: skip
    assert answer.choices[0].message.content == same.text
    stats = answer.model_dump()["localmoe"]
    assert (stats["prompt_tokens"], stats["new_tokens"]) == (len(same.prompt), len(same.tokens))
    assert bool(stats["drafted"]) == bool(draft_length) and stats["prefetched"] == 0
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == len(same.prompt) - 1


def test_a_stream_has_the_same_text_in_chunks_and_ends_with_numbers(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=30)
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            max_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"draft_length": 2},  # at most three tokens a chunk, of 30
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].id != whole.id
    assert chunks[0].choices[0].delta.role == "assistant"
    *texts, last, numbers = chunks
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in texts) == whole.choices[0].message.content
    )
    assert len(texts) > 5 and all(chunk.choices[0].finish_reason is None for chunk in texts)
    assert last.choices[0].finish_reason == "length" and not last.choices[0].delta.content
    assert set(last.model_dump()["localmoe"]) == {field.name for field in fields(GenerationStats)}
    assert not numbers.choices and numbers.usage is not None and whole.usage is not None
    assert numbers.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_an_answer_ends_before_a_stop_string_wherever_pieces_end(client: openai.OpenAI, api: Api) -> None:
    whole = api.post(messages=MESSAGES, max_tokens=24).json()["choices"][0]["message"]["content"]
    for start, length in ((0, 3), (7, 1), (20, 9), (len(whole) - 5, 5)):
        stop = whole[start : start + length]
        expected = whole[: whole.index(stop)]
        stream = client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=24, stop=[stop, "never"], stream=True
        )
        choices = [chunk.choices[0] for chunk in stream]
        assert "".join(choice.delta.content or "" for choice in choices) == expected, stop
        assert choices[-1].finish_reason == "stop"
    assert api.desk.counts() == (0, 0)


@pytest.mark.parametrize("stop", ["o", "."])
def test_tokens_behind_a_stop_string_are_not_counted_whatever_is_drafted(stop: str, api: Api) -> None:
    question = {"messages": MESSAGES, "max_tokens": 24, "stop": stop}
    plain = api.post(**question, draft_length=0).json()  # a token a step
    *_, last, numbers = api.events(**question, draft_length=16, stream_options={"include_usage": True})
    assert last["choices"][0]["finish_reason"] == plain["choices"][0]["finish_reason"] == "stop"
    assert last["localmoe"]["new_tokens"] > numbers["usage"]["completion_tokens"]
    for usage in (plain["usage"], numbers["usage"]):
        del usage["prompt_tokens_details"]
    assert numbers["usage"] == plain["usage"]


def test_completions_go_on_from_text_or_tokens(client: openai.OpenAI, engine: Engine, api: Api) -> None:
    raw = ask(engine, "Once upon a", 16)
    for prompt in ("Once upon a", ["Once upon a"], raw.prompt, [raw.prompt]):
        answer = client.completions.create(model="demo", prompt=prompt)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (raw.text, "length")
        assert answer.object == "text_completion" and answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(raw.prompt), 16)
    chunks = list(client.completions.create(model="demo", prompt="Once upon a", max_tokens=5, stream=True))
    assert raw.text.startswith("".join(chunk.choices[0].text for chunk in chunks))
    assert chunks[-1].choices[0].finish_reason == "length"
    outside = api.post(TEXT, prompt=[10**6])
    assert outside.status_code == 400 and "vocabulary" in outside.json()["error"]["message"]


def test_tools_for_a_model_that_knows_none_are_refused(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "now"}}]
    asked: Any = [{"role": "user", "content": "hello"}]
    with pytest.raises(openai.BadRequestError, match="knows no tools"):
        client.chat.completions.create(model="demo", messages=asked, tools=tools)
    answer = client.chat.completions.create(
        model="demo", messages=asked, tools=tools, tool_choice="none", max_tokens=2
    )
    assert answer.choices[0].message.content


def test_an_answer_is_json_of_a_schema(client: openai.OpenAI, api: Api) -> None:
    schema = {
        "type": "object", "properties": {"pet": {"enum": ["dog", "fox"]}, "legs": {"enum": [4]}},
        "required": ["pet", "legs"], "additionalProperties": False,
    }  # fmt: skip
    form: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema, "strict": True}}
    for streamed in (False, True):
        answer: Any = client.chat.completions.create(
            model="demo", messages=MESSAGES, response_format=form, stream=streamed
        )
        parts = list(answer) if streamed else [answer]
        said = [part.choices[0].delta if streamed else part.choices[0].message for part in parts]
        found = json.loads("".join(piece.content or "" for piece in said))
        assert found["pet"] in ("dog", "fox") and found["legs"] == 4
        assert parts[-1].choices[0].finish_reason == "stop"
    form["json_schema"]["schema"] = {"type": "nonsense"}
    refused = api.post(response_format=form)
    assert refused.status_code == 400 and "Invalid type: nonsense" in refused.json()["error"]["message"]


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "localmoe"
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)


def test_what_the_engine_refuses_is_a_bad_request_with_the_numbers(client: openai.OpenAI, api: Api) -> None:
    with pytest.raises(openai.BadRequestError, match="1024") as refused:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "word " * 2000}])
    assert refused.value.code == "context_length_exceeded"
    unknown = api.post(CHAT, messages=MESSAGES, policy="magic")
    assert unknown.status_code == 400 and "moe-speq" in unknown.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_the_engine_at_once(stream: bool, api: Api) -> None:
    connection = api.begin(messages=MESSAGES, stream=stream, max_tokens=900, temperature=1.0, min_p=0.2)
    wait_for(lambda: api.desk.counts() == (1, 0))
    if stream:
        assert connection.recv(4096)
    connection.close()
    gone_at = time.monotonic()
    wait_for(lambda: api.desk.counts() == (0, 0))
    assert time.monotonic() - gone_at < 0.3
    assert api.post(messages=MESSAGES, max_tokens=2).status_code == 200
