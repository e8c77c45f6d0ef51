"""How many tokens a message has while it is being written: the model's own tokenizer says it, of long texts
from their beginning. Shows nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localmoe.core.errors import LocalMoeError

if TYPE_CHECKING:
    from app.engine_holder import EngineHolder

COUNTED = 20_000  # characters; the rest of a longer text is taken to be like them
_CHARACTERS_A_TOKEN = 4  # of English; where no tokenizer is at hand


@dataclass(frozen=True, slots=True)
class Typed:
    """Tokens of what is in the box to write in. about: not all of them were counted."""

    tokens: int = 0
    about: bool = False


NOTHING = Typed()


def count_typed(holder: EngineHolder, text: str) -> Typed:
    """Of a text as it would be sent. Takes some milliseconds at most."""
    text = text.strip()
    if not text:
        return NOTHING
    begun = text[:COUNTED]
    try:
        tokens = holder.engine().count_tokens(begun)
    except LocalMoeError:
        return Typed(-(-len(text) // _CHARACTERS_A_TOKEN), True)
    return Typed(round(tokens * len(text) / len(begun)), len(begun) < len(text))
