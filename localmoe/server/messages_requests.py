"""From Anthropic's requests to the engine's: turns, tools, defaults, and refusals of what the engine does not
do. Parses no JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from localmoe.chat.image_parts import joined
from localmoe.core.config import GenerationRequest, Thinking
from localmoe.core.tools import Tool, ToolCall
from localmoe.core.types import Message
from localmoe.server.errors import ApiError
from localmoe.server.messages_schema import (
    MessageField,
    MessagesRequest,
    OfferedTool,
    Thoughts,
    ToolChoice,
    ToolResult,
)
from localmoe.server.order import (
    EFFORTS,
    Order,
    no_such_model,
    one_system,
    order_of,
    tool_of,
    unsupported,
    wanted_calls,
)
from localmoe.server.pictures import Picture, PictureReader, Said
from localmoe.server.settings import ServerSettings

_ANY_MODEL = "claude"  # how names begin that clients of this API have built in: the loaded model answers


def messages_order(body: MessagesRequest, model: str, settings: ServerSettings) -> Order:
    """The order of a request to the model of this name; `settings` hold where it says nothing. An answer that
    the assistant has begun in the last message is continued.

    Raises:
        ApiError: it asks for what the engine does not do, or for another model.
        ConfigError: a schema says what cannot be held to, or two fields do not go together.
    """
    if body.model not in (None, model) and not str(body.model).startswith(_ANY_MODEL):
        raise no_such_model(str(body.model), model)
    if not body.messages:
        raise ApiError(400, "The field 'messages' is empty: give at least one message.", param="messages")
    choice = body.tool_choice or ToolChoice(type="auto")
    tools = () if choice.type == "none" else tuple(map(_tool, body.tools or ()))
    schema = _schema(body)
    messages = _messages(body)
    last = messages[-1]
    must_call = _must_call(choice, tools)
    if must_call:  # no answer that the schema is about
        schema = None
    generation = GenerationRequest(
        messages=messages, tools=tools, thinking=_thinking(body, settings.thinking), json_schema=schema,
        must_call=must_call,
        continue_answer=last.role == "assistant" and bool(last.content) and not last.tool_calls,
    )  # fmt: skip
    return order_of(
        body, generation, settings.sampling, max_new_tokens=body.max_tokens, stops=body.stop_sequences
    )


def _tool(field: OfferedTool) -> Tool:
    return tool_of({"name": field.name, "description": field.description, "parameters": field.input_schema})


def _must_call(choice: ToolChoice, tools: Sequence[Tool]) -> tuple[str, ...]:
    """Names of tools, one of which has to be called."""
    if choice.type == "any":
        return wanted_calls([tool.name for tool in tools], tools)
    if choice.type != "tool":
        return ()
    if choice.name is None:
        raise unsupported("tool_choice", 'it names no tool: give {"type": "tool", "name": "..."}')
    return wanted_calls([choice.name], tools)


def _schema(body: MessagesRequest) -> str | None:
    """What the answer has to be JSON of."""
    form = (None if body.output_config is None else body.output_config.format) or body.output_format
    return None if form is None else json.dumps(form.schema_)


def _thinking(body: MessagesRequest, usual: Thinking) -> Thinking:
    kind = None if body.thinking is None else body.thinking.type
    effort = None if body.output_config is None else body.output_config.effort
    if kind == "disabled":
        return "off"
    if effort is not None:
        return EFFORTS[effort]
    return "on" if kind == "enabled" else usual


def _messages(body: MessagesRequest) -> tuple[Message, ...]:
    """Turns as templates take them: results of calls are messages of their own, before what the user says in
    the same turn; and neighbours of one role are one message."""
    said = [Message("system", body.system)] if body.system else []
    called: dict[str, str] = {}  # names of tools by the ids of calls
    pictures = PictureReader()
    for place, field in enumerate(body.messages):
        for message in _turn(field, place, called, pictures):
            called |= {call.id: call.name for call in message.tool_calls}
            said.append(message)
    found: list[Message] = []
    for message in one_system(said):
        if found and found[-1].role == message.role != "tool":
            found[-1] = _joined(found[-1], message)
        else:
            found.append(message)
    if not found or found[-1].role == "system":
        raise ApiError(
            400, "The field 'messages' has no question: give a message of the user's.", param="messages"
        )
    return tuple(found)


def _turn(
    field: MessageField, place: int, called: dict[str, str], pictures: PictureReader
) -> Iterator[Message]:
    param = f"messages.{place}.content"
    results = [block for block in field.content if isinstance(block, ToolResult)]
    calls = tuple(block for block in field.content if isinstance(block, ToolCall))
    thoughts = [block.text for block in field.content if isinstance(block, Thoughts)]
    said = Said(tuple(block for block in field.content if isinstance(block, (str, Picture))))
    strange = "results of tools" if field.role != "user" and results else ""
    if field.role != "assistant" and (calls or thoughts):
        strange = "calls of tools" if calls else "thoughts"
    if strange:
        raise ApiError(
            400, f"Message {place + 1} has {strange}, which no message of the role '{field.role}' has.",
            param=param,
        )  # fmt: skip
    for result in results:
        name = called.get(result.call_id, "")
        images = pictures.read(result.said, "tool", param)
        yield Message("tool", result.said.text, tool_name=name, tool_call_id=result.call_id, images=images)
    if said.pieces or calls or thoughts:
        images = pictures.read(said, field.role, param)
        yield Message(field.role, said.text, calls, thoughts="\n\n".join(thoughts), images=images)
    elif not results and field.role != "assistant":
        raise ApiError(400, f"Message {place + 1} has no content: give a text.", param=param)


def _joined(first: Message, second: Message) -> Message:
    content, images = joined(first, second, "\n")
    thoughts = "\n\n".join(text for text in (first.thoughts, second.thoughts) if text)
    calls = first.tool_calls + second.tool_calls
    return Message(first.role, content, calls, thoughts=thoughts, images=images)
