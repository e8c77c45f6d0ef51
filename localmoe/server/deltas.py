"""One answer of the engine as what is sent of it: thoughts, calls of tools and answer apart, cut at a stop
string. Knows no JSON and no client."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from localmoe.chat.reasoning import OPEN
from localmoe.chat.thought_stream import Parts, ThoughtStream
from localmoe.chat.tool_formats import FORCED, format_of
from localmoe.chat.tool_stream import Found, ToolStream
from localmoe.core.stats import GenerationStats
from localmoe.core.stream import FinishReason, StreamEvent
from localmoe.core.tools import Tool, ToolCall
from localmoe.server.stops import StopCutter

_ID_LENGTH = 9  # as some chat templates demand of a call's id
Finish = FinishReason | Literal["tool_calls"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added; the last one has a finish reason. Statistics are those of the answer so far.

    Attributes:
        num_tokens: of the answer so far, up to the one that completes a stop string; statistics count all
            that the step brought.
        calls: of tools. calls_before: how many there were before them.
        stopped_by: the stop string that ended the answer, if one did.
    """

    thoughts: str
    text: str
    finish: Finish | None
    stats: GenerationStats
    num_tokens: int
    calls: tuple[ToolCall, ...] = ()
    calls_before: int = 0
    stopped_by: str = ""


def write_deltas(
    events: Iterable[StreamEvent],
    stops: tuple[str, ...],
    *,
    split_thoughts: bool,
    tools: Sequence[Tool] = (),
) -> Iterator[Delta]:
    """One delta an event, up to the first stop string in the answer; thoughts and calls may contain any
    text."""
    reader = _Reader(stops, tools, split_thoughts=split_thoughts)
    for event in events:
        delta = reader.read(event)
        yield delta
        if delta.finish is not None:
            return


class _Reader:
    """Tells an answer apart token by token, as a step may bring some that lie behind a stop string."""

    def __init__(self, stops: tuple[str, ...], tools: Sequence[Tool], *, split_thoughts: bool) -> None:
        self._cutter, self._tools = StopCutter(stops), tools
        self._split_thoughts, self._thoughts = split_thoughts, ThoughtStream()
        self._tool_stream: ToolStream | None = None
        self._forced, self._called = False, 0

    def read(self, event: StreamEvent) -> Delta:
        """What one step added, up to a stop string."""
        if event.tool_format:
            form = format_of(event.tool_format)
            self._tool_stream = ToolStream(form, self._tools)
            if form.ends_thoughts:
                self._thoughts = ThoughtStream([opening for opening, _ in form.frames])
            self._forced = event.tool_format == FORCED  # its text is a call that was cut: no stop ends it
        pieces, cutter = event.pieces or (event.text,), None if self._forced else self._cutter
        thoughts, text, calls, behind = "", "", list[ToolCall](), len(pieces)
        if event.opens_reasoning:
            self._thoughts.add(OPEN)
        for piece in pieces:
            behind -= 1
            parts, found = self._apart(piece, None if behind else event.finish_reason)
            more, new = _before_stop(found, cutter)
            thoughts, text, calls = thoughts + parts.thoughts, text + more, calls + new
            if self._cutter.found:
                break
        finish: Finish | None = event.finish_reason
        if self._cutter.found:
            finish = "stop"
        elif finish is not None:
            text += self._cutter.finish()
        called, self._called = self._called, self._called + len(calls)
        if finish == "stop" and self._called:
            finish = "tool_calls"
        num_tokens = event.stats.new_tokens - behind
        return Delta(
            thoughts, text, finish, event.stats, num_tokens, tuple(calls), called, self._cutter.found
        )  # fmt: skip

    def _apart(self, text: str, finish: FinishReason | None) -> tuple[Parts, Found]:
        """Thoughts and answer; and the answer as text and calls. finish: of the last text."""
        parts = Parts("", text)
        if self._split_thoughts:
            parts = self._thoughts.add(text)
            if finish is not None:
                rest = self._thoughts.finish()
                parts = Parts(parts.thoughts + rest.thoughts, parts.answer + rest.answer)
        found: Found = (parts.answer,)
        if self._tool_stream is not None:
            found = self._tool_stream.add(parts.answer)
            if finish is not None:
                found += self._tool_stream.finish(cut=finish != "stop")
        return parts, found


def _before_stop(found: Found, cutter: StopCutter | None) -> tuple[str, list[ToolCall]]:
    """Text and calls, up to a stop string."""
    text, calls = "", list[ToolCall]()
    for part in found:
        if isinstance(part, ToolCall):
            calls.append(replace(part, id=_new_id()))
        else:
            text += part if cutter is None else cutter.add(part)
        if cutter is not None and cutter.found:
            break
    return text, calls


def _new_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_ID_LENGTH))
