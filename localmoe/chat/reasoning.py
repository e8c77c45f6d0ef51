"""Where a reasoning model's thoughts end and its answer begins, in the text that localmoe streams. Needs
no tokenizer but to look at a prompt's end.

Qwen3 and DeepSeek-R1 write `<think>thoughts</think>answer`; some chat templates have written the
`<think>` already, so that such an answer begins inside. gpt-oss's channels are streamed in the same form
(localmoe.chat.harmony), and so are marks that are special tokens (localmoe.chat.thought_marks).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from localmoe.chat.thought_marks import ThoughtMarks, thought_marks

OPEN, CLOSE = "<think>", "</think>"
_OPENING = re.compile(rf"\s*+{OPEN}")
_TAIL = 8  # tokens of a prompt's end that hold an opening tag


@dataclass(frozen=True, slots=True)
class Reasoning:
    """An answer's text in two.

    Attributes:
        thoughts: what the model thought; "" if it did not.
        answer: the rest, always the end of the text.
        finished: the thoughts have ended, or there are none.
    """

    thoughts: str
    answer: str
    finished: bool


def split_reasoning(text: str) -> Reasoning:
    """Thoughts are tagged blocks at the very beginning of a text; tags anywhere else are text."""
    thoughts: list[str] = []
    at = 0  # a text may be nothing but blocks: none is copied
    while opening := _OPENING.match(text, at):
        end = text.find(CLOSE, opening.end())
        thoughts.append(text[opening.end() : end if end >= 0 else len(text)].strip())
        if end < 0:
            return Reasoning(_joined(thoughts), "", False)
        at = end + len(CLOSE)
    return Reasoning(_joined(thoughts), text[at:].lstrip() if thoughts else text, True)


def _joined(thoughts: Sequence[str]) -> str:
    return "\n\n".join(thought for thought in thoughts if thought)


def opens_reasoning(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """Whether the prompt ends with an opening tag, or the model's own mark, so that the answer begins with
    thoughts."""
    tail: str = tokenizer.decode(
        list(prompt[-_TAIL:]), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    marks = thought_marks(tokenizer)
    return tail.rstrip().endswith((OPEN, marks.begun.rstrip()) if marks else OPEN)


def resumed(opening: str, answer: str, marks: ThoughtMarks | None = None) -> str:
    """The text of an unfinished answer as it goes after `opening`, the template's beginning of an answer,
    which may hold the tag that the answer begins with. Thoughts that it opens end at once where the answer
    has none, and where it has ended them the answer goes on without its own. marks: what the model writes in
    the place of tags."""
    begun, closing, end = OPEN, CLOSE, f"\n{CLOSE}\n\n"
    if marks is not None:
        begun, closing = marks.begun, marks.closing
        end = closing
    ahead = opening.rstrip()
    if ahead.endswith(closing) and (split := split_reasoning(answer)).finished:
        return opening + split.answer
    answer = answer if marks is None else _in_marks(answer, marks)
    if not ahead.endswith(begun.rstrip()):
        return opening + answer
    thinks = answer.lstrip().startswith(begun)
    return opening + (answer.lstrip().removeprefix(begun) if thinks else end + answer)


def _in_marks(answer: str, marks: ThoughtMarks) -> str:
    parts: list[str] = []
    at = 0
    while opening := _OPENING.match(answer, at):
        end = answer.find(CLOSE, opening.end())
        thoughts = answer[opening.end() : end if end >= 0 else len(answer)]
        parts += [answer[at : opening.end() - len(OPEN)], marks.begun, thoughts]
        if end < 0:
            return "".join(parts)
        parts.append(marks.closing)
        at = end + len(CLOSE)
    return "".join([*parts, answer[at:]])
