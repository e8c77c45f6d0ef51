"""How a chat template is told of a conversation: as it is, or, where it refuses that, with one system message
at the beginning, as Qwen3.5's wants it, or with turns and short ids of calls, as Mistral's do. Renders
none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from localmoe.chat.image_parts import joined
from localmoe.core.types import Message

_ID_LENGTH = 9
_BETWEEN = "\n\n"  # texts that are joined


def tellings(messages: Sequence[Message]) -> Iterator[tuple[Sequence[Message], bool]]:
    """Ways to tell a template of a conversation, of which it may refuse some: the messages, and whether
    arguments of calls are parsed, which some templates join to other text."""
    parsings = (True, False) if any(message.tool_calls for message in messages) else (True,)
    told = list(messages)
    yield from ((told, parsed) for parsed in parsings)
    for otherwise in (_system_first, _in_turns):  # each of what the one before it makes
        before, told = told, otherwise(told)
        if told != before:
            yield from ((told, parsed) for parsed in parsings)


def _with_short_ids(message: Message) -> Message:
    """Of nine letters and digits, as calls have them here: a client may have others from elsewhere."""
    calls = tuple(replace(call, id=_short(call.id)) for call in message.tool_calls)
    result = _short(message.tool_call_id) if message.role == "tool" else ""
    return replace(message, tool_calls=calls, tool_call_id=result)


def _short(call_id: str) -> str:
    """The same each time, as the next turn shows it again."""
    if len(call_id) == _ID_LENGTH and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:_ID_LENGTH]


def _system_first(messages: Sequence[Message]) -> list[Message]:
    """The system speaks once, at the beginning; later on it stands in the user's place. Ids are short."""
    found: list[Message] = []
    for message in map(_with_short_ids, messages):
        if message.role == "system" and found and found[-1].role == "system":
            found[-1] = _joined(found[-1], message)
        else:
            found.append(replace(message, role="user") if message.role == "system" and found else message)
    return found


def _in_turns(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role are one message, and what the user says behind a tool's result stands with that,
    as the turn is the assistant's."""
    found: list[Message] = []
    for message in messages:
        if found and _is_one_turn(found[-1], message):
            found[-1] = _joined(found[-1], message)
        else:
            found.append(message)
    return found


def _is_one_turn(first: Message, second: Message) -> bool:
    if first.role == "tool":
        return second.role == "user"
    return first.role == second.role and not first.tool_calls


def _joined(first: Message, second: Message) -> Message:
    content, images = joined(first, second, _BETWEEN)
    thoughts = _BETWEEN.join(filter(None, (first.thoughts, second.thoughts)))
    return replace(first, content=content, images=images, tool_calls=second.tool_calls, thoughts=thoughts)
