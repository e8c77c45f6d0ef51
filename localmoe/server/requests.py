"""From OpenAI's requests to the engine's: names, defaults, and refusals of what the engine does not do.
Parses no JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from localmoe.core.config import GenerationRequest, SamplingConfig, Thinking
from localmoe.core.errors import ConfigError
from localmoe.core.tools import Tool, ToolCall
from localmoe.core.types import Message
from localmoe.server.errors import ApiError
from localmoe.server.schema import ChatMessage, ChatRequest, CompletionRequest, ToolField
from localmoe.server.settings import ServerSettings

_EFFORTS: dict[str, Thinking] = {
    "none": "off", "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high",
}  # fmt: skip
_COMPLETION_TOKENS = 16  # of a completion that names no number, as in OpenAI's API
Kind = Literal["chat", "text"]


@dataclass(frozen=True, slots=True)
class Order:
    """What one request asks for.

    Attributes:
        kind: chat: thoughts are told apart from the answer; text: what comes after a prompt, as it is.
        stops: texts before which the answer ends.
        streamed: in pieces as they come; usage_asked: with a last piece that has the numbers of tokens.
    """

    kind: Kind
    generation: GenerationRequest
    stops: tuple[str, ...]
    streamed: bool
    usage_asked: bool


def chat_order(body: ChatRequest, model: str, settings: ServerSettings) -> Order:
    """The order of a chat request to the model of this name; `settings` hold where it says nothing.

    Raises:
        ApiError: it asks for what the engine does not do, or for another model.
    """
    _check(body, model)
    if body.logprobs:
        raise _unsupported("logprobs", "probabilities of tokens are not given")
    if not body.messages:
        raise ApiError(400, "The field 'messages' is empty: give at least one message.", param="messages")
    called = {call.id: call.function.name for message in body.messages for call in message.tool_calls or ()}
    messages = tuple(_message(message, i, called) for i, message in enumerate(body.messages))
    tools = () if body.tool_choice == "none" else tuple(map(_tool, body.tools or ()))
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    schema = _schema(body.response_format or {})
    if schema is not None and tools:
        raise _unsupported("response_format", "not with tools: leave one of both out, or choose no tool")
    generation = GenerationRequest(
        messages=messages, tools=tools, thinking=_thinking(body, settings.thinking), json_schema=schema,
        must_call=_must_call(body.tool_choice, tools),
    )  # fmt: skip
    return _order("chat", body, settings.sampling, generation, limit)


def completion_order(body: CompletionRequest, model: str, defaults: SamplingConfig) -> Order:
    """The order of a completion request to the model of this name.

    Raises:
        ApiError: it asks for what the engine does not do, or for another model.
    """
    _check(body, model)
    if body.logprobs is not None:
        raise _unsupported("logprobs", "probabilities of tokens are not given")
    if body.best_of not in (None, 1):
        raise _unsupported("best_of", "one completion is written")
    if body.echo:
        raise _unsupported("echo", "the prompt is not repeated")
    if body.suffix:
        raise _unsupported("suffix", "text is written at the end of a prompt, not into its middle")
    if isinstance(body.prompt, str):
        generation = GenerationRequest(prompt=body.prompt)
    else:
        generation = GenerationRequest(prompt_token_ids=body.prompt)
    limit = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return _order("text", body, defaults, generation, limit)


def _check(body: ChatRequest | CompletionRequest, model: str) -> None:
    if body.model not in (None, model):
        raise ApiError(
            404,
            f"There is no model '{body.model}' here: the one that is loaded is '{model}'.",
            param="model",
            code="model_not_found",
        )
    if body.n not in (None, 1):
        raise _unsupported("n", f"{body.n} answers at once are not written: ask for one")
    for name in ("frequency_penalty", "presence_penalty"):
        if getattr(body, name):
            raise _unsupported(name, "use repetition_penalty")
    if body.logit_bias:
        raise _unsupported("logit_bias", "the model's choice of tokens is not biased")


def _unsupported(field: str, reason: str) -> ApiError:
    return ApiError(400, f"The field '{field}' is not supported: {reason}.", param=field)


def _thinking(body: ChatRequest, usual: Thinking) -> Thinking:
    fields = body.chat_template_kwargs
    if fields is not None and (fields.enable_thinking, fields.thinking) != (None, None):
        return "on" if fields.enable_thinking or fields.thinking else "off"
    return usual if body.reasoning_effort is None else _EFFORTS[body.reasoning_effort]


def _must_call(choice: str | dict[str, object] | None, tools: Sequence[Tool]) -> tuple[str, ...]:
    """Names of tools, one of which has to be called."""
    names = tuple(tool.name for tool in tools)
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        wanted = names
    else:
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            form = '{"type": "function", "function": {"name": "..."}}'
            raise _unsupported("tool_choice", f"give 'auto', 'none', 'required' or {form}")
        wanted = (name,)
    if not wanted or wanted[0] not in names:
        missing = f"no tool '{wanted[0]}' is" if wanted else "no tools are"
        raise ApiError(
            400, f"The field 'tool_choice' cannot be used: {missing} in 'tools'.", param="tool_choice"
        )
    return wanted


def _schema(form: Mapping[str, object]) -> str | None:
    """What the answer has to be JSON of."""
    kind, field = form.get("type", "text"), "response_format"
    if kind == "text":
        return None
    if kind == "json_object":
        return json.dumps({"type": "object"})
    if kind != "json_schema":
        raise _unsupported(field, "its type has to be 'text', 'json_object' or 'json_schema'")
    given = form.get(kind)
    schema = given.get("schema") if isinstance(given, dict) else None
    if not isinstance(schema, dict):
        raise ApiError(
            400, f"The field '{field}' has no schema: give {{\"type\": \"json_schema\", \"json_schema\": "
            "{\"name\": \"...\", \"schema\": {...}}}.", param=field,
        )  # fmt: skip
    return json.dumps(schema)


def _tool(field: ToolField) -> Tool:
    definition: dict[str, object] = {"description": "", "parameters": {"type": "object", "properties": {}}}
    definition |= {name: value for name, value in field.function.items() if value is not None}
    return Tool(str(field.function["name"]), json.dumps(definition))


def _message(message: ChatMessage, place: int, called: dict[str, str]) -> Message:
    """called: names of tools by the ids of all calls."""
    param = f"messages.{place}"
    calls = tuple(
        ToolCall(call.function.name, call.function.arguments, call.id) for call in message.tool_calls or ()
    )
    if calls and message.role != "assistant":
        raise ApiError(
            400, f"Message {place + 1} has tool calls, but only the assistant calls tools: leave them out.",
            param=f"{param}.tool_calls",
        )  # fmt: skip
    if message.content is None and message.role != "assistant":
        raise ApiError(400, f"Message {place + 1} has no content: give a text.", param=f"{param}.content")
    role = "system" if message.role == "developer" else message.role
    content = message.content or ""
    if role != "tool":
        return Message(role, content, calls)
    call_id = message.tool_call_id or ""
    return Message(role, content, tool_name=message.name or called.get(call_id, ""), tool_call_id=call_id)


def _order(
    kind: Kind,
    body: ChatRequest | CompletionRequest,
    defaults: SamplingConfig,
    generation: GenerationRequest,
    max_new_tokens: int | None,
) -> Order:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    try:
        generation = replace(
            generation,
            sampling=replace(defaults, **given),
            max_new_tokens=max_new_tokens,
            draft_length=body.draft_length,
            policy=body.policy,
            strict=bool(body.strict),
        )
    except ConfigError as error:
        raise ApiError(400, str(error)) from None
    asked = body.stream_options is not None and bool(body.stream_options.include_usage)
    return Order(kind, generation, body.stop, bool(body.stream), asked)
