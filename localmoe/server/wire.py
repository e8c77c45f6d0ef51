"""What is sent of an answer, in the form of OpenAI's API: whole objects and chunks of them. Writes to no
socket."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from localmoe.server.deltas import Delta
from localmoe.server.requests import Kind

DONE = b"data: [DONE]\n\n"
Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Form:
    """One answer's name, kind and date; `new_form` makes them."""

    id: str
    kind: Kind
    model: str
    created: int

    def whole(self, deltas: Sequence[Delta]) -> Json:
        """The answer as one object."""
        last = deltas[-1]
        text = "".join(delta.text for delta in deltas)
        choice: Json = {"index": 0, "logprobs": None, "finish_reason": last.finish}
        if self.kind == "text":
            choice["text"] = text
        else:
            calls = [call for delta in deltas for call in _calls(delta)]
            message: Json = {"role": "assistant", "content": text if text or not calls else None}
            if calls:
                message["tool_calls"] = [
                    {name: value for name, value in call.items() if name != "index"} for call in calls
                ]
            if thoughts := "".join(delta.thoughts for delta in deltas):
                message["reasoning_content"] = thoughts
            choice["message"] = message
        return {
            **self._head(streamed=False),
            "choices": [choice],
            "usage": _usage(last),
            "localmoe": last.stats.as_dict(),
        }

    def opening(self) -> list[Json]:
        """Chunks before the first text: who speaks."""
        if self.kind == "text":
            return []
        return [self._chunk({"delta": {"role": "assistant", "content": ""}}, None)]

    def chunks(self, delta: Delta) -> list[Json]:
        """Chunks of new text; then, of the last delta, one with the finish reason and the statistics."""
        found = []
        if self.kind == "text":
            if delta.text:
                found.append(self._chunk({"text": delta.text}, None))
        else:
            for name, text in (("reasoning_content", delta.thoughts), ("content", delta.text)):
                if text:
                    found.append(self._chunk({"delta": {name: text}}, None))
            found += [self._chunk({"delta": {"tool_calls": [call]}}, None) for call in _calls(delta)]
        if delta.finish is not None:
            empty: Json = {"text": ""} if self.kind == "text" else {"delta": {}}
            found.append({**self._chunk(empty, delta.finish), "localmoe": delta.stats.as_dict()})
        return found

    def usage_chunk(self, last: Delta) -> Json:
        """The chunk after the last one, for those who asked for numbers of tokens."""
        return {**self._head(streamed=True), "choices": [], "usage": _usage(last)}

    def _chunk(self, content: Json, finish: str | None) -> Json:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        return {**self._head(streamed=True), "choices": [choice]}

    def _head(self, *, streamed: bool) -> Json:
        name = "text_completion" if self.kind == "text" else "chat.completion"
        if streamed and self.kind == "chat":
            name += ".chunk"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}


def _calls(delta: Delta) -> list[Json]:
    """A delta's calls of tools, each whole."""
    return [
        {
            "index": index, "id": call.id, "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(delta.calls, delta.calls_before)
    ]  # fmt: skip


def new_form(kind: Kind, model: str) -> Form:
    """The form of an answer that begins now."""
    prefix = "cmpl" if kind == "text" else "chatcmpl"
    return Form(f"{prefix}-{uuid.uuid4().hex}", kind, model, int(time.time()))


def _usage(last: Delta) -> Json:
    """Numbers of tokens; cached: of the prompt, those that the last answer had left in the KV cache."""
    stats = last.stats
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": last.num_tokens,
        "total_tokens": stats.prompt_tokens + last.num_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.reused_tokens},
    }


def event(data: Json) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
