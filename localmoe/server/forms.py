"""What each API makes of an answer: one object, or a stream of server-sent events. Writes to no socket."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from localmoe.server.deltas import Delta
from localmoe.server.errors import ApiError

Json = dict[str, object]


class Form(Protocol):
    """Of one answer. Of a stream, `opening` comes first, then `piece` of each delta in turn, of the last one
    too; then `closing`, or where the answer failed, `failure`."""

    def whole(self, deltas: Sequence[Delta]) -> Json:
        """The answer as one object."""

    def opening(self, first: Delta) -> bytes:
        """Events before the first text. first: the delta that is known already, and comes next."""

    def piece(self, delta: Delta) -> bytes:
        """Events of what a step added."""

    def closing(self, last: Delta) -> bytes:
        """Events behind the last delta."""

    def failure(self, error: ApiError) -> bytes:
        """Events of what ended an answer of which some was sent."""


def event(data: Json, name: str = "") -> bytes:
    """A server-sent event."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n".encode() if name else f"data: {text}\n\n".encode()
