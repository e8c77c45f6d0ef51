"""The output of OpenAI's responses as it grows: items in their order, and the events that tell of each. Knows
nothing of the response around them, and numbers no event."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Literal

from localmoe.core.tools import ToolCall
from localmoe.server.deltas import Delta
from localmoe.server.forms import Json

Kind = Literal["message", "reasoning"]
Ended = Literal["completed", "incomplete"]
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


@dataclass(frozen=True, slots=True)
class _Open:
    """The item that text is added to."""

    kind: Kind
    id: str
    texts: list[str] = field(default_factory=list)


class Output:
    """Of one answer. A text goes on in the item that is open, and an item ends where one of another kind
    begins."""

    def __init__(self) -> None:
        self._done: list[Json] = []
        self._open: _Open | None = None

    @property
    def items(self) -> list[Json]:
        """Those that have ended."""
        return list(self._done)

    def add(self, delta: Delta) -> list[Json]:
        """Events of what a step added: of its thoughts, its text, and then its calls."""
        events: list[Json] = []
        if delta.thoughts:
            events += self._say("reasoning", delta.thoughts)
        if delta.text:
            events += self._say("message", delta.text)
        for call in delta.calls:
            events += self.close("completed") + self._call(call)
        return events

    def end(self, status: Ended) -> list[Json]:
        """Events behind the last step. status: of the item that is open then; an answer of nothing has an
        empty message."""
        events = [] if self._done or self._open else self._begin("message")
        return events + self.close(status)

    def close(self, status: Ended) -> list[Json]:
        """Events of the end of the item that is open, if one is."""
        if self._open is None:
            return []
        kind, text, place = self._open.kind, "".join(self._open.texts), self._place(self._open.id)
        part, index = _part(kind, text), len(self._done)
        item = _said(kind, self._open.id, [part], status)
        self._open = None
        self._done.append(item)
        return [
            _event(f"{_PARTS[kind]}.done", **place, text=text, **_logprobs(kind)),
            _event("content_part.done", **place, part=part),
            _event("output_item.done", output_index=index, item=item),
        ]

    def _say(self, kind: Kind, text: str) -> list[Json]:
        events: list[Json] = []
        if self._open is None or self._open.kind != kind:
            events = self.close("completed") + self._begin(kind)
        assert self._open is not None
        self._open.texts.append(text)
        place = self._place(self._open.id)
        return [*events, _event(f"{_PARTS[kind]}.delta", **place, delta=text, **_logprobs(kind))]

    def _begin(self, kind: Kind) -> list[Json]:
        self._open = _Open(kind, _new_id(kind))
        item = _said(kind, self._open.id, [], "in_progress")
        return [
            _event("output_item.added", output_index=len(self._done), item=item),
            _event("content_part.added", **self._place(self._open.id), part=_part(kind, "")),
        ]

    def _call(self, call: ToolCall) -> list[Json]:
        """A call, which comes whole."""
        index, item_id, arguments = len(self._done), _new_id("function_call"), call.arguments
        item: Json = {
            "id": item_id, "type": "function_call", "status": "completed", "call_id": call.id,
            "name": call.name, "arguments": arguments,
        }  # fmt: skip
        self._done.append(item)
        place: Json = {"item_id": item_id, "output_index": index}
        begun = {**item, "status": "in_progress", "arguments": ""}
        return [
            _event("output_item.added", output_index=index, item=begun),
            _event("function_call_arguments.delta", **place, delta=arguments),
            _event("function_call_arguments.done", **place, name=call.name, arguments=arguments),
            _event("output_item.done", output_index=index, item=item),
        ]

    def _place(self, item_id: str) -> Json:
        """Of the text of the item that is open: an item has but one."""
        return {"item_id": item_id, "output_index": len(self._done), "content_index": 0}


def _said(kind: Kind, item_id: str, content: list[Json], status: str) -> Json:
    """An item of text."""
    own: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
    return {"id": item_id, "type": kind, "status": status, **own, "content": content}


def _part(kind: Kind, text: str) -> Json:
    own: Json = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": _PARTS[kind], "text": text, **own}


def _logprobs(kind: Kind) -> Json:
    """Events of a message's text have to have them."""
    return {"logprobs": []} if kind == "message" else {}


def _event(name: str, /, **data: object) -> Json:
    return {"type": f"response.{name}", **data}


def _new_id(kind: str) -> str:
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"
