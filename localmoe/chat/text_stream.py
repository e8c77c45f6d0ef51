"""What turns an answer's tokens into text: by the tokenizer, and by whether tools may be called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from localmoe.chat.detokenise import Detokeniser
from localmoe.chat.harmony import HarmonyText, harmony_marks
from localmoe.chat.marked_text import MarkedText, special_marks
from localmoe.chat.reasoning import CLOSE, OPEN
from localmoe.chat.thought_marks import thought_marks
from localmoe.chat.tool_formats import format_of


class TextStream(Protocol):
    """Turns tokens into text as they come."""

    def add(self, tokens: list[int]) -> str:
        """New text, possibly empty."""

    def finish(self) -> str:
        """What was held back."""


def text_stream(tokenizer: Any, prompt: Sequence[int], tool_format: str = "") -> TextStream:
    """What turns an answer to this prompt into text.

    Args:
        tool_format: in which tools may be called, as `tool_formats.format_of` knows it; "": none may.
    """
    channels = harmony_marks(tokenizer)
    if channels:
        return HarmonyText(tokenizer, channels, prompt, calls=bool(tool_format))
    marks = special_marks(tokenizer, format_of(tool_format).special()) if tool_format else {}
    labels: dict[int, str] = {}
    if thoughts := thought_marks(tokenizer):
        opening, closing = thoughts.tokens
        marks |= {opening: OPEN, closing: CLOSE, **dict.fromkeys(thoughts.dropped, "")}
        labels[opening] = thoughts.label
    return MarkedText(tokenizer, marks, labels) if marks else Detokeniser(tokenizer)
