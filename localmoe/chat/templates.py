"""A model's chat template: where it lies, in which of two forms it takes what a message says, whether it
knows tools, and messages as it takes them. Decides no wording.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from localmoe.chat.harmony import harmony_marks
from localmoe.chat.image_parts import as_picture_parts
from localmoe.chat.marked_calls import kimi_id
from localmoe.chat.python_calls import write_python
from localmoe.chat.tool_formats import find_format, format_of, template_text
from localmoe.core.errors import CheckpointError
from localmoe.core.tools import Tool
from localmoe.core.types import Message
from localmoe.hub.weight_files import read_json_object

_LEGACY_FILE = "chat_template.json"
_PROBE = "localmoe-7f3a"  # no template says it by itself


def adopt_template(tokenizer: Any, folder: Path) -> None:
    """Give a tokenizer without a template that of chat_template.json, where older models for text and
    pictures have it: transformers reads that file for pictures' processors alone.

    Raises:
        CheckpointError: the file cannot be read, or holds no template.
    """
    path = folder / _LEGACY_FILE
    if getattr(tokenizer, "chat_template", None) or not path.is_file():
        return
    template = read_json_object(path).get("chat_template")
    if not isinstance(template, str):
        raise CheckpointError(f"{path} holds no chat template: download the model again.")
    tokenizer.chat_template = template


def takes_parts(tokenizer: Any) -> bool:
    """Whether its template leaves out what a message says unless that is a list of parts, as some of models
    for text and pictures do."""
    return not _shows(tokenizer, _PROBE) and _shows(tokenizer, as_parts(_PROBE))


def as_parts(content: str) -> list[dict[str, str]]:
    """A text as such a template takes it."""
    return [{"type": "text", "text": content}]


def knows_tools(tokenizer: Any) -> bool:
    """Whether its template tells the model of tools."""
    offered = [Tool(_PROBE, json.dumps({"name": _PROBE, "description": "", **_NOTHING}))]
    return any(_shows(tokenizer, content, offered) for content in (_SAID, as_parts(_SAID)))


_SAID = "?"  # something: some templates refuse a message that says nothing
_NOTHING = {"parameters": {"type": "object", "properties": {}}}


def as_turns(
    messages: Sequence[Message], form: Callable[[str], object], *, parsed: bool = True
) -> list[dict[str, Any]]:
    """Messages as templates take them.

    Args:
        form: of what a message without pictures says.
        parsed: arguments of calls are objects, as most templates want them; else JSON.
    """
    return [_turn(message, form, parsed) for message in messages]


def in_own_form(tokenizer: Any, messages: Sequence[Message]) -> Sequence[Message]:
    """With calls as the model wrote them, where its template would not show them so."""
    if harmony_marks(tokenizer):
        return [_in_one(message) for message in messages]
    match find_format(tokenizer):
        case "kimi":
            return _with_ids(messages)
        case "python" if "tool_calls" not in template_text(tokenizer):
            return [_with_calls(message) for message in messages]
    return messages


def _in_one(message: Message) -> Message:
    """gpt-oss's template takes thoughts before a call or a text, which it shows as thoughts, but not both. It
    knows no pictures."""
    if not (message.tool_calls and message.thoughts and message.content) or message.images:
        return message
    return replace(message, content="", thoughts=f"{message.thoughts}\n\n{message.content}")


def _with_ids(messages: Sequence[Message]) -> list[Message]:
    """Kimi's name the tool, and a model whose template shows it others writes such itself, which nobody can
    read. Results without an id are those of calls in turn."""
    found: list[Message] = []
    known: dict[str, str] = {}  # by the ids that a client has
    waiting: list[str] = []  # of calls without a result
    count = 0
    for message in messages:
        calls = [replace(call, id=kimi_id(call.name, count + i)) for i, call in enumerate(message.tool_calls)]
        known |= {old.id: new.id for old, new in zip(message.tool_calls, calls, strict=True) if old.id}
        waiting += [call.id for call in calls]
        count += len(calls)
        call_id = known.get(message.tool_call_id, message.tool_call_id)
        if message.role == "tool":
            call_id = call_id or next(iter(waiting), "")
            waiting = [one for one in waiting if one != call_id]
        found.append(replace(message, tool_calls=tuple(calls), tool_call_id=call_id))
    return found


def _with_calls(message: Message) -> Message:
    """LFM2's template leaves them out: the model would read results of calls that it did not make."""
    if not message.tool_calls:
        return message
    (opening, closing), *_ = format_of("python").frames
    return replace(message, content=f"{message.content}{opening}{write_python(message.tool_calls)}{closing}")


def _turn(message: Message, form: Callable[[str], object], parsed: bool) -> dict[str, Any]:
    content = as_picture_parts(message) if message.images else form(message.content)
    turn: dict[str, Any] = {"role": message.role, "content": content}
    if message.thoughts:  # under all names that templates have for them
        turn |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), message.thoughts)
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {
                    "name": call.name,
                    "arguments": json.loads(call.arguments) if parsed else call.arguments,
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_name:
        turn["name"] = message.tool_name
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _shows(tokenizer: Any, content: object, tools: Sequence[Tool] = ()) -> bool:
    turns = [{"role": "user", "content": content}]
    offered = [tool.as_dict() for tool in tools] or None
    try:
        text = tokenizer.apply_chat_template(turns, tools=offered, tokenize=False, add_generation_prompt=True)
    except Exception:  # a template is a program: it may raise anything
        return False
    return _PROBE in text
