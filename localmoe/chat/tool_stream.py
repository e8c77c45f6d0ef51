"""Calls of tools and the rest of an answer apart while the text still comes in. How a call is read is for
`localmoe.chat.tool_formats`."""

from __future__ import annotations

from collections.abc import Sequence

from localmoe.chat.thought_stream import held_back
from localmoe.chat.tool_formats import ToolFormat, texts_of
from localmoe.core.tools import Tool, ToolCall

Found = tuple[str | ToolCall, ...]  # new text without calls, and new calls, in their order
# blocks that are looked at once the answer has ended: a model that repeats marks begins many
_MOST_READ = 1000


class ToolStream:
    """Nothing is lost: what looks like a call but cannot be read is text, at the latest when the answer has
    ended. White space between text and a call, and between calls, is dropped."""

    def __init__(self, form: ToolFormat, tools: Sequence[Tool]) -> None:
        self._form, self._texts = form, texts_of(tools)
        self._held = ""
        self._space = ""  # before a block that has begun
        self._frame: tuple[str, str] | None = None  # of that block
        self._tried = 0  # so far into `held` no end is that of a block that can be read
        self._left = _MOST_READ
        self._called = self._cut = False

    def add(self, text: str) -> Found:
        """What the text adds, as far as no later text can change it."""
        self._held += text
        return self._go_on(ended=False)

    def finish(self, *, cut: bool = False) -> Found:
        """What was held back. cut: the answer was not ended by the model, so that a call without an end may
        lack arguments."""
        self._cut = cut
        found = self._go_on(ended=True)
        rest, self._held = self._held, ""
        return found if self._called and not rest.strip() else (*found, rest)

    def _go_on(self, *, ended: bool) -> Found:
        parts: list[str | ToolCall] = []
        while True:
            if self._frame is None:
                sure, begun = self._before_block()
                parts.append(sure)
                if not begun:
                    return tuple(parts)
            block = self._block(ended=ended)
            if block is not None:
                parts += block
                self._called, self._frame, self._space = True, None, ""
            elif ended:  # it is text, and a block may begin behind its mark
                assert self._frame is not None
                mark = self._frame[0]
                parts.append(self._space + mark)
                self._held, self._frame, self._space = self._held.removeprefix(mark), None, ""
            else:
                return tuple(parts)

    def _before_block(self) -> tuple[str, bool]:
        """Text that belongs to no call; whether a block begins behind it, with which `held` begins then."""
        openings = [(at, frame) for frame in self._form.frames if (at := self._held.find(frame[0])) >= 0]
        if openings:
            (at, self._frame), self._tried = min(openings), 0
            before, self._held = self._held[:at], self._held[at:]
            sure = before.rstrip()
            self._space = before[len(sure) :]
            return sure, True
        unsure = max(held_back(self._held, opening) for opening, _ in self._form.frames)
        sure = self._held[: len(self._held) - unsure].rstrip()
        self._held = self._held[len(sure) :]
        return sure, False

    def _block(self, *, ended: bool) -> list[ToolCall] | None:
        """The calls of the block that `held` begins with, which is taken from it; None while it has no end,
        or cannot be read. What it says may hold what ends a block."""
        assert self._frame is not None
        opening, closing = self._frame
        end = max(len(opening), self._tried)
        while closing and (end := self._held.find(closing, end)) >= 0 and self._left:
            self._left -= ended
            end += len(closing)
            calls = self._read(self._held[:end])
            if calls is not None:
                self._held = self._held[end:]
                return calls
            self._tried = end
        if not ended or self._cut or not self._left:
            return None
        self._left -= 1
        calls = self._read(self._held + closing)  # some models end without it
        if calls is not None:
            self._held = ""
        return calls

    def _read(self, block: str) -> list[ToolCall] | None:
        try:
            return self._form.read(block, self._texts)
        except (ValueError, RecursionError):  # the latter of what is nested too deep
            return None
