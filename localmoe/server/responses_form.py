"""An answer in the form of OpenAI's Responses API: the response object, and the events of a stream in their
order. What items an answer has is decided in `responses_output`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence

from localmoe.core.config import SamplingConfig
from localmoe.server.deltas import Delta
from localmoe.server.errors import ApiError
from localmoe.server.forms import Json, event
from localmoe.server.responses_output import Ended, Output
from localmoe.server.responses_schema import ResponsesRequest


class ResponsesForm:
    """Of one answer; `responses_form` makes it."""

    def __init__(self, head: Json, asked: Json) -> None:
        """
        Args:
            head: what the response is known by.
            asked: what it repeats of the request.
        """
        self._head, self._asked = head, asked
        self._output = Output()
        self._num_events = 0

    def whole(self, deltas: Sequence[Delta]) -> Json:
        """The answer as one object."""
        output = Output()
        for delta in deltas:
            output.add(delta)
        output.end(_status(deltas[-1]))
        return self._ended(output, deltas[-1])

    def opening(self, first: Delta) -> bytes:
        """The response, of which nothing is there yet, twice as clients expect it."""
        return self._sent(self._begun())

    def piece(self, delta: Delta) -> bytes:
        """Events of the items that go on, end and begin."""
        return self._sent(self._output.add(delta))

    def closing(self, last: Delta) -> bytes:
        """The end of the last item, and the response as one object."""
        events = self._output.end(_status(last))
        response = self._ended(self._output, last)
        return self._sent([*events, {"type": f"response.{response['status']}", "response": response}])

    def failure(self, error: ApiError) -> bytes:
        """The response with what was written of it, and the error."""
        self._output.close("incomplete")  # without its events: an item that failed is not done
        code = "server_error" if error.too_long is None else error.code  # which clients know
        response = self._response("failed", self._output.items, error={"code": code, "message": str(error)})
        begun = [] if self._num_events else self._begun()
        return self._sent([*begun, {"type": "response.failed", "response": response}])

    def _begun(self) -> list[Json]:
        response = self._response("in_progress", [])
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def _ended(self, output: Output, last: Delta) -> Json:
        status = _status(last)
        cut = {"incomplete_details": {"reason": "max_output_tokens"}}
        done = {"completed_at": int(time.time())}
        more: Json = {**(done if status == "completed" else cut), "usage": _usage(last)}
        return {**self._response(status, output.items, **more), "localmoe": last.stats.as_dict()}

    def _response(self, status: str, output: list[Json], **more: object) -> Json:
        return {
            **self._head, "status": status, "completed_at": None, "error": None, "incomplete_details": None,
            **self._asked, "output": output, "usage": None, **more,
        }  # fmt: skip

    def _sent(self, events: Sequence[Json]) -> bytes:
        """Numbered, from 0."""
        first, self._num_events = self._num_events, self._num_events + len(events)
        return b"".join(
            event({**data, "sequence_number": number}, str(data["type"]))
            for number, data in enumerate(events, first)
        )


def responses_form(body: ResponsesRequest, sampling: SamplingConfig, model: str) -> ResponsesForm:
    """The form of an answer that begins now. sampling: how its tokens are chosen."""
    head: Json = {
        "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()),
        "model": model,
    }  # fmt: skip
    effort = None if body.reasoning is None else body.reasoning.effort
    asked: Json = {
        "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
        "temperature": sampling.temperature, "top_p": sampling.top_p,
        "tools": [_tool(tool) for tool in body.functions()], "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": True, "text": {"format": _format(body)},
        "reasoning": {"effort": effort, "summary": None}, "truncation": "disabled",
        "metadata": body.metadata, "store": False, "background": False, "previous_response_id": None,
    }  # fmt: skip
    return ResponsesForm(head, asked)


def _tool(tool: Mapping[str, object]) -> Json:
    """With what a client may leave out and others expect."""
    return {"description": None, "parameters": None, "strict": None, **tool}


def _format(body: ResponsesRequest) -> Json:
    given = (body.text.format if body.text is not None else None) or {}
    return {"type": "text", **({"name": ""} if given.get("type") == "json_schema" else {}), **given}


def _status(last: Delta) -> Ended:
    return "incomplete" if last.finish == "length" else "completed"


def _usage(last: Delta) -> Json:
    """Numbers of tokens; which of them were thoughts is not counted. Nothing is paid for what is written into
    a cache."""
    stats = last.stats
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.reused_tokens, "cache_write_tokens": 0},
        "output_tokens": last.num_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": stats.prompt_tokens + last.num_tokens,
    }
