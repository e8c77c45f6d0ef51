"""The text of an answer while it grows: who wrote which part of it, and how long the model thought. Saves
nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from app.chat_tree import ChatMessage
from localmoe.chat.reasoning import OPEN, split_reasoning
from localmoe.core.stream import StreamEvent

_UNSETTLED = " \t\N{REPLACEMENT CHARACTER}"  # a model writes a space with its next word, and whole characters


def unfinished(message: ChatMessage) -> bool:
    """Whether it is an answer that was stopped or cut, with text that the model can go on with."""
    stopped = message.finish in ("length", "cancelled", "error", None)
    return message.role == "assistant" and stopped and bool(message.content.rstrip(_UNSETTLED))


def to_continue(message: ChatMessage) -> ChatMessage:
    """The same answer, ending where the model can go on."""
    content = message.content.rstrip(_UNSETTLED)
    return ChatMessage(
        message.role, content, message.created, None, "", message.stats, message.thought_s,
        cut_runs(message.runs, len(content)),
    )  # fmt: skip


def cut_runs(runs: Sequence[int], length: int) -> tuple[int, ...]:
    """The runs of a text's first `length` characters."""
    found: list[int] = []
    for run in runs:
        if length <= 0:
            break
        found.append(min(run, length))
        length -= run
    return tuple(found)


class AnswerText:
    """One answer, or the rest of one. `runs` is as in ChatMessage; `thought_s` counts from the first
    token."""

    def __init__(self, before: ChatMessage | None, clock: Callable[[], float] = time.monotonic) -> None:
        """before: the answer that is continued."""
        self._clock = clock
        self._continues = before is not None
        self._parts = [before.content] if before is not None else []
        self._runs = list(before.runs) if before is not None else []
        self._known = before is None or bool(before.runs)
        self._thought_before_s = before.thought_s if before is not None else 0.0
        self._thinking = before is None or not split_reasoning(before.content).finished
        self._began: float | None = None
        self.thought_s = self._thought_before_s

    def text(self) -> str:
        """All of it so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def runs(self) -> tuple[int, ...]:
        """Who wrote what; empty where a part of the text is not known."""
        return tuple(self._runs) if self._known else ()

    def add(self, event: StreamEvent) -> None:
        """One more step."""
        if self._began is None:
            self._began = self._clock()
            if event.opens_reasoning and not self._continues:
                self._append(OPEN, False)
        for place, piece in enumerate(event.pieces or (event.text,)):
            self._append(piece, place < event.drafted)
        if self._thinking:
            split = split_reasoning(self.text())
            if split.thoughts or not split.finished:
                self.thought_s = self._thought_before_s + self._clock() - self._began
            answer = split.answer.strip()
            self._thinking = not answer or OPEN.startswith(answer)  # a tag may still be on its way

    def _append(self, piece: str, drafted: bool) -> None:
        if not piece:
            return
        self._parts.append(piece)
        if drafted and not self._runs:
            self._runs.append(0)  # the model's own part comes first
        last_is_drafted = len(self._runs) % 2 == 0
        if self._runs and drafted == last_is_drafted:
            self._runs[-1] += len(piece)
        else:
            self._runs.append(len(piece))
