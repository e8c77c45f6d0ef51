"""Pictures in messages: as parts of what a template gets, and as tokens of the prompt that it makes. Reads no
picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

from localmoe.core.errors import ConfigError
from localmoe.core.types import Image, Message


class ImageTokens(Protocol):
    """How a prompt of a model that reads pictures has them."""

    @property
    def token_id(self) -> int:
        """What the model's template writes once for each picture, and the prompt has `count` times."""

    @property
    def around(self) -> tuple[Sequence[int], Sequence[int]]:
        """What the prompt has before and behind these."""

    def count(self, image: Image) -> int:
        """Tokens that it takes; raises ConfigError for what is no picture that can be read."""


def images_of(messages: Iterable[Message]) -> tuple[Image, ...]:
    """Of all messages, in order."""
    return tuple(image for message in messages for image in message.images)


def as_picture_parts(message: Message) -> list[dict[str, str]]:
    """What a message with pictures says as templates take it."""
    first, *others = _between(message)
    parts = [{"type": "text", "text": first}]
    for text in others:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return [part for part in parts if part.get("text") != ""]


def rewritten(message: Message, write: Callable[[str], str]) -> Message:
    """With what `write` makes of each text that stands between pictures; those keep their places."""
    texts = [write(text) for text in _between(message)]
    images, at = [], 0
    for image, text in zip(message.images, texts, strict=False):  # the last text has none behind it
        at += len(text)
        images.append(replace(image, at=at))
    return replace(message, content="".join(texts), images=tuple(images))


def joined(first: Message, second: Message, between: str) -> tuple[str, tuple[Image, ...]]:
    """What both say, one behind the other, and its pictures. between: what stands between two texts."""
    begun = first.content + (between if first.content and second.content else "")
    moved = (replace(image, at=len(begun) + image.at) for image in second.images)
    return begun + second.content, (*first.images, *moved)


def with_images(ids: Sequence[int], images: Sequence[Image], tokens: ImageTokens) -> list[int]:
    """A prompt's ids, where each picture has as many tokens as it takes.

    Raises:
        ConfigError: there is not one place for each picture, or one of them cannot be read.
    """
    places = ids.count(tokens.token_id)
    if places != len(images):
        raise ConfigError(
            f"The model's chat template makes other places for pictures ({places}) than there are "
            f"({len(images)}): give them in messages of the user."
        )
    left, (before, behind) = iter(images), tokens.around
    found: list[int] = []
    for token in ids:
        is_place = token == tokens.token_id
        found += [*before, *[token] * tokens.count(next(left)), *behind] if is_place else [token]
    return found


def _between(message: Message) -> list[str]:
    """The texts before, between and behind its pictures."""
    cuts = [0, *(image.at for image in message.images), len(message.content)]
    assert cuts == sorted(cuts), "pictures stand in order in what a message says"
    return [message.content[begin:end] for begin, end in pairwise(cuts)]
