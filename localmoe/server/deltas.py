"""One answer of the engine as what is sent of it: thoughts and answer apart, cut at a stop string. Knows no
JSON and no client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from localmoe.chat.reasoning import OPEN
from localmoe.chat.thought_stream import Parts, ThoughtStream
from localmoe.core.stats import GenerationStats
from localmoe.core.stream import FinishReason, StreamEvent
from localmoe.server.stops import StopCutter


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added; the last one has a finish reason. Statistics are those of the answer so far."""

    thoughts: str
    text: str
    finish: FinishReason | None
    stats: GenerationStats


def write_deltas(
    events: Iterable[StreamEvent], stops: tuple[str, ...], *, split_thoughts: bool
) -> Iterator[Delta]:
    """One delta an event, up to the first stop string in the answer; thoughts may contain any text."""
    cutter = StopCutter(stops)
    thoughts = ThoughtStream() if split_thoughts else None
    for event in events:
        parts = Parts("", event.text)
        if thoughts is not None:
            parts = thoughts.add(OPEN + event.text if event.opens_reasoning else event.text)
        if thoughts is not None and event.finish_reason is not None:
            rest = thoughts.finish()
            parts = Parts(parts.thoughts + rest.thoughts, parts.answer + rest.answer)
        text, finish = cutter.add(parts.answer), event.finish_reason
        if cutter.found:
            finish = "stop"
        elif finish is not None:
            text += cutter.finish()
        yield Delta(parts.thoughts, text, finish, event.stats)
        if finish is not None:
            return
