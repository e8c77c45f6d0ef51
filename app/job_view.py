"""Where an answer goes, and a snapshot of how far it is. Runs nothing."""

from __future__ import annotations

from dataclasses import dataclass

from app.chats import ChatMessage
from localmoe.core.stats import GenerationStats


@dataclass(frozen=True, slots=True)
class Place:
    """Where an answer goes: after `question` (a node of the chat's tree), or in the place of `node`, whose
    text it goes on with if that is `before`."""

    chat_id: str
    question: int
    node: int | None = None
    before: ChatMessage | None = None


@dataclass(frozen=True, slots=True)
class JobView:
    """A snapshot of an answer.

    Attributes:
        finish: None while it is being written, else "stop", "length", "cancelled" or "error".
        speeds: tokens/s between events, from the differences of their statistics, oldest first.
        thought_s, runs: as in ChatMessage.
        draft_length: tokens drafted in the last step (the mean, if several ended at once); None before one.
    """

    chat_id: str
    started: float
    revision: int
    text: str
    finish: str | None
    error: str
    stats: GenerationStats | None
    speeds: tuple[float, ...]
    thought_s: float = 0.0
    runs: tuple[int, ...] = ()
    draft_length: float | None = None

    def last_draft_length(self, stats: GenerationStats) -> float | None:
        """Tokens drafted a step since this view was made; its own if no step has ended since."""
        steps, drafted = (self.stats.steps, self.stats.drafted) if self.stats is not None else (0, 0)
        return (stats.drafted - drafted) / (stats.steps - steps) if stats.steps > steps else self.draft_length
