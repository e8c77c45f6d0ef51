"""The fields of OpenAI's requests for responses that mean something here, with their types. What items become
in a conversation is decided where orders are made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from localmoe.server.fields import (
    AnyRequest,
    Arguments,
    Effort,
    Lenient,
    ToolName,
    refused,
    text_of_parts,
)
from localmoe.server.pictures import Said, said

_SAID = ("input_text", "output_text", "text")


def _said(value: object) -> Said:
    """What a message or a tool says; the assistant's refusals are texts like others."""
    if isinstance(value, list):
        value = [
            {"type": "text", "text": part.get("refusal")}
            if isinstance(part, dict) and part.get("type") == "refusal"
            else part
            for part in value
        ]
    return said(value, _SAID)


def _thought(value: object) -> object:
    return text_of_parts(value, ("reasoning_text", "text"))


def _summary(value: object) -> object:
    return text_of_parts(value, ("summary_text",))


class MessageItem(Lenient):
    """A message. developer: OpenAI's newer name of system."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Said, PlainValidator(_said)]


class CallItem(Lenient):
    """A call that an earlier answer had."""

    name: ToolName
    arguments: Arguments = "{}"
    call_id: str | None = None


class ResultItem(Lenient):
    """What a called tool answered."""

    output: Annotated[Said, PlainValidator(_said)]
    call_id: str | None = None
    name: str | None = None


class ReasoningItem(Lenient):
    """What the assistant thought; what is encrypted was by another server, and is not read."""

    content: Annotated[str | None, BeforeValidator(_thought)] = None
    summary: Annotated[str | None, BeforeValidator(_summary)] = None


Item = MessageItem | CallItem | ResultItem | ReasoningItem
_ITEMS: Mapping[str, type[Item]] = {
    "message": MessageItem, "function_call": CallItem, "function_call_output": ResultItem,
    "reasoning": ReasoningItem,
}  # fmt: skip


def _item(value: object) -> Item:
    """By its type, so that a refusal names a place in the item and no other type."""
    if not isinstance(value, dict):
        raise refused('an item has to be an object, such as {"role": "user", "content": "..."}')
    kind = value.get("type")
    if kind is None:  # of messages, and of references, it may be left out
        kind = "item_reference" if "id" in value and "role" not in value else "message"
    if kind == "item_reference":
        raise refused("nothing is stored that an 'item_reference' could name: give the item itself")
    found = _ITEMS.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise refused(f"items of type '{kind}' are not known; {', '.join(_ITEMS)} are")
    return found.model_validate(value)


def _items(value: object) -> object:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list):
        return value
    raise refused("it has to be a text or a list of items")


def _finite(value: object) -> object:
    """Answers repeat it, and JSON has no word for what is not finite."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise refused("a number in it is not finite, as 1e999 is") from None
    return value


class FunctionField(Lenient):
    """What is checked of a function that is offered."""

    name: ToolName
    parameters: dict[str, object] | None = None


def _tool(value: object) -> dict[str, object] | None:
    """A function as it was given, as what its definition says goes to the model; None: of another type."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str):
        raise refused('a tool has to be {"type": "function", "name": "...", "parameters": {...}}')
    if kind != "function":
        return None
    FunctionField.model_validate(_finite(value))
    return value


def _choice(value: object) -> object:
    if value is None or isinstance(value, (str, dict)):
        return _finite(value)
    raise refused('it has to be "auto", "none", "required" or {"type": "function", "name": "..."}')


def _metadata(value: object) -> object:
    """A client's own, which means nothing here: what answers could not repeat is ignored."""
    is_texts = isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    return value if is_texts else {}


class TextField(Lenient):
    """What the text of the answer is like."""

    format: Annotated[dict[str, object] | None, BeforeValidator(_finite)] = None


class ReasoningField(Lenient):
    """How long the model thinks."""

    effort: Effort | None = None


class ResponsesRequest(AnyRequest):
    """The body of POST /v1/responses. previous_response_id, conversation, prompt, background: all need what
    is stored."""

    input: Annotated[
        list[Annotated[Item, PlainValidator(_item)]], Field(fail_fast=True), BeforeValidator(_items)
    ]
    instructions: str | None = None
    tools: (
        Annotated[
            list[Annotated[dict[str, object] | None, PlainValidator(_tool)]],
            Field(fail_fast=True),
        ]
        | None
    ) = None
    tool_choice: Annotated[str | dict[str, object] | None, BeforeValidator(_choice)] = None
    text: TextField | None = None
    reasoning: ReasoningField | None = None
    max_output_tokens: int | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_metadata)] = Field(default_factory=dict)
    previous_response_id: object = None
    conversation: object = None
    prompt: object = None
    background: bool | None = None

    def functions(self) -> list[dict[str, object]]:
        """The tools that the model can be offered, whole. The server runs none, so a model could not use the
        others."""
        return [tool for tool in self.tools or () if tool is not None]
