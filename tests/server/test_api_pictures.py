"""Pictures in requests of all APIs, sent by OpenAI's and Anthropic's own clients: what the engine is told of
them, and what is refused."""

from __future__ import annotations

import base64
import io
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import PIL.Image
import pytest
from api_rig import CHAT, Api, ScriptedEngine, event, refusal, running
from hypothesis import given
from hypothesis import strategies as st

from localmoe.core.config import GenerationRequest
from localmoe.core.errors import ConfigError
from localmoe.core.stream import StreamEvent
from localmoe.core.tools import ToolCall
from localmoe.core.types import Image, Message
from localmoe.server import fields, pictures
from localmoe.server.desk import AnswerDesk
from localmoe.server.order import Order
from localmoe.server.pictures import MAX_PICTURES, PictureReader, Said, said
from localmoe.vision.image_file import MAX_IMAGE_BYTES

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PATHS = (CHAT, RESPONSES, MESSAGES)


def drawn(form: str = "PNG", color: int = 0) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (4, 3), (color, 0, 0)).save(file, form)
    return file.getvalue()


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


ONE, TWO, THREE = drawn(), drawn("JPEG"), drawn("WEBP")


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{coded(data)}"


def text(path: str, value: str) -> dict[str, Any]:
    return {"type": "input_text" if path == RESPONSES else "text", "text": value}


def picture(path: str, data: bytes | str) -> dict[str, Any]:
    """data: of a file, or what stands in its place."""
    if path == MESSAGES:
        found = coded(data) if isinstance(data, bytes) else data
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": found}}
    where = url(data) if isinstance(data, bytes) else f"data:image/png;base64,{data}"
    if path == CHAT:
        return {"type": "image_url", "image_url": {"url": where, "detail": "low"}}
    return {"type": "input_image", "image_url": where, "detail": "auto"}


def body(path: str, *parts: dict[str, Any], role: str = "user") -> dict[str, Any]:
    message = {"role": role, "content": list(parts)}
    if path == RESPONSES:
        return {"input": [message]}
    return {"messages": [message], "max_tokens": 9}


def told(engine: ScriptedEngine) -> tuple[Message, ...]:
    assert engine.last is not None
    return engine.last.messages


@pytest.fixture
def claude(api: Api) -> Iterator[anthropic.Anthropic]:
    base = f"http://127.0.0.1:{api.port}"
    with anthropic.Anthropic(base_url=base, api_key="-", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("path", PATHS)
def test_pictures_stand_between_the_lines_that_texts_are(path: str, api: Api, engine: ScriptedEngine) -> None:
    parts = [
        picture(path, ONE), text(path, "this"), text(path, "and"), picture(path, TWO), picture(path, THREE),
        text(path, "differ?"),
    ]  # fmt: skip
    answer = api.post(path, **body(path, *parts))
    assert answer.status_code == 200, answer.text
    images = Image(ONE, 0), Image(TWO, 8), Image(THREE, 8)
    assert told(engine) == (Message("user", "this\nand\ndiffer?", images=images),)
    assert api.post(path, **body(path, picture(path, ONE))).status_code == 200
    assert told(engine) == (Message("user", "", images=(Image(ONE),)),)


def test_openais_client_sends_pictures_to_chats(
    client: openai.OpenAI, api: Api, engine: ScriptedEngine
) -> None:
    shot: Any = {"id": "1", "type": "function", "function": {"name": "shoot", "arguments": "{}"}}
    plain = {"type": "image_url", "image_url": url(TWO, "IMAGE/JPEG;charset=x")}  # as some clients have it
    messages: Any = [
        {"role": "user", "content": [picture(CHAT, ONE), text(CHAT, "a")]},
        {"role": "assistant", "content": "b", "tool_calls": [shot]},
        {"role": "tool", "tool_call_id": "1", "content": [text(CHAT, "c"), plain]},
    ]
    client.chat.completions.create(model="scripted", messages=messages)
    assert told(engine) == (
        Message("user", "a", images=(Image(ONE, 0),)),
        Message("assistant", "b", (ToolCall("shoot", "{}", "1"),)),
        Message("tool", "c", tool_name="shoot", tool_call_id="1", images=(Image(TWO, 1),)),
    )


def test_openais_client_sends_pictures_to_responses(
    client: openai.OpenAI, api: Api, engine: ScriptedEngine
) -> None:
    items: Any = [
        body(RESPONSES, text(RESPONSES, "a"), picture(RESPONSES, ONE))["input"][0],
        {"type": "function_call", "call_id": "1", "name": "shoot", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1",
         "output": [picture(RESPONSES, TWO), text(RESPONSES, "b")]},
    ]  # fmt: skip
    client.responses.create(model="scripted", input=items)
    assert told(engine) == (
        Message("user", "a", images=(Image(ONE, 1),)),
        Message("assistant", "", (ToolCall("shoot", "{}", "1"),)),
        Message("tool", "b", tool_name="shoot", tool_call_id="1", images=(Image(TWO, 0),)),
    )


def test_anthropics_client_sends_pictures_and_results_with_pictures(
    claude: anthropic.Anthropic, engine: ScriptedEngine
) -> None:
    result = [text(MESSAGES, "b"), picture(MESSAGES, TWO)]
    messages: Any = [
        *body(MESSAGES, text(MESSAGES, "a"), picture(MESSAGES, ONE))["messages"],
        *body(MESSAGES, picture(MESSAGES, THREE), text(MESSAGES, "so"))["messages"],
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "shoot", "input": {}}]},
        {"role": "user", "content": [
            picture(MESSAGES, ONE), {"type": "tool_result", "tool_use_id": "1", "content": result},
        ]},
    ]  # fmt: skip
    claude.messages.create(model="scripted", max_tokens=9, messages=messages)
    assert told(engine) == (
        Message("user", "a\nso", images=(Image(ONE, 1), Image(THREE, 2))),
        Message("assistant", "", (ToolCall("shoot", "{}", "1"),)),
        Message("tool", "b", tool_name="shoot", tool_call_id="1", images=(Image(TWO, 1),)),
        Message("user", "", images=(Image(ONE),)),
    )


