"""From OpenAI's requests for responses to the engine's: items to messages, and refusals of what needs a
store. Parses no JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from localmoe.core.config import GenerationRequest
from localmoe.core.tools import Tool, ToolCall
from localmoe.core.types import Message
from localmoe.server.errors import ApiError
from localmoe.server.order import (
    EFFORTS,
    Order,
    no_such_model,
    one_system,
    order_of,
    schema_text,
    tool_of,
    unsupported,
    wanted_calls,
)
from localmoe.server.pictures import PictureReader
from localmoe.server.responses_schema import (
    CallItem,
    Item,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    ResultItem,
)
from localmoe.server.settings import ServerSettings

_SCHEMA_FORM = '{"type": "json_schema", "name": "...", "schema": {...}}'
_CHOICE_FORM = '{"type": "function", "name": "..."}'


def responses_order(body: ResponsesRequest, model: str, settings: ServerSettings) -> Order:
    """The order of a request to the model of this name; `settings` hold where it says nothing.

    Raises:
        ApiError: it asks for what the engine does not do, for what is stored, or for another model.
    """
    _check(body, model)
    messages = _messages(body.input)
    if not messages:
        raise ApiError(
            400, "The field 'input' says nothing: give a text or at least one message.", param="input"
        )
    offered = () if body.tool_choice == "none" else body.functions()
    tools = tuple(tool_of({key: value for key, value in tool.items() if key != "type"}) for tool in offered)
    schema = _schema(body)
    instructed = [Message("system", body.instructions)] if body.instructions else []
    effort = None if body.reasoning is None else body.reasoning.effort
    must_call = _must_call(body.tool_choice, tools)
    if must_call:  # no answer that the schema is about
        schema = None
    generation = GenerationRequest(
        messages=tuple(one_system([*instructed, *messages])), tools=tools, json_schema=schema,
        thinking=settings.thinking if effort is None else EFFORTS[effort],
        must_call=must_call,
    )  # fmt: skip
    return order_of(body, generation, settings.sampling, max_new_tokens=body.max_output_tokens)


def _check(body: ResponsesRequest, model: str) -> None:
    if body.model not in (None, model):
        raise no_such_model(str(body.model), model)
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise unsupported(name, "no answer is stored, so send the whole conversation as 'input'")
    if body.prompt is not None:
        raise unsupported("prompt", "no prompts are stored, so send its text as 'instructions'")
    if body.background:
        raise unsupported("background", "no answer is stored, so wait for it or let it be streamed")


def _must_call(choice: str | dict[str, object] | None, tools: Sequence[Tool]) -> tuple[str, ...]:
    """Names of tools, one of which has to be called."""
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        return wanted_calls([tool.name for tool in tools], tools)
    name = choice.get("name") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(name, str):
        raise unsupported("tool_choice", f"give 'auto', 'none', 'required' or {_CHOICE_FORM}")
    return wanted_calls([name], tools)


def _schema(body: ResponsesRequest) -> str | None:
    """What the answer has to be JSON of."""
    form: Mapping[str, object] = (body.text.format if body.text is not None else None) or {}
    return schema_text(form.get("type", "text"), form.get("schema"), "text.format", _SCHEMA_FORM)


def _messages(items: Sequence[Item]) -> tuple[Message, ...]:
    called = {item.call_id: item.name for item in items if isinstance(item, CallItem) and item.call_id}
    found: list[Message] = []
    turn, pictures = _Turn(), PictureReader()
    for place, item in enumerate(items):
        if isinstance(item, ReasoningItem):
            turn.think(item.content or item.summary or "")
        elif isinstance(item, CallItem):
            turn.call(ToolCall(item.name, item.arguments, item.call_id or ""))
        elif isinstance(item, MessageItem) and item.role == "assistant":
            pictures.read(item.content, item.role, f"input.{place}.content")  # refuses them
            turn.say(item.content.text)
        else:
            found += turn.end()
            found.append(_of_others(item, f"input.{place}", called, pictures))
    return (*found, *turn.end())


def _of_others(
    item: MessageItem | ResultItem, param: str, called: Mapping[str, str], pictures: PictureReader
) -> Message:
    """called: names of tools by the ids of all calls."""
    if isinstance(item, ResultItem):
        call_id = item.call_id or ""
        name = item.name or called.get(call_id, "")
        images = pictures.read(item.output, "tool", f"{param}.output")
        return Message("tool", item.output.text, tool_name=name, tool_call_id=call_id, images=images)
    images = pictures.read(item.content, item.role, f"{param}.content")
    return Message("user" if item.role == "user" else "system", item.content.text, images=images)


@dataclass(frozen=True, slots=True)
class _Said:
    """One message of the assistant while its items are gathered."""

    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        """All of it."""
        return Message("assistant", _joined(self.texts), tuple(self.calls), thoughts=_joined(self.thoughts))


class _Turn:
    """Items of the assistant in a row, which are one message; a text behind calls begins another."""

    def __init__(self) -> None:
        self._said: list[_Said] = []
        self._thoughts: list[str] = []  # before an item that is not known yet

    def think(self, text: str) -> None:
        """Thoughts belong to what follows them."""
        if text:
            self._thoughts.append(text)

    def say(self, text: str) -> None:
        """A text, which many are one of."""
        if self._said and self._said[-1].calls:
            self._said.append(_Said())
        self._last().texts.append(text)

    def call(self, call: ToolCall) -> None:
        """A call, behind what was said."""
        self._last().calls.append(call)

    def end(self) -> list[Message]:
        """Its messages; the next item begins a turn."""
        if self._thoughts:  # of an answer that was cut before it said anything
            self._last()
        said, self._said = self._said, []
        return [one.message() for one in said]

    def _last(self) -> _Said:
        """What the next item belongs to, with the thoughts before it."""
        if not self._said:
            self._said.append(_Said())
        last = self._said[-1]
        last.thoughts.extend(self._thoughts)
        self._thoughts.clear()
        return last


def _joined(texts: Sequence[str]) -> str:
    """All of them, as paragraphs."""
    return "\n\n".join(filter(None, texts))
