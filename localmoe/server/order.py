"""What one request asks of the engine, whatever API it came by, and the refusals that APIs share. Parses no
JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from localmoe.core.config import LEAST_TEMPERATURE, GenerationRequest, SamplingConfig, Thinking
from localmoe.core.errors import ConfigError
from localmoe.core.tools import Tool
from localmoe.core.types import Message
from localmoe.server.errors import ApiError
from localmoe.server.fields import AnyRequest

EFFORTS: Mapping[str, Thinking] = {
    "none": "off", "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high",
    "max": "high",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Order:
    """What one request asks for.

    Attributes:
        stops: texts before which the answer ends.
        streamed: in pieces as they come.
        splits_thoughts: thoughts are told apart from the answer; else it is what comes after a prompt, as it
            is.
    """

    generation: GenerationRequest
    stops: tuple[str, ...]
    streamed: bool
    splits_thoughts: bool = True


def order_of(
    body: AnyRequest,
    generation: GenerationRequest,
    defaults: SamplingConfig,
    *,
    max_new_tokens: int | None,
    stops: tuple[str, ...] = (),
    splits_thoughts: bool = True,
) -> Order:
    """The order of a request; `defaults` hold where it says nothing of how tokens are chosen.

    Raises:
        ApiError: a number is out of range.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    if 0 < given.get("temperature", 0) < LEAST_TEMPERATURE:
        given["temperature"] = 0.0  # as who says 1e-8 means it
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
    return Order(generation, stops, bool(body.stream), splits_thoughts)


def unsupported(field: str, reason: str) -> ApiError:
    """A field that the engine cannot do."""
    return ApiError(400, f"The field '{field}' is not supported: {reason}.", param=field)


def no_such_model(asked: str, model: str) -> ApiError:
    """Another model is loaded."""
    return ApiError(
        404, f"There is no model '{asked}' here: the one that is loaded is '{model}'.", param="model",
        code="model_not_found",
    )  # fmt: skip


def one_system(messages: Iterable[Message]) -> Iterator[Message]:
    """What the system says at the beginning is one message, and later on it stands in the user's place: many
    a template refuses anything else."""
    first: Message | None = None
    begun = False
    for message in messages:
        if message.role == "system" and not begun:
            said = [message.content] if first is None else [first.content, message.content]
            first = replace(message, content="\n\n".join(filter(None, said)))
            continue
        if first is not None and not begun:
            yield first
        begun = True
        yield replace(message, role="user") if message.role == "system" else message
    if first is not None and not begun:
        yield first


def tool_of(definition: Mapping[str, object]) -> Tool:
    """A tool by OpenAI's object of name, description and parameters; what else that says goes to the model as
    it is."""
    usual: dict[str, object] = {"description": "", "parameters": {"type": "object", "properties": {}}}
    usual |= {name: value for name, value in definition.items() if value is not None}
    return Tool(str(definition["name"]), json.dumps(usual))


def wanted_calls(names: Sequence[str], tools: Sequence[Tool]) -> tuple[str, ...]:
    """Names of tools, one of which has to be called.

    Raises:
        ApiError: they are not among `tools`, or there are none.
    """
    offered = {tool.name for tool in tools}
    missing = next((name for name in names if name not in offered), None)
    if not names or missing is not None:
        what = "no tools are" if missing is None else f"no tool '{missing}' is"
        raise ApiError(
            400, f"The field 'tool_choice' cannot be used: {what} in 'tools'.", param="tool_choice"
        )
    return tuple(names)


def schema_text(kind: object, schema: object, field: str, form: str) -> str | None:
    """What the answer has to be JSON of; None: it is free. kind: text, json_object or json_schema. form: how
    `field` is written with a schema.

    Raises:
        ApiError: it is another kind, or has no schema.
    """
    if kind == "text":
        return None
    if kind == "json_object":
        return json.dumps({"type": "object"})
    if kind != "json_schema":
        raise unsupported(field, "its type has to be 'text', 'json_object' or 'json_schema'")
    if not isinstance(schema, dict):
        raise ApiError(400, f"The field '{field}' has no schema: give {form}.", param=field)
    return json.dumps(schema)
