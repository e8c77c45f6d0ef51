"""The streaming contract between the engine and whoever shows its answer: one flat event a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localmoe.core.stats import GenerationStats

FinishReason = Literal[
    "stop", "length", "cancelled"
]  # stop: the model ended; length: token limit or context full


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """What one step added. The last event of an answer carries a finish reason (and may carry no text).

    Attributes:
        text: new text since the last event; never half a character.
        token_ids: tokens that this step emitted.
        drafted: how many of them, the first ones, the draft had proposed (the rest are the target's own).
        stats: statistics so far.
        pieces: the text of each token, which together are `text`; a token that ends no character has
            none, and the next one both. Text that was held back until the end belongs to the last, or
            stands alone.
        opens_reasoning: the prompt has ended with `<think>`, so the answer begins inside; on the first event.
        tool_format: in which notation the answer calls tools, see chat.tool_formats; "": in none, or no tools
            were offered. On the first event.
    """

    text: str
    token_ids: tuple[int, ...]
    drafted: int
    finish_reason: FinishReason | None
    stats: GenerationStats
    prompt_token_ids: tuple[int, ...] = ()  # on the first event only
    pieces: tuple[str, ...] = ()
    opens_reasoning: bool = False
    tool_format: str = ""
