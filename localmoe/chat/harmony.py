"""gpt-oss's channels as tagged thoughts, and back. Knows tokens and text, no messages.

Source: OpenAI's "Harmony response format": an answer is a row of messages
`<|start|>assistant<|channel|>NAME<|message|>text<|end|>`. The channel `final` is for the user; what is in
any other (`analysis`, `commentary`) are thoughts. These marks are special tokens, which plain decoding
would drop, so that channel names and texts would run into each other. A message `to=functions.NAME` calls a
tool with the JSON that is its text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from localmoe.chat.detokenise import Detokeniser
from localmoe.chat.reasoning import CLOSE, OPEN, split_reasoning

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CONSTRAIN, CALL = "<|constrain|>", "<|call|>"
_MARKS = (START, CHANNEL, MESSAGE, END, CONSTRAIN, "<|return|>", CALL)
_FINAL = "final"
_TO_TOOL = "to=functions."
_CALL_END = "}</tool_call>"


# of each tokenizer: thousands of added tokens take as many microseconds each time
_FOUND = WeakKeyDictionary[Any, dict[int, str]]()


def harmony_marks(tokenizer: Any) -> dict[int, str]:
    """Token id -> mark, of a tokenizer that has channels; empty for any other."""
    if tokenizer not in _FOUND:
        _FOUND[tokenizer] = _find_marks(tokenizer)
    return _FOUND[tokenizer]


def _find_marks(tokenizer: Any) -> dict[int, str]:
    vocabulary: Mapping[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    if not all(mark in vocabulary for mark in (START, CHANNEL, MESSAGE, END)):
        return {}
    return {vocabulary[mark]: mark for mark in _MARKS if mark in vocabulary}


class HarmonyText:
    """The text of an answer with its thoughts tagged. Begins where the prompt ended: in a message's
    header, or in the middle of a message that is continued."""

    def __init__(
        self, tokenizer: Any, marks: Mapping[int, str], prompt: Sequence[int], *, calls: bool = False
    ) -> None:
        """calls: those of tools are written as `<tool_call>{"name": ..., "arguments": ...}</tool_call>`; else
        they are thoughts."""
        self._tokenizer, self._marks, self._calls = tokenizer, marks, calls
        self._text = Detokeniser(tokenizer)
        self._header: list[int] = []  # tokens of the role or the channel's name
        self._words: list[str] = []  # of what a header has said so far
        self._channel = 0  # which of them is its name
        self._in_header = self._has_channel = self._thinking = self._calling = False
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
            return "" if mark == CONSTRAIN and not self._in_header else self._take(mark)
        if self._in_header:
            self._header.append(token)
            return ""
        return self._text.add([token])

    def _take(self, mark: str) -> str:
        text = self._text.finish()
        self._text = Detokeniser(self._tokenizer)
        said = self._tokenizer.decode(self._header, skip_special_tokens=True).split()
        self._header = []
        if mark in (CHANNEL, CONSTRAIN):
            self._words += said
            self._in_header, self._has_channel = True, self._has_channel or mark == CHANNEL
            if mark == CHANNEL:
                self._channel = len(self._words)
            return text
        if mark == MESSAGE:
            return text + self._begin_message([*self._words, *said])
        self._words, self._in_header, self._has_channel = [], True, False
        return text + self._end_message()

    def _begin_message(self, words: Sequence[str]) -> str:
        """words: of its header."""
        self._thinking = self._has_channel and words[self._channel : self._channel + 1] != [_FINAL]
        self._words, self._in_header, self._has_channel = [], False, False
        to = [word.removeprefix(_TO_TOOL) for word in words if word.startswith(_TO_TOOL)]
        if self._calls and to:
            self._thinking, self._calling = False, True
            return f'<tool_call>{{"name": {json.dumps(to[-1])}, "arguments": '
        return OPEN if self._thinking else ""

    def _end_message(self) -> str:
        thinking, self._thinking = self._thinking, False
        calling, self._calling = self._calling, False
        return _CALL_END if calling else CLOSE if thinking else ""

    def finish(self) -> str:
        """What was held back; a call ends with the answer, as the mark of its end is the answer's too."""
        return self._text.finish() + (self._end_message() if self._calling else "")


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
