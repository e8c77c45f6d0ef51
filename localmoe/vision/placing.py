"""Where pictures stand in a prompt, which numbers tell a text with one picture from the same text with
another, and the places by which attention turns their tokens. Computes nothing on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localmoe.vision.image_reader import ImageLayout

_FIRST = 1 << 40  # beyond any vocabulary


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """A picture's tokens are those of a prompt from `start` on."""

    start: int
    layout: ImageLayout

    @property
    def end(self) -> int:
        """The place behind them."""
        return self.start + self.layout.tokens


def place_images(
    prompt: Sequence[int], token_id: int, layouts: Sequence[ImageLayout]
) -> tuple[PlacedImage, ...]:
    """The prompt's places with `token_id` belong to the pictures in order."""
    found, place = [], 0
    for layout in layouts:
        place = prompt.index(token_id, place)
        found.append(PlacedImage(place, layout))
        place = found[-1].end
    assert all(set(prompt[one.start : one.end]) == {token_id} for one in found), "a picture is cut"
    return tuple(found)


class ImageNumbers:
    """Numbers of pictures' tokens that no other picture has, and no token of a vocabulary."""

    def __init__(self) -> None:
        self._next = _FIRST
        self._given: dict[ImageLayout, int] = {}  # with whole digests: parts can be made to be alike

    def told_apart(self, prompt: Sequence[int], images: Sequence[PlacedImage]) -> list[int]:
        """The prompt with these numbers in the place of pictures' tokens."""
        ids = list(prompt)
        for image in images:
            if image.layout not in self._given:
                self._given[image.layout] = self._next
                self._next += image.layout.tokens
            first = self._given[image.layout]
            ids[image.start : image.end] = range(first, first + image.layout.tokens)
        return ids


def coordinates(images: Sequence[PlacedImage], length: int) -> NDArray[np.int64]:
    """(3, length): the places in time, height and width of a text's first tokens. A picture's tokens stand at
    one time and count up by row and column, and what follows goes on behind the larger of both (M-RoPE:
    Qwen2-VL, section 2.1)."""
    places = np.empty((3, length), dtype=np.int64)
    at, nearest = 0, 0
    for image in images:
        rows, columns = image.layout.height, image.layout.width
        text = image.start - at
        places[:, at : image.start] = nearest + np.arange(text)
        nearest += text
        grid = np.indices((rows, columns)).reshape(2, -1)
        places[0, image.start : image.end] = nearest
        places[1:, image.start : image.end] = nearest + grid
        nearest += max(rows, columns)
        at = image.end
    places[:, at:] = nearest + np.arange(length - at)
    return places
