"""An answer in the form of OpenAI's API of completions: whole objects and chunks of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from localmoe.server.deltas import Delta
from localmoe.server.errors import ApiError
from localmoe.server.forms import Json, event

_DONE = b"data: [DONE]\n\n"
Kind = Literal["chat", "text"]


@dataclass(frozen=True, slots=True)
class CompletionsForm:
    """One answer's name, kind and date; `completions_form` makes them.

    Attributes:
        usage_asked: a stream has a last event with the numbers of tokens.
    """

    id: str
    kind: Kind
    model: str
    created: int
    usage_asked: bool

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

    def opening(self, first: Delta) -> bytes:
        """Who speaks."""
        if self.kind == "text":
            return b""
        return event(self._chunk({"delta": {"role": "assistant", "content": ""}}, None))

    def piece(self, delta: Delta) -> bytes:
        """Chunks of new text; then, of the last delta, one with the finish reason and the statistics."""
        return b"".join(map(event, self._chunks(delta)))

    def closing(self, last: Delta) -> bytes:
        """Numbers of tokens, for those who asked for them, and the end."""
        usage = {**self._head(streamed=True), "choices": [], "usage": _usage(last)}
        return (event(usage) if self.usage_asked else b"") + _DONE

    def failure(self, error: ApiError) -> bytes:
        """The error, and the end."""
        return event(error.body()) + _DONE

    def _chunks(self, delta: Delta) -> list[Json]:
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


def completions_form(kind: Kind, model: str, *, usage_asked: bool) -> CompletionsForm:
    """The form of an answer that begins now."""
    prefix = "cmpl" if kind == "text" else "chatcmpl"
    return CompletionsForm(f"{prefix}-{uuid.uuid4().hex}", kind, model, int(time.time()), usage_asked)


def _usage(last: Delta) -> Json:
    """Numbers of tokens; cached: of the prompt, those that the last answer had left in the KV cache."""
    stats = last.stats
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": last.num_tokens,
        "total_tokens": stats.prompt_tokens + last.num_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.reused_tokens},
    }
