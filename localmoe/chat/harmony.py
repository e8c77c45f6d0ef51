"""gpt-oss's channels as tagged thoughts, and back. Knows tokens and text, no messages.

Source: OpenAI's "Harmony response format": an answer is a row of messages
`<|start|>assistant<|channel|>NAME<|message|>text<|end|>`. The channel `final` is for the user; what is in
any other (`analysis`, `commentary`) are thoughts. These marks are special tokens, which plain decoding
would drop, so that channel names and texts would run into each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from localmoe.chat.detokenise import Detokeniser
from localmoe.chat.reasoning import CLOSE, OPEN, split_reasoning

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_MARKS = (START, CHANNEL, MESSAGE, END, "<|return|>", "<|call|>")
_FINAL = "final"


class TextStream(Protocol):
    """Turns tokens into text as they come."""

    def add(self, tokens: list[int]) -> str:
        """New text, possibly empty."""

    def finish(self) -> str:
        """What was held back."""


def text_stream(tokenizer: Any, prompt: Sequence[int]) -> TextStream:
    """What turns an answer to this prompt into text."""
    marks = harmony_marks(tokenizer)
    return HarmonyText(tokenizer, marks, prompt) if marks else Detokeniser(tokenizer)


def harmony_marks(tokenizer: Any) -> dict[int, str]:
    """Token id -> mark, of a tokenizer that has channels; empty for any other."""
    vocabulary: Mapping[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    if not all(mark in vocabulary for mark in (START, CHANNEL, MESSAGE, END)):
        return {}
    return {vocabulary[mark]: mark for mark in _MARKS if mark in vocabulary}


class HarmonyText:
    """The text of an answer with its thoughts tagged. Begins where the prompt ended: in a message's
    header, or in the middle of a message that is continued."""

    def __init__(self, tokenizer: Any, marks: Mapping[int, str], prompt: Sequence[int]) -> None:
        self._tokenizer, self._marks = tokenizer, marks
        self._text = Detokeniser(tokenizer)
        self._header: list[int] = []  # tokens of the channel's name
        self._in_header = self._has_channel = self._thinking = False
        last_start = max(
            (i for i, token in enumerate(prompt) if marks.get(token) == START), default=len(prompt)
        )
        self.add(list(prompt[last_start:]))  # the prompt's text is not the answer's

    def add(self, tokens: list[int]) -> str:
        """New text, possibly empty."""
        return "".join(self._add(token) for token in tokens)

    def _add(self, token: int) -> str:
        mark = self._marks.get(token)
        if mark is not None:
            return self._take(mark)
        if self._in_header:
            self._header.append(token)
            return ""
        return self._text.add([token])

    def _take(self, mark: str) -> str:
        text = self._text.finish()
        self._text = Detokeniser(self._tokenizer)
        if mark == MESSAGE:
            name = self._tokenizer.decode(self._header, skip_special_tokens=True).split()
            self._thinking = self._has_channel and name[:1] != [_FINAL]
            self._in_header = self._has_channel = False
            return text + (OPEN if self._thinking else "")
        self._header, self._in_header = [], True
        self._has_channel = mark == CHANNEL
        if mark != CHANNEL and self._thinking:
            self._thinking = False
            return text + CLOSE
        return text

    def finish(self) -> str:
        """What was held back."""
        return self._text.finish()


def as_messages(answer: str) -> str:
    """An answer's text with its thoughts tagged, in channels again: what follows `<|start|>assistant`,
    without the end of the last message."""
    split = split_reasoning(answer)
    analysis = f"{CHANNEL}analysis{MESSAGE}{split.thoughts}" if split.thoughts else ""
    if not split.finished:
        return analysis or f"{CHANNEL}analysis{MESSAGE}"
    between = f"{END}{START}assistant" if analysis else ""
    ready = split.answer or not analysis  # else only the thoughts are there, and the model opens the channel
    return analysis + between + (f"{CHANNEL}{_FINAL}{MESSAGE}{split.answer}" if ready else "")
