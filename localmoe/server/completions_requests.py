"""From OpenAI's requests for completions to the engine's: names, defaults, and refusals of what the engine
does not do. Parses no JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from localmoe.core.config import GenerationRequest, SamplingConfig, Thinking
from localmoe.core.tools import Tool, ToolCall
from localmoe.core.types import Message
from localmoe.server.completions_schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    CompletionsRequest,
)
from localmoe.server.errors import ApiError
from localmoe.server.order import (
    EFFORTS,
    Order,
    no_such_model,
    order_of,
    schema_text,
    tool_of,
    unsupported,
    wanted_calls,
)
from localmoe.server.pictures import NOTHING, PictureReader
from localmoe.server.settings import ServerSettings

_COMPLETION_TOKENS = 16  # of a completion that names no number, as in OpenAI's API
_SCHEMA_FORM = '{"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}'


def chat_order(body: ChatRequest, model: str, settings: ServerSettings) -> Order:
    """The order of a chat request to the model of this name; `settings` hold where it says nothing.

    Raises:
        ApiError: it asks for what the engine does not do, or for another model.
    """
    _check(body, model)
    if body.logprobs:
        raise unsupported("logprobs", "probabilities of tokens are not given")
    if not body.messages:
        raise ApiError(400, "The field 'messages' is empty: give at least one message.", param="messages")
    called = {call.id: call.function.name for message in body.messages for call in message.tool_calls or ()}
    pictures = PictureReader()
    messages = tuple(_message(message, i, called, pictures) for i, message in enumerate(body.messages))
    offered = () if body.tool_choice == "none" else body.tools or ()
    tools = tuple(tool_of(tool.function) for tool in offered)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    schema = _schema(body.response_format or {})
    must_call = _must_call(body.tool_choice, tools)
    if must_call:  # no answer that the schema is about
        schema = None
    generation = GenerationRequest(
        messages=messages, tools=tools, thinking=_thinking(body, settings.thinking), json_schema=schema,
        must_call=must_call, continue_answer=bool(body.continue_final_message),
    )  # fmt: skip
    return order_of(body, generation, settings.sampling, max_new_tokens=limit, stops=body.stop)


def completion_order(body: CompletionRequest, model: str, defaults: SamplingConfig) -> Order:
    """The order of a completion request to the model of this name.

    Raises:
        ApiError: it asks for what the engine does not do, or for another model.
    """
    _check(body, model)
    if body.logprobs is not None:
        raise unsupported("logprobs", "probabilities of tokens are not given")
    if body.best_of not in (None, 1):
        raise unsupported("best_of", "one completion is written")
    if body.echo:
        raise unsupported("echo", "the prompt is not repeated")
    if body.suffix:
        raise unsupported("suffix", "text is written at the end of a prompt, not into its middle")
    if isinstance(body.prompt, str):
        generation = GenerationRequest(prompt=body.prompt)
    else:
        generation = GenerationRequest(prompt_token_ids=body.prompt)
    limit = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return order_of(body, generation, defaults, max_new_tokens=limit, stops=body.stop, splits_thoughts=False)


def usage_asked(body: CompletionsRequest) -> bool:
    """Whether a stream has a last event with the numbers of tokens."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _check(body: CompletionsRequest, model: str) -> None:
    if body.model not in (None, model):
        raise no_such_model(str(body.model), model)
    if body.n not in (None, 1):
        raise unsupported("n", f"{body.n} answers at once are not written: ask for one")
    for name in ("frequency_penalty", "presence_penalty"):
        if getattr(body, name):
            raise unsupported(name, "use repetition_penalty")
    if body.logit_bias:
        raise unsupported("logit_bias", "the model's choice of tokens is not biased")


def _thinking(body: ChatRequest, usual: Thinking) -> Thinking:
    fields = body.chat_template_kwargs
    if fields is not None and (fields.enable_thinking, fields.thinking) != (None, None):
        return "on" if fields.enable_thinking or fields.thinking else "off"
    return usual if body.reasoning_effort is None else EFFORTS[body.reasoning_effort]


def _must_call(choice: str | dict[str, object] | None, tools: Sequence[Tool]) -> tuple[str, ...]:
    """Names of tools, one of which has to be called."""
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        return wanted_calls([tool.name for tool in tools], tools)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        form = '{"type": "function", "function": {"name": "..."}}'
        raise unsupported("tool_choice", f"give 'auto', 'none', 'required' or {form}")
    return wanted_calls([name], tools)


def _schema(form: Mapping[str, object]) -> str | None:
    """What the answer has to be JSON of."""
    given = form.get("json_schema")
    schema = given.get("schema") if isinstance(given, dict) else None
    return schema_text(form.get("type", "text"), schema, "response_format", _SCHEMA_FORM)


def _message(message: ChatMessage, place: int, called: dict[str, str], pictures: PictureReader) -> Message:
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
    said = message.content or NOTHING
    content, images = said.text, pictures.read(said, role, f"{param}.content")
    if role == "tool":
        call_id = message.tool_call_id or ""
        name = message.name or called.get(call_id, "")
        return Message(role, content, tool_name=name, tool_call_id=call_id, images=images)
    thoughts = (message.reasoning_content or message.reasoning or "") if role == "assistant" else ""
    return Message(role, content, calls, thoughts=thoughts, images=images)
