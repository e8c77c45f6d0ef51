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
        calls: of tools. calls_before: how many there were before them.
    """

    thoughts: str
    text: str
    finish: Finish | None
    stats: GenerationStats
    calls: tuple[ToolCall, ...] = ()
    calls_before: int = 0


def write_deltas(
    events: Iterable[StreamEvent],
    stops: tuple[str, ...],
    *,
    split_thoughts: bool,
    tools: Sequence[Tool] = (),
) -> Iterator[Delta]:
    """One delta an event, up to the first stop string in the answer; thoughts and calls may contain any
    text."""
    cutter = StopCutter(stops)
    thoughts = ThoughtStream() if split_thoughts else None
    tool_stream: ToolStream | None = None
    forced, called = False, 0
    for event in events:
        parts = Parts("", event.text)
        if event.tool_format:
            tool_stream = ToolStream(format_of(event.tool_format), tools)
            forced = event.tool_format == FORCED  # its text is a call that was cut, which no stop string ends
        if thoughts is not None:
            parts = thoughts.add(OPEN + event.text if event.opens_reasoning else event.text)
        if thoughts is not None and event.finish_reason is not None:
            rest = thoughts.finish()
            parts = Parts(parts.thoughts + rest.thoughts, parts.answer + rest.answer)
        found: Found = (parts.answer,)
        if tool_stream is not None:
            found = tool_stream.add(parts.answer)
            if event.finish_reason is not None:
                found += tool_stream.finish(cut=event.finish_reason != "stop")
        text, calls = _before_stop(found, None if forced else cutter)
        finish: Finish | None = event.finish_reason
        if cutter.found:
            finish = "stop"
        elif finish is not None:
            text += cutter.finish()
        if finish == "stop" and called + len(calls):
            finish = "tool_calls"
        yield Delta(parts.thoughts, text, finish, event.stats, calls, called)
        called += len(calls)
        if finish is not None:
            return


def _before_stop(found: Found, cutter: StopCutter | None) -> tuple[str, tuple[ToolCall, ...]]:
    """Text and calls, up to a stop string."""
    text, calls = "", list[ToolCall]()
    for part in found:
        if isinstance(part, ToolCall):
            calls.append(replace(part, id=_new_id()))
        else:
            text += part if cutter is None else cutter.add(part)
        if cutter is not None and cutter.found:
            break
    return text, tuple(calls)


def _new_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_ID_LENGTH))
