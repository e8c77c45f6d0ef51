"""The fields of OpenAI's requests for chat and text completions that mean something here, with their
types."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from localmoe.server.fields import (
    AnyRequest,
    Arguments,
    Effort,
    Lenient,
    Stops,
    ToolName,
    refused,
    tool_name,
)
from localmoe.server.pictures import Said, said


def _prompt(value: object) -> object:
    """A text or token ids; a list of one prompt is that prompt."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    raise refused("it has to be one prompt, as a text or as a list of token ids")


def _content(value: object) -> Said | None:
    return None if value is None else said(value)


def _choice(value: object) -> object:
    if value is None or isinstance(value, (str, dict)):
        return value
    raise refused(
        'it has to be "auto", "none", "required" or {"type": "function", "function": {"name": "..."}}'
    )


def _function(value: object) -> object:
    if not isinstance(value, dict):
        raise refused('it has to be {"name": "...", "description": "...", "parameters": {...}}')
    tool_name(value.get("name"))
    if not isinstance(value.get("parameters") or {}, dict):
        raise refused("its parameters have to be a JSON schema")
    return value


class ToolField(Lenient):
    """A tool that is offered; what its definition says beside the name goes to the model as it is."""

    type: Literal["function"]
    function: Annotated[dict[str, object], BeforeValidator(_function)]


class CalledFunction(Lenient):
    """What was called."""

    name: ToolName
    arguments: Arguments = "{}"


class CallField(Lenient):
    """A call that an earlier answer had."""

    id: str = ""
    function: CalledFunction


class ChatMessage(Lenient):
    """One message. developer: OpenAI's newer name of system; name: of the tool whose result it is.
    reasoning_content: what the assistant had thought, as it was answered; others name it reasoning."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Said | None, PlainValidator(_content)] = None
    tool_calls: Annotated[list[CallField], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class StreamOptions(Lenient):
    """Of a streamed answer."""

    include_usage: bool | None = None


class TemplateFields(Lenient):
    """Variables of chat templates that are known here."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class CompletionsRequest(AnyRequest):
    """What both kinds have. None: the server's default."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: Stops = ()
    n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, object] | None = None


class ChatRequest(CompletionsRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    response_format: dict[str, object] | None = None
    tools: Annotated[list[ToolField], Field(fail_fast=True)] | None = None
    tool_choice: Annotated[str | dict[str, object] | None, BeforeValidator(_choice)] = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateFields | None = None
    continue_final_message: bool | None = None  # vLLM's


class CompletionRequest(CompletionsRequest):
    """The body of POST /v1/completions."""

    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_prompt)]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
