"""What the fields of every API's requests have in common: checks with a sentence each, and the parsing of a
body. Fields that are not listed are ignored; what a value means for the engine is decided where orders are
made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from localmoe.chat.call_values import is_tool_name
from localmoe.server.errors import ApiError
from localmoe.server.settings import MAX_TEXT_BYTES

MAX_STOPS = 64  # OpenAI takes 4, but editors send more, as what begins a declaration in some language
MAX_PARTS = 50_000  # lists and objects of a body: more take seconds, in which nobody else is answered
PICTURE_KINDS = ("image_url", "input_image", "image")
PICTURES_ELSEWHERE = "pictures stand in messages of the user and in results of tools alone"


def refused(sentence: str) -> PydanticCustomError:
    """What a validator raises: the sentence is what the client reads behind the field's name."""
    return PydanticCustomError("refused", "{sentence}", {"sentence": sentence})


def text_of_parts(value: object, kinds: Sequence[str] = ("text",)) -> object:
    """Text, or a list of parts of these kinds, which become lines."""
    if not isinstance(value, list):
        if value is None or isinstance(value, str):
            return value
        raise refused("it has to be text or a list of text parts")
    return "\n".join(text_of_part(part, kinds) for part in value)


def text_of_part(part: object, kinds: Sequence[str] = ("text",)) -> str:
    """What a part of one of these kinds says.

    Raises:
        PydanticCustomError: it is none.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in PICTURE_KINDS:
        raise refused(PICTURES_ELSEWHERE)
    text = part.get("text") if isinstance(part, dict) else None
    if kind not in kinds or not isinstance(text, str):
        raise refused(f'a part has to be {{"type": "{kinds[0]}", "text": "..."}}')
    return text


def tool_name(value: object) -> str:
    """The name of a tool, if it is one.

    Raises:
        PydanticCustomError: it is none.
    """
    if not isinstance(value, str) or not is_tool_name(value):
        raise refused("a tool needs a name without spaces and <, >, {, }")
    return value


def _stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise refused("it has to be a text or a list of texts, none of them empty")
    if len(stops) > MAX_STOPS:
        raise refused(f"{len(stops)} are too many: give at most {MAX_STOPS}")
    return tuple(stops)


def _arguments(value: object) -> object:
    value = "{}" if value == "" else value  # of a call without any, as some clients have it
    try:
        found = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise refused("it has to be the JSON of an object, as a text")
    return value


def _draft_length(value: object) -> object:
    if value is None or value == "auto" or type(value) is int:
        return value
    raise refused('it has to be a number of tokens, or "auto"')


ToolName = Annotated[str, BeforeValidator(tool_name)]
Arguments = Annotated[str, BeforeValidator(_arguments)]  # JSON of an object
Stops = Annotated[tuple[str, ...], BeforeValidator(_stops)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Lenient(BaseModel):
    """Types are not converted; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class AnyRequest(Lenient):
    """What all requests have. None: the server's default."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    # the engine's own
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    draft_length: Annotated[int | Literal["auto"] | None, BeforeValidator(_draft_length)] = None
    policy: str | None = None
    strict: bool | None = None


RequestT = TypeVar("RequestT", bound=AnyRequest)


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """The request in a JSON body.

    Raises:
        ApiError: 400; the body is no JSON object, has too many parts, or a field has the wrong type. 413; it
            is as large as only pictures may be, and holds little else than commas and quotes.
    """
    if len(body) > MAX_TEXT_BYTES and body.count(b",") + body.count(b'"') > MAX_TEXT_BYTES // 2:
        raise ApiError(413, "The request has more values than are read beside pictures: shorten it.")
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