@given(st.lists(st.text("ab\n", max_size=4) | st.binary(min_size=1, max_size=2), max_size=8))
def test_pictures_leave_texts_as_they_are_without_them(pieces: list[str | bytes]) -> None:
    parts = [text(CHAT, one) if isinstance(one, str) else picture(CHAT, one) for one in pieces]
    found = said(parts)
    assert found.text == "\n".join(one for one in pieces if isinstance(one, str))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "check_image", lambda data: None)
        images = PictureReader().read(found, "user", "content")
    assert [image.data for image in images] == [one for one in pieces if isinstance(one, bytes)]
    before = [pieces[:i] for i, one in enumerate(pieces) if isinstance(one, bytes)]
    assert [found.text[: image.at] for image in images] == [
        "\n".join(one for one in others if isinstance(one, str)) for others in before
    ]  # fmt: skip


REFUSED: dict[str, tuple[Callable[[str], dict[str, Any]], str]] = {
    "no base64": (lambda path: picture(path, "ab!d"), "the picture is no base64: encode the whole file"),
    "cut base64": (lambda path: picture(path, coded(ONE)[:-3]), "the picture is no base64"),
    "not ASCII": (lambda path: picture(path, "é"), "the picture is no base64"),
    "nothing": (lambda path: picture(path, b""), "it is no picture that can be read: use PNG, "),
    "another file": (lambda path: picture(path, b"%PDF-1.7"), "it is no picture that can be read"),
    "too narrow": (lambda path: picture(path, narrow()), "is too narrow"),
    "too large": (lambda path: picture(path, ONE + bytes(MAX_IMAGE_BYTES)), "use one of at most 32.0 MiB"),
}


