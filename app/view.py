"""What one open page looks at."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

Updates = dict[Any, Any]  # widget -> its new value or properties
Seen = str  # JSON: part of the page -> key of what the page shows
WINDOW = 40  # messages of finished history that are drawn at first, and more at every "show earlier"


@dataclass(frozen=True, slots=True)
class View:
    """Written by the user's actions alone, never by the timer."""

    chat_id: str | None = None
    shown: int = WINDOW
    notice: str = ""
    good: bool = False  # whether the notice is good news
    language: str = "en"
    find: str = ""  # what the list of chats is searched for
    page: str = ""  # which one, among those that are open; given with its first action
    stamp: int = 0  # grows with every action: which of two answers of the server is the newer one
    notice_of: str = ""  # what the engine was doing when it refused; the notice goes with that; "": it stays
    # Numbers of the page's actions, which may run side by side, in the order in which they begin: of the one
    # that was given this view, and of those that chose its place (chat_id, shown) and what is searched for.
    begun: int = field(default=0, compare=False)
    placed: int = field(default=0, compare=False)
    searched: int = field(default=0, compare=False)

    def at(self, chat_id: str | None, shown: int = WINDOW) -> View:
        """As an action leaves it that goes to a place."""
        return replace(self, chat_id=chat_id, shown=shown, placed=self.begun)

    def searching(self, find: str) -> View:
        """As an action leaves it that looks for something."""
        return replace(self, find=find, searched=self.begun)

    def refused(self, notice: str, of: str = "") -> View:
        """With a sentence on what was not done."""
        return replace(self, notice=notice, good=False, notice_of=of)


def in_sight(wanted: bool) -> Literal[True, "hidden"]:
    """A widget's `visible`. One that is taken out of the page while its listener runs leaves Gradio's
    progress clock behind, which then asks for every frame for as long as the page is open."""
    return True if wanted else "hidden"
