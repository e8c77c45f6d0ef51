"""What messages of all APIs say: texts, and pictures that come as base64. Fetches nothing and reads no
pixels."""

from __future__ import annotations

import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic_core import PydanticCustomError

from localmoe.core.errors import ConfigError
from localmoe.core.types import Image, Message
from localmoe.server.errors import ApiError
from localmoe.server.fields import PICTURE_KINDS, PICTURES_ELSEWHERE, refused, text_of_part
from localmoe.server.settings import MAX_TEXT_BYTES
from localmoe.vision.image_file import check_image

MAX_PICTURES = 32  # of a request
_DATA_URL = 'a data URL, "data:image/png;base64,..."'
_SOURCE = '{"type": "base64", "media_type": "image/png", "data": "..."}'
_BLANKS = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class Picture:
    """As a client sends it, not looked at."""

    base64: str


Piece = str | Picture


@dataclass(frozen=True, slots=True)
class Said:
    """What a message or a tool says. Texts are lines; a picture stands at the end of the line before it."""

    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """Without pictures."""
        return "\n".join(piece for piece in self.pieces if isinstance(piece, str))


NOTHING = Said(())


def said(value: object, kinds: Sequence[str] = ("text",)) -> Said:
    """A text, or a list of pictures and of text parts of these kinds.

    Raises:
        PydanticCustomError: it is neither.
    """
    if isinstance(value, str):
        return Said((value,))
    if not isinstance(value, list):
        raise refused("it has to be text or a list of parts")
    return Said(tuple(_piece(part, kinds) for part in value))


def picture(part: dict[str, object]) -> Picture:
    """A part of one of PICTURE_KINDS.

    Raises:
        PydanticCustomError: it holds none, but says where one is, or nothing.
    """
    if part["type"] == "image":
        return _of_source(part.get("source"))
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    head, _, base64 = url.partition(",") if isinstance(url, str) else ("", "", "")
    if head[:5].lower() != "data:" or head[-7:].lower() != ";base64":
        raise _elsewhere(_DATA_URL)
    return Picture(base64)


class PictureReader:
    """Of one request."""

    def __init__(self) -> None:
        self._count = 0

    def read(self, content: Said, role: str, field: str) -> tuple[Image, ...]:
        """The pictures of what a role says in a field, at their places in its text.

        Raises:
            ApiError: 400; the role shows none, one of them cannot be read, or the request has too many.
        """
        if role not in ("user", "tool") and any(isinstance(piece, Picture) for piece in content.pieces):
            raise ApiError(400, f"The field '{field}' cannot be used: {PICTURES_ELSEWHERE}.", param=field)
        found: list[Image] = []
        lines: list[str] = []
        for piece in content.pieces:
            if isinstance(piece, str):
                lines.append(piece)
            else:
                at = sum(map(len, lines)) + max(len(lines) - 1, 0)  # of what joins them
                found.append(Image(self._data(piece, field), at))
        return tuple(found)

    def _data(self, one: Picture, field: str) -> bytes:
        self._count += 1
        if self._count > MAX_PICTURES:
            raise ApiError(
                400, f"The field '{field}' cannot be used: a request has at most {MAX_PICTURES} pictures.",
                param=field,
            )  # fmt: skip
        try:
            data = _decoded(one.base64)
            check_image(data)
        except ConfigError as error:
            reason = str(error)
            raise ApiError(
                400, f"The field '{field}' cannot be used: {reason[:1].lower()}{reason[1:]}", param=field
            ) from None
        return data


def check_text_size(num_bytes: int, messages: Iterable[Message]) -> None:
    """See that a body of so many bytes is small enough without the pictures that its messages have.

    Raises:
        ApiError: 413; it is not.
    """
    pictures = sum(-(-len(image.data) // 3) * 4 for message in messages for image in message.images)
    if num_bytes - pictures > MAX_TEXT_BYTES:
        raise ApiError(
            413, f"The request has more than {MAX_TEXT_BYTES} bytes beside pictures, the most that are read: "
            "shorten it.",
        )  # fmt: skip


def _piece(part: object, kinds: Sequence[str]) -> Piece:
    if isinstance(part, dict) and part.get("type") in PICTURE_KINDS:
        return picture(part)
    return text_of_part(part, kinds)


def _of_source(source: object) -> Picture:
    if not isinstance(source, dict) or source.get("type") != "base64":
        raise _elsewhere(_SOURCE)
    base64 = source.get("data")
    if not isinstance(base64, str):
        raise refused(f"a picture has to come as {_SOURCE}")
    return Picture(base64)


def _elsewhere(form: str) -> PydanticCustomError:
    return refused(f"no picture is fetched from elsewhere: send the picture itself, as {form}")


def _decoded(base64: str) -> bytes:
    """Some clients break it into lines."""
    try:
        return binascii.a2b_base64(base64.encode("ascii").translate(None, _BLANKS), strict_mode=True)
    except ValueError:  # binascii.Error too
        raise ConfigError("The picture is no base64: encode the whole file.") from None