def narrow() -> bytes:
    file = io.BytesIO()
    PIL.Image.new("L", (1, 900)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_picture_is_refused_where_it_stands(
    kind: str, path: str, api: Api, engine: ScriptedEngine
) -> None:
    part, says = REFUSED[kind]
    answer = api.post(path, **body(path, text(path, "a"), part(path)))
    sentence = answer.json()["error"]["message"]
    field = f"{'input' if path == RESPONSES else 'messages'}.0.content"
    assert answer.status_code == 400 and sentence.startswith(f"The field '{field}' cannot be used: ")
    assert says in sentence and sentence.endswith(".") and not sentence.endswith("..") and len(sentence) < 200
    assert path == MESSAGES or refusal(answer, 400)["param"] == field
    assert engine.asked == []


@pytest.mark.parametrize(
    ("path", "part"),
    [
        *((CHAT, {"type": "image_url", "image_url": where}) for where in (
            {"url": "https://example.com/a.png"}, "http://example.com/a.png", {"url": "data:image/png,abc"},
            {"url": "file:///a.png"}, {}, None, 3, {"url": None}, "", coded(ONE),
        )),
        (CHAT, {"type": "image_url"}),
        (RESPONSES, {"type": "input_image", "image_url": "https://example.com/a.png"}),
        (RESPONSES, {"type": "input_image", "file_id": "file-1"}),
        (MESSAGES, {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}),
        (MESSAGES, {"type": "image", "source": {"type": "file", "file_id": "file_1"}}),
        (MESSAGES, {"type": "image"}), (MESSAGES, {"type": "image", "source": "a"}),
    ],
)  # fmt: skip
def test_pictures_from_elsewhere_are_not_fetched(path: str, part: dict[str, Any], api: Api) -> None:
    answer = api.post(path, **body(path, part))
    sentence = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert "no picture is fetched from elsewhere: send the picture itself, as " in sentence


def test_a_source_without_data_is_refused(api: Api) -> None:
    answer = api.post(MESSAGES, **body(MESSAGES, {"type": "image", "source": {"type": "base64"}}))
    assert 'a picture has to come as {"type": "base64"' in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("role", ["assistant", "system"])
def test_only_the_user_and_tools_show_pictures(path: str, role: str, api: Api) -> None:
    answer = api.post(path, **body(path, text(path, "a"), picture(path, ONE), role=role))
    assert answer.status_code == 400
    assert "pictures stand in messages of the user and in results of tools alone" in answer.text


def test_what_the_system_says_in_a_field_of_its_own_has_no_pictures(api: Api) -> None:
    system = [picture(MESSAGES, ONE)]
    answer = api.post(MESSAGES, **body(MESSAGES, text(MESSAGES, "a")), system=system)
    assert answer.status_code == 400 and "'system' cannot be used: pictures stand in" in answer.text


@pytest.mark.parametrize("path", PATHS)
def test_a_request_has_a_most_of_pictures(path: str, api: Api, engine: ScriptedEngine) -> None:
    def several(count: int) -> dict[str, Any]:
        half = body(path, *[picture(path, ONE)] * (count // 2))
        rest = body(path, *[picture(path, ONE)] * (count - count // 2))
        return {key: value + rest[key] if isinstance(value, list) else value for key, value in half.items()}

    assert api.post(path, **several(MAX_PICTURES)).status_code == 200
    assert sum(len(message.images) for message in told(engine)) == MAX_PICTURES
    answer = api.post(path, **several(MAX_PICTURES + 1))
    assert answer.status_code == 400 and f"at most {MAX_PICTURES} pictures" in answer.text


def test_base64_may_be_broken_into_lines(api: Api, engine: ScriptedEngine) -> None:
    lines = base64.encodebytes(ONE).decode().replace("\n", "\r\n")
    assert api.post(CHAT, **body(CHAT, picture(CHAT, lines))).status_code == 200
    assert told(engine)[0].images == (Image(ONE),)


def test_pictures_may_be_larger_than_texts(api: Api, engine: ScriptedEngine) -> None:
    large = ONE + bytes(fields.MAX_TEXT_BYTES)  # what follows a picture's end is not looked at
    for path in PATHS:
        answer = api.post(path, **body(path, *[picture(path, large)] * 4))
        assert answer.status_code == 200, answer.text
        assert told(engine)[0].images == (Image(large),) * 4
    wordy = body(CHAT, picture(CHAT, large), text(CHAT, "a" * fields.MAX_TEXT_BYTES))
    assert "beside pictures" in str(refusal(api.post(CHAT, **wordy), 413)["message"])


def test_others_are_answered_while_pictures_are_read(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(data: bytes) -> None:
        begun.set()
        assert go_on.wait(30)

    monkeypatch.setattr(pictures, "check_image", slow)
    asking = threading.Thread(target=lambda: api.post(CHAT, **body(CHAT, picture(CHAT, bytes(1 << 16)))))
    asking.start()
    assert begun.wait(30)
    assert api.client.get("/health").status_code == 200
    go_on.set()
    asking.join()


def test_a_request_of_the_largest_pictures_is_read_in_less_than_a_second() -> None:
    found = said([picture(CHAT, ONE + bytes(10 << 20))] * 4)
    began = time.process_time()
    PictureReader().read(found, "user", "content")
    assert time.process_time() - began < 1


class Seeing(ScriptedEngine):
    """Whose pictures take a hundred tokens."""

    def encode(self, request: GenerationRequest, context: int) -> list[int]:
        pictures = sum(len(message.images) for message in request.messages)
        return super().encode(request, context) + [1] * 100 * pictures


def blind(request: GenerationRequest) -> Iterator[StreamEvent]:
    if any(message.images for message in request.messages):
        raise ConfigError("This model reads no pictures: ask without them, or load one that does.")
    yield event("a", "stop")


def test_tokens_of_pictures_are_counted() -> None:
    with running(Seeing(blind, opened=True)) as api:
        asked = body(MESSAGES, text(MESSAGES, "abc"), picture(MESSAGES, ONE), picture(MESSAGES, TWO))
        answer = api.post(f"{MESSAGES}/count_tokens", **asked)
        assert answer.json() == {"input_tokens": 203}


@pytest.mark.parametrize("path", PATHS)
def test_a_model_that_reads_no_pictures_says_so(path: str) -> None:
    with running(ScriptedEngine(blind, opened=True)) as api:
        answer = api.post(path, **body(path, text(path, "a"), picture(path, ONE)))
        assert answer.status_code == 400 and "This model reads no pictures" in answer.text
        assert api.post(path, **body(path, text(path, "a"))).status_code == 200


def test_a_server_that_nobody_asks_keeps_no_pictures() -> None:
    answered = threading.Event()
    desk = AnswerDesk(ScriptedEngine(blind, opened=True), 1, answered.set)
    asked = GenerationRequest(messages=(Message("user", "a", images=(Image(ONE),)),))
    ticket = weakref.ref(desk.submit(Order(asked, (), False, False), lambda delta: None))
    assert answered.wait(30)
    assert ticket() is None
    desk.close()
    desk.join()


def test_what_is_said_is_text_or_parts() -> None:
    assert said("a") == Said(("a",)) and Said(()).text == ""
