"""The fields of OpenAI's requests that mean something here, with their types. Fields that are not listed are
ignored; what a value means for the engine is decided in `localmoe.server.requests`."""

from __future__ import annotations

import json
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from localmoe.chat.call_values import is_tool_name
from localmoe.server.errors import ApiError

MAX_STOPS = 4
MAX_PARTS = 50_000  # lists and objects of a body: more take seconds, in which nobody else is answered


def _refuse(sentence: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{sentence}", {"sentence": sentence})


def _content(value: object) -> object:
    """Text, or a list of text parts as lines."""
    if not isinstance(value, list):
        if value is None or isinstance(value, str):
            return value
        raise _refuse("it has to be text or a list of text parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image_url", "input_image", "image"):
            raise _refuse("images are not read, as the model knows text alone")
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise _refuse('a part has to be {"type": "text", "text": "..."}')
        texts.append(text)
    return "\n".join(texts)


def _stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _refuse("it has to be a text or a list of texts, none of them empty")
    if len(stops) > MAX_STOPS:
        raise _refuse(f"{len(stops)} are too many: give at most {MAX_STOPS}")
    return tuple(stops)


def _prompt(value: object) -> object:
    """A text or token ids; a list of one prompt is that prompt."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    raise _refuse("it has to be one prompt, as a text or as a list of token ids")


def _name(value: object) -> object:
    if not isinstance(value, str) or not is_tool_name(value):
        raise _refuse("a tool needs a name without spaces and <, >, {, }")
    return value


def _choice(value: object) -> object:
    if value is None or isinstance(value, (str, dict)):
        return value
    raise _refuse(
        'it has to be "auto", "none", "required" or {"type": "function", "function": {"name": "..."}}'
    )


def _function(value: object) -> object:
    if not isinstance(value, dict):
        raise _refuse('it has to be {"name": "...", "description": "...", "parameters": {...}}')
    _name(value.get("name"))
    if not isinstance(value.get("parameters") or {}, dict):
        raise _refuse("its parameters have to be a JSON schema")
    return value


def _arguments(value: object) -> object:
    value = "{}" if value == "" else value  # of a call without any, as some clients have it
    try:
        found = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _refuse("it has to be the JSON of an object, as a text")
    return value


def _draft_length(value: object) -> object:
    if value is None or value == "auto" or type(value) is int:
        return value
    raise _refuse('it has to be a number of tokens, or "auto"')


class _Lenient(BaseModel):
    """Types are not converted; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class ToolField(_Lenient):
    """A tool that is offered; what its definition says beside the name goes to the model as it is."""

    type: Literal["function"]
    function: Annotated[dict[str, object], BeforeValidator(_function)]


class CalledFunction(_Lenient):
    """What was called. arguments: JSON of an object."""

    name: Annotated[str, BeforeValidator(_name)]
    arguments: Annotated[str, BeforeValidator(_arguments)] = "{}"


class CallField(_Lenient):
    """A call that an earlier answer had."""

    id: str = ""
    function: CalledFunction


class ChatMessage(_Lenient):
    """One message. developer: OpenAI's newer name of system; name: of the tool whose result it is."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_content)] = None
    tool_calls: Annotated[list[CallField], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class StreamOptions(_Lenient):
    """Of a streamed answer."""

    include_usage: bool | None = None


class TemplateFields(_Lenient):
    """Variables of chat templates that are known here."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class _Request(_Lenient):
    """What both kinds of request have. None: the server's default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, object] | None = None
    # the engine's own
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    draft_length: Annotated[int | Literal["auto"] | None, BeforeValidator(_draft_length)] = None
    policy: str | None = None
    strict: bool | None = None


class ChatRequest(_Request):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    response_format: dict[str, object] | None = None
    tools: Annotated[list[ToolField], Field(fail_fast=True)] | None = None
    tool_choice: Annotated[str | dict[str, object] | None, BeforeValidator(_choice)] = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: TemplateFields | None = None


class CompletionRequest(_Request):
    """The body of POST /v1/completions."""

    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_prompt)]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


RequestT = TypeVar("RequestT", bound=_Request)


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """The request in a JSON body.

    Raises:
        ApiError: 400; the body is no JSON object, has too many parts, or a field has the wrong type.
    """
    if _openings(body) > MAX_PARTS and _openings(_without_texts(body)) > MAX_PARTS:
        raise ApiError(
            400, f"The request has more than {MAX_PARTS:,} lists and objects, such as messages and their "
            "parts, and no more are read: shorten it.",
        )  # fmt: skip
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if not first["loc"]:
        reason = first["msg"] if first["type"] == "json_invalid" else "it is no object"
        raise ApiError(400, f"The body cannot be read as JSON: {reason}.")
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"][:1].lower() + first["msg"][1:]
    raise ApiError(400, f"The field '{field}' cannot be used: {message}.", param=field)


def _openings(body: bytes) -> int:
    return body.count(b"{") + body.count(b"[")


def _without_texts(body: bytes) -> bytes:
    """What a JSON text has outside of quotes."""
    return b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
