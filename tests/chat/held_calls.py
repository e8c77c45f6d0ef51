"""Answers that may call tools, and how much of them the grammar of calls allows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import tokenizers
import transformers
from small_tokenizers import DEMO, channels

from localmoe.chat.call_grammar import calls_grammar
from localmoe.chat.token_grammar import AnswerGrammar, Vocabulary
from localmoe.chat.tool_formats import find_format, format_of
from localmoe.chat.tool_stream import ToolStream
from localmoe.core.tools import Tool, ToolCall

FIELDS = {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}, "exact": {"type": "boolean"}}
TOOLS = (
    Tool("weather", json.dumps({
        "name": "weather",
        "parameters": {"type": "object", "properties": FIELDS, "required": ["city"],
                       "additionalProperties": False},
    })),
    Tool("weather_now", json.dumps({"name": "weather_now"})),
    Tool("get-any.v1", json.dumps({"name": "get-any.v1", "parameters": {"type": "object"}})),
    Tool("any", json.dumps({"name": "any", "parameters": {"type": "object", "multipleOf": 1, "properties": {
        "a": {"type": "number", "multipleOf": 123456789}}}})),
)  # fmt: skip


@cache
def marked(template: str, *marks: str, special: bool = False) -> Any:
    """The demo model's tokenizer with these marks as tokens."""
    made = transformers.AutoTokenizer.from_pretrained(DEMO)
    made.add_tokens(
        [tokenizers.AddedToken(mark, special=special, normalized=False) for mark in marks],
        special_tokens=special,
    )
    made.chat_template = template
    return made


@cache
def vocabulary(tokenizer: Any) -> Vocabulary:
    ends = ["<|return|>", "<|call|>"] if tokenizer is channels() else [tokenizer.eos_token]
    return Vocabulary(tokenizer, tokenizer.convert_tokens_to_ids(ends))


def ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def grammar(
    tokenizer: Any, prompt: list[int], tools: Sequence[Tool] = TOOLS, schema: str | None = None
) -> AnswerGrammar:
    ends = [tokenizer.eos_token_id, -1, 10**6]
    lark = calls_grammar(tokenizer, prompt, tools, find_format(tokenizer), ends, schema=schema)
    assert lark is not None
    return vocabulary(tokenizer).grammar(lark, len(prompt))


def accepted(
    tokenizer: Any, text: str, prompt: str = "hi", tools: Sequence[Tool] = TOOLS, schema: str | None = None
) -> str:
    """As much of an answer as is allowed, with a dot for its end."""
    before = ids(tokenizer, prompt)
    end = [] if text.endswith(("<|call|>", "<|return|>")) else [tokenizer.eos_token_id]
    tokens = [*ids(tokenizer, text), *end]
    valid = grammar(tokenizer, before, tools, schema).valid(before, tokens)
    ended = bool(end) and valid == len(tokens)
    return tokenizer.decode(tokens[: valid - ended], skip_special_tokens=False) + "." * ended  # type: ignore[no-any-return]


def calls_in(notation: str, text: str) -> list[ToolCall]:
    """As they are read."""
    stream = ToolStream(format_of(notation), TOOLS)
    return [part for part in (*stream.add(text), *stream.finish()) if isinstance(part, ToolCall)]
