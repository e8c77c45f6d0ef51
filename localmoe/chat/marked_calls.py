"""Calls whose name and JSON stand between marks of their own, several of them in a section: Kimi's. Its
id says which tool is called: `functions.NAME:COUNT`.

Sources: the models' chat templates.
"""

from __future__ import annotations

import re

from localmoe.chat.call_values import JSON, call_of, inside, some
from localmoe.core.tools import ToolCall

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KIMI_MARKS = SECTION, SECTION_END, BEGIN, ARGUMENTS, END
# some answers leave out the first word, or the count
_CALL = re.compile(
    rf"\s*{re.escape(BEGIN)}\s*(?:functions\.)?([^\s<]+?)(?::\d*)?\s*{re.escape(ARGUMENTS)}\s*"
)
_END = re.compile(rf"\s*(?:{re.escape(END)})?\s*")


def read_kimi(block: str) -> list[ToolCall]:
    """
    Raises:
        ValueError: it is more than calls, or none.
    """
    text, calls, at = inside(block, SECTION, SECTION_END), [], 0
    while at < len(text):
        head = _CALL.match(text, at)
        if head is None:
            raise ValueError("no call of a tool")
        arguments, at = JSON.raw_decode(text, head.end())
        calls.append(call_of(head[1], arguments))
        end = _END.match(text, at)
        at = end.end() if end else at
    return some(calls)


def kimi_id(name: str, count: int) -> str:
    """Of the call that is so many calls behind a conversation's first one."""
    return f"functions.{name}:{count}"
