"""The notations in which models call tools, and which of them a model has. Reads whole calls; where they
begin and end in a text that still comes in is for `localmoe.chat.tool_stream`.

Sources: the models' chat templates, which show their own calls to them in the same notation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localmoe.chat.call_values import JSON, call_of, calls_in_json, calls_of, inside, some
from localmoe.chat.gemma_values import read_gemma_object
from localmoe.chat.harmony import harmony_marks
from localmoe.chat.marked_calls import ARGUMENTS, BEGIN, END, SECTION, SECTION_END, read_kimi
from localmoe.chat.python_calls import read_python
from localmoe.core.tools import Tool, ToolCall

Texts = Mapping[str, frozenset[str]]  # tool -> its parameters that are texts


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One notation.

    Attributes:
        frames: what a block of calls begins and ends with; an end of "" is that of the answer.
        read: the calls of a block, or ValueError.
        sign: what only templates with this notation have in them.
        marks: further special tokens in a block.
        ends_thoughts: a model calls without ending its thoughts; the mark that a block begins with does then.
    """

    frames: tuple[tuple[str, str], ...]
    read: Callable[[str, Texts], list[ToolCall]]
    sign: str
    marks: tuple[str, ...] = ()
    ends_thoughts: bool = False

    def special(self) -> set[str]:
        """Tokens that have to be in the text, though they are special."""
        return {mark for frame in self.frames for mark in frame if mark} | set(self.marks)


def texts_of(tools: Sequence[Tool]) -> Texts:
    """For a format's `read`."""
    return {tool.name: tool.texts for tool in tools}


def find_format(tokenizer: Any) -> str:
    """The name of the notation of calls in a tokenizer's chat template, or whose marks are tokens of it where
    the template shows none, as LFM2's; "": it is none of FORMATS."""
    if harmony_marks(tokenizer):
        return "json"  # which is how HarmonyText writes its calls
    text = template_text(tokenizer)
    for name, one in FORMATS.items():
        if one.sign in text:
            return name
    tokens: set[str] = set(getattr(tokenizer, "get_added_vocab", dict)())
    for name, one in FORMATS.items():
        if one.sign not in _SHARED and {one.sign, *one.frames[0]} <= tokens:
            return name
    return ""


def template_text(tokenizer: Any) -> str:
    """All of its chat templates; "": it has none."""
    template = getattr(tokenizer, "chat_template", None)
    return "\n".join(template.values()) if isinstance(template, dict) else str(template or "")


def format_of(name: str) -> ToolFormat:
    """One of FORMATS, or FORCED."""
    return _FORCED if name == FORCED else FORMATS[name]


_PYTHON = {"True": True, "False": False, "None": None}  # as Qwen3-Coder's template has them


def _typed(value: str, is_text: bool) -> Any:
    """A value that is written without quotes."""
    if is_text:
        return value
    try:
        return JSON.decode(value.strip())
    except ValueError:
        return _PYTHON.get(value.strip(), value)


def _read_json(block: str, texts: Texts) -> list[ToolCall]:
    return calls_in_json(inside(block, "<tool_call>", "</tool_call>"))


def _read_listed(block: str, texts: Texts) -> list[ToolCall]:
    """Jamba's."""
    return some(calls_in_json(inside(block, "<tool_calls>", "</tool_calls>")))


def _read_actions(block: str, texts: Texts) -> list[ToolCall]:
    """Cohere's."""
    return some(calls_in_json(inside(block, "<|START_ACTION|>", "<|END_ACTION|>")))


_GIGACHAT = "<|function_call|>", "function call<|role_sep|>"  # since 3.1, before
_GIGACHAT_MARK = re.compile(rf"\s*(?:{'|'.join(map(re.escape, _GIGACHAT))})\s*")


def _read_gigachat(block: str, texts: Texts) -> list[ToolCall]:
    calls, at = [], 0
    while mark := _GIGACHAT_MARK.match(block, at):
        found, at = JSON.raw_decode(block, mark.end())
        calls += calls_of(found)
    if block[at:].strip():
        raise ValueError("more than calls")
    return some(calls)


_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)",
    re.DOTALL,
)


def _read_functions(block: str, texts: Texts) -> list[ToolCall]:
    """Qwen3-Coder's, Qwen3.5's and Nemotron 3's."""
    found = _FUNCTION.findall(_up_to(block, "</function>"))
    return some([_with_pairs(name, body, _PARAMETER, texts) for name, body in found])


_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _read_arguments(block: str, texts: Texts) -> list[ToolCall]:
    """GLM's, since 4.5."""
    within = inside(block, "<tool_call>", "</tool_call>")
    name, key, rest = within.partition("<arg_key>")
    return [_with_pairs(name, key + rest, _ARGUMENT, texts)]


_INVOKE = re.compile(r"<invoke name=\"?([^\">\n]+)\"?>(.*?)</invoke>", re.DOTALL)
_NAMED = re.compile(r"<parameter name=\"?([^\">\n]+)\"?>(.*?)</parameter>\s*(?=<parameter |\Z)", re.DOTALL)


