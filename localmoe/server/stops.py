"""Cuts an answer at a stop string while its text still comes in. Ends no answer itself."""

from __future__ import annotations

from collections.abc import Sequence

from localmoe.chat.thought_stream import held_back


class StopCutter:
    """Lets text through up to the first stop string to be complete, whatever pieces the text comes in.

    Of two that are complete at the same character the longer one counts. What may still become a stop string
    is held back.

    Attributes:
        found: the stop string that was; "": none yet.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = ""

    def add(self, text: str) -> str:
        """Text that is certain to come before a stop string; nothing once one was found."""
        if self.found:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return text[:at]
        length = len(text) - max((held_back(text, stop) for stop in self._stops), default=0)
        self._held = text[length:]
        return text[:length]

    def finish(self) -> str:
        """What was held back: the answer has ended, and it is no stop string."""
        held, self._held = self._held, ""
        return held
