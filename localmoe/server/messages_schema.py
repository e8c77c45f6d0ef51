"""The fields of Anthropic's Messages API that mean something here, with their types. What a message's blocks
say is told apart here; what it means for the engine is decided in `localmoe.server.messages_requests`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from localmoe.core.tools import ToolCall
from localmoe.server.fields import (
    AnyRequest,
    Effort,
    Lenient,
    Stops,
    ToolName,
    refused,
    text_of_part,
    text_of_parts,
    tool_name,
)
from localmoe.server.pictures import NOTHING, Piece, Said, picture, said


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gave."""

    call_id: str
    said: Said


@dataclass(frozen=True, slots=True)
class Thoughts:
    """What the assistant had thought."""

    text: str


Block = Piece | Thoughts | ToolCall | ToolResult


def _blocks(value: object) -> object:
    """A text, or a list of blocks, as what they say."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise refused("it has to be text or a list of blocks")
    return tuple(found for block in value for found in _said(block))


def _said(block: object) -> Iterator[Block]:
    found = block if isinstance(block, dict) else {}
    match found.get("type"):
        case "text":
            yield text_of_part(block)
        case "image":
            yield picture(found)
        case "document":
            yield _document(found)
        case "thinking":
            yield Thoughts(_text(found, "thinking"))
        case "redacted_thinking":
            return  # nobody here can read it
        case "tool_use":
            yield _call(found)
        case "tool_result":
            content = found.get("content")
            yield ToolResult(_text(found, "tool_use_id"), NOTHING if content is None else said(content))
        case kind:
            raise refused(f"a block of type {json.dumps(kind)} is not read here")


def _text(block: dict[str, object], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise refused(f"a block of type {block['type']} needs a text as its '{name}'")
    return value


def _document(block: dict[str, object]) -> str:
    source = block.get("source")
    if (
        not isinstance(source, dict)
        or source.get("type") != "text"
        or not isinstance(source.get("data"), str)
    ):
        raise refused("of documents only plain text is read")
    return str(source["data"])


def _call(block: dict[str, object]) -> ToolCall:
    name, given = tool_name(block.get("name")), block.get("input")
    if not isinstance(given, dict):
        raise refused("a call's 'input' has to be an object")
    return ToolCall(name, json.dumps(given, ensure_ascii=False), _text(block, "id"))


def _system(value: object) -> object:
    return text_of_parts(
        [block for block in value if not _is_header(block)] if isinstance(value, list) else value
    )


def _is_header(block: object) -> bool:
    """Of Claude Code, for the service that it is made for: it has a new number in each request, behind which
    nothing of a KV cache could be used again."""
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith("x-anthropic-billing-header:")


def _tools(value: object) -> object:
    """Tools with a schema; those that Anthropic's own server runs, or its models know by heart, are left
    out."""
    if not isinstance(value, list):
        return value
    return [tool for tool in value if not isinstance(tool, dict) or tool.get("type") in (None, "custom")]


class MessageField(Lenient):
    """One message; content: as it says, block by block."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[tuple[Block, ...], BeforeValidator(_blocks)]


class OfferedTool(Lenient):
    """A tool that is offered."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, object]


class ToolChoice(Lenient):
    """What the model has to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class ThinkingField(Lenient):
    """Whether it thinks before it answers; how many tokens it may take for that is not held."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class FormatField(Lenient):
    """What the answer is JSON of."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, object], Field(alias="schema")]


class OutputConfig(Lenient):
    """How much the model thinks, and the form of what it says."""

    effort: Effort | None = None
    format: FormatField | None = None


class MessagesRequest(AnyRequest):
    """The body of POST /v1/messages, and of /v1/messages/count_tokens. output_format: the older name of
    output_config.format."""

    messages: Annotated[list[MessageField], Field(fail_fast=True)]
    system: Annotated[str | None, BeforeValidator(_system)] = None
    max_tokens: int | None = None
    stop_sequences: Stops = ()
    tools: Annotated[list[OfferedTool], Field(fail_fast=True), BeforeValidator(_tools)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingField | None = None
    output_config: OutputConfig | None = None
    output_format: FormatField | None = None