def _read_invokes(block: str, texts: Texts) -> list[ToolCall]:
    """MiniMax M2's."""
    found = _INVOKE.findall(_up_to(block, "</invoke>"))
    return some([_with_pairs(name, body, _NAMED, texts) for name, body in found])


def _up_to(block: str, end: str) -> str:
    """A block up to the last of its ends, as a pattern would look for one behind each beginning."""
    last = block.rfind(end)
    return "" if last < 0 else block[: last + len(end)]


def _with_pairs(name: str, body: str, pair: re.Pattern[str], texts: Texts) -> ToolCall:
    """A call whose body consists of pairs of a name and a value without quotes."""
    name, body = name.strip(), body.strip()
    kept, values, at = texts.get(name, frozenset()), dict[str, Any](), 0
    while at < len(body):
        found = pair.match(body, at)
        if found is None:  # one that has not ended, or more than pairs
            raise ValueError("no call of a tool")
        key = found[1].strip()
        values[key] = _typed(found[2], key in kept)
        at = found.end()
    return call_of(name, values)


def _read_python(block: str, texts: Texts) -> list[ToolCall]:
    """LFM2's: a list of calls in Python, or of objects in JSON, which it is asked for in words."""
    within = inside(block, "<|tool_call_start|>", "<|tool_call_end|>").strip()
    try:
        return calls_in_json(within)
    except ValueError:
        return read_python(within)


_GEMMA = re.compile(r"\s*call:([^\s{]+)\s*(?=\{)")


def _read_gemma(block: str, texts: Texts) -> list[ToolCall]:
    """Gemma 4's."""
    within = inside(block, "<|tool_call>", "<tool_call|>")
    found = _GEMMA.match(within)
    if found is None:
        raise ValueError("no call of a tool")
    return [call_of(found[1], read_gemma_object(within[found.end() :].strip()))]


def _read_kimi(block: str, texts: Texts) -> list[ToolCall]:
    return read_kimi(block)


_MISTRAL = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\]\s*")


def _read_mistral(block: str, texts: Texts) -> list[ToolCall]:
    """Mistral's: a list of objects, or since 2025 names and arguments in turn."""
    calls = []
    for part in block.split("[TOOL_CALLS]")[1:]:
        if part.lstrip().startswith("["):
            calls += calls_in_json(part)
            continue
        while part.strip():
            head = _MISTRAL.match(part)
            if head is None:
                raise ValueError("no call of a tool")
            arguments, end = JSON.raw_decode(part, head.end())
            calls.append(call_of(head[1], arguments))
            part = part[end:]
    return some(calls)


def _read_forced(block: str, texts: Texts) -> list[ToolCall]:
    return calls_in_json(block)


# of an answer that has to be a call (chat.answer_schema): JSON alone, whatever the model's own notation is
FORCED = "forced"
_FORCED = ToolFormat((("{", ""),), _read_forced, "")

_SHARED = ("<tool_call>",)  # models with such a token write calls in one way or another

# the first whose sign is in a template: those that share marks with others come before them
FORMATS: dict[str, ToolFormat] = {
    "functions": ToolFormat(
        (("<tool_call>", "</tool_call>"), ("<function=", "</function>")), _read_functions, "<function="
    ),
    "arguments": ToolFormat(
        (("<tool_call>", "</tool_call>"),), _read_arguments, "<arg_key>",
        ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "invokes": ToolFormat(
        (("<minimax:tool_call>", "</minimax:tool_call>"),), _read_invokes, "minimax:tool_call"
    ),
    "python": ToolFormat(
        (("<|tool_call_start|>", "<|tool_call_end|>"),), _read_python, "<|tool_call_start|>"
    ),
    "kimi": ToolFormat(
        ((SECTION, SECTION_END), (BEGIN, END)), _read_kimi, SECTION, (ARGUMENTS,), ends_thoughts=True
    ),
    "gemma": ToolFormat((("<|tool_call>", "<tool_call|>"),), _read_gemma, "<|tool_call>", ('<|"|>',)),
    "mistral": ToolFormat((("[TOOL_CALLS]", ""),), _read_mistral, "[TOOL_CALLS]", ("[ARGS]", "[CALL_ID]")),
    "actions": ToolFormat(
        (("<|START_ACTION|>", "<|END_ACTION|>"),), _read_actions, "<|START_ACTION|>"
    ),
    "gigachat": ToolFormat(
        tuple((mark, "") for mark in _GIGACHAT), _read_gigachat, "<|role_sep|>", ("<|role_sep|>",)
    ),
    "listed": ToolFormat((("<tool_calls>", "</tool_calls>"),), _read_listed, "<tool_calls>"),
    "json": ToolFormat((("<tool_call>", "</tool_call>"),), _read_json, "<tool_call>"),
}  # fmt: skip
