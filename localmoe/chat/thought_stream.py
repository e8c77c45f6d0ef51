"""Thoughts and answer of a reasoning model apart while the text still comes in. Which text is a thought is
decided by `localmoe.chat.reasoning`; this says the same, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from localmoe.chat.reasoning import CLOSE, OPEN


class Parts(NamedTuple):
    """New text of the thoughts and new text of the answer."""

    thoughts: str
    answer: str


class ThoughtStream:
    """After `finish`, all `thoughts` and all `answer` together are those of `split_reasoning`.

    Text is held back only while it may be the beginning of a tag, or white space that a tag would strip.
    """

    def __init__(self, endings: Sequence[str] = ()) -> None:
        """endings: marks with which an answer begins that its thoughts were not ended for."""
        self._endings = tuple(endings)
        self._held = ""
        self._state = "start"  # start: a tag may come; inside: thoughts; answer: the rest is the answer
        self._blocks = 0  # opening tags seen
        self._thought_ended = False  # an earlier block had text
        self._thought_begun = False  # this block has text

    def add(self, text: str) -> Parts:
        """What the text adds, as far as no later text can change it."""
        thoughts, answer = [], ""
        self._held += text
        while True:
            before = self._state, self._blocks
            if self._state == "start":
                answer = self._before_answer()
            elif self._state == "inside":
                thoughts.append(self._inside())
            else:
                answer, self._held = answer + self._held, ""
            if before == (self._state, self._blocks):
                return Parts("".join(thoughts), answer)

    def finish(self) -> Parts:
        """What was held back."""
        held, self._held = self._held, ""
        if self._state == "inside":
            return Parts(self._thought(held.rstrip()), "")
        return Parts("", held.lstrip() if self._blocks else held)

    def _before_answer(self) -> str:
        inside = self._held.lstrip()
        if inside.startswith(OPEN):
            self._state, self._held = "inside", inside[len(OPEN) :]
            self._blocks += 1
        elif not OPEN.startswith(inside):
            answer, self._held = inside if self._blocks else self._held, ""
            self._state = "answer"
            return answer
        return ""

    def _inside(self) -> str:
        thought, closed, rest = self._held.partition(CLOSE)
        begun = [at for mark in self._endings if (at := thought.find(mark)) >= 0]
        if begun:
            text, self._held, self._state = thought[: min(begun)], self._held[min(begun) :], "answer"
            return self._thought(text.rstrip())
        if closed:
            text = self._thought(thought.rstrip())
            self._held, self._state = rest, "start"
            self._thought_ended, self._thought_begun = self._thought_ended or self._thought_begun, False
            return text
        unsure = max(held_back(thought, mark) for mark in (CLOSE, *self._endings))
        sure = thought[: len(thought) - unsure].rstrip()
        self._held = self._held[len(sure) :]
        return self._thought(sure)

    def _thought(self, text: str) -> str:
        """New text of this block, as it stands among the other blocks."""
        if not self._thought_begun:
            text = text.lstrip()
            if text and self._thought_ended:
                self._thought_begun = True
                return "\n\n" + text
            self._thought_begun = bool(text)
        return text


def held_back(text: str, mark: str) -> int:
    """How many of the text's last characters may be the beginning of the mark, which is not in the text."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
