"""An answer in the form of Anthropic's Messages API: a message of blocks, or the events that build one."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from localmoe.core.tools import ToolCall
from localmoe.server.deltas import Delta
from localmoe.server.errors import ApiError
from localmoe.server.forms import Json, event


@dataclass(frozen=True, slots=True)
class _Part:
    """Of a block. kind: thinking or text, whose block goes on with the next part of that kind, or tool_use,
    which comes whole."""

    kind: str
    text: str = ""
    call: ToolCall | None = None

    def goes_on(self, before: str) -> bool:
        return self.call is None and self.kind == before

    def block(self, text: str) -> Json:
        """The block with so much of it."""
        if self.call is not None:
            given: Json = json.loads(text) if text else {}
            return {"type": "tool_use", "id": self.call.id, "name": self.call.name, "input": given}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": text, "signature": ""}  # nobody checks it
        return {"type": "text", "text": text}

    def more(self) -> Json:
        if self.call is not None:
            return {"type": "input_json_delta", "partial_json": self.text}
        return {"type": f"{self.kind}_delta", self.kind: self.text}


def _parts(delta: Delta) -> Iterator[_Part]:
    if delta.thoughts:
        yield _Part("thinking", delta.thoughts)
    if delta.text:
        yield _Part("text", delta.text)
    for call in delta.calls:
        yield _Part("tool_use", call.arguments, call)


class MessagesForm:
    """Of one answer, by the model of this name."""

    def __init__(self, model: str) -> None:
        self._id, self._model = f"msg_{uuid.uuid4().hex}", model
        self._open = ""  # kind of the block that the stream is in
        self._index = -1  # and its number

    def whole(self, deltas: Sequence[Delta]) -> Json:
        """The answer as one message."""
        blocks: list[tuple[_Part, list[str]]] = []
        for part in (part for delta in deltas for part in _parts(delta)):
            if blocks and part.goes_on(blocks[-1][0].kind):
                blocks[-1][1].append(part.text)
            else:
                blocks.append((part, [part.text]))
        last = deltas[-1]
        content = [first.block("".join(texts)) for first, texts in blocks]
        return self._message(content, last, _stop(last)) | {"localmoe": last.stats.as_dict()}

    def opening(self, first: Delta) -> bytes:
        """A message without content."""
        nothing: Json = {"stop_reason": None, "stop_sequence": None}
        return _events([{"type": "message_start", "message": self._message([], first, nothing)}])

    def piece(self, delta: Delta) -> bytes:
        """Blocks, as they begin, go on and end."""
        return _events(self._steps(delta))

    def closing(self, last: Delta) -> bytes:
        """Why it ended, the numbers of tokens, and the statistics."""
        end: Json = {"type": "message_delta", "delta": _stop(last), "usage": _usage(last)}
        return _events([*self._closed(), end | {"localmoe": last.stats.as_dict()}, {"type": "message_stop"}])

    def failure(self, error: ApiError) -> bytes:
        """The error."""
        return _events([error.message_body()])

    def _steps(self, delta: Delta) -> Iterator[Json]:
        for part in _parts(delta):
            if not part.goes_on(self._open):
                yield from self._closed()
                self._open, self._index = part.kind, self._index + 1
                yield {"type": "content_block_start", "index": self._index, "content_block": part.block("")}
            yield {"type": "content_block_delta", "index": self._index, "delta": part.more()}

    def _closed(self) -> Iterator[Json]:
        kind, self._open = self._open, ""
        if kind == "thinking":  # clients send back only thoughts whose signature came, whatever it is
            signature: Json = {"type": "signature_delta", "signature": ""}
            yield {"type": "content_block_delta", "index": self._index, "delta": signature}
        if kind:
            yield {"type": "content_block_stop", "index": self._index}

    def _message(self, content: Sequence[Json], delta: Delta, stop: Json) -> Json:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content,
            **stop, "usage": _usage(delta),
        }  # fmt: skip


def _stop(last: Delta) -> Json:
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    if last.finish == "stop" and last.stopped_by:
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stopped_by}
    return {"stop_reason": reasons[str(last.finish)], "stop_sequence": None}


def _usage(delta: Delta) -> Json:
    """Tokens; those that were had already, in the KV cache or in RAM, apart from what was read."""
    stats = delta.stats
    return {
        "input_tokens": stats.prompt_tokens - stats.reused_tokens, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.reused_tokens, "output_tokens": delta.num_tokens,
    }  # fmt: skip


def _events(steps: Iterable[Json]) -> bytes:
    return b"".join(event(step, str(step["type"])) for step in steps)
