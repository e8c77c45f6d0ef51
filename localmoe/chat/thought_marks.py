"""The marks of thoughts that are tokens of a tokenizer, special ones or of names of their own: plain decoding
drops the former, so that thoughts would run into the answer, and shows the latter. Reads no text.

Sources: the models' chat templates and cards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from localmoe.chat.marked_text import special_marks


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """What a model writes before and behind its thoughts.

    Attributes:
        opening, closing: one token each.
        label: text between the opening mark and the thoughts.
        around: marks that the answer stands between, which are no part of it.
        tokens: ids of both marks. dropped: of `around`, as far as the tokenizer has them.
    """

    opening: str
    closing: str
    label: str = ""
    around: tuple[str, ...] = field(default=(), compare=False)
    tokens: tuple[int, int] = field(default=(-1, -1), compare=False)
    dropped: tuple[int, ...] = field(default=(), compare=False)

    @property
    def begun(self) -> str:
        """All before the thoughts."""
        return self.opening + self.label


_KNOWN = (
    ThoughtMarks("<think>", "</think>"),
    ThoughtMarks("[THINK]", "[/THINK]"),  # Mistral's
    ThoughtMarks("<|channel>", "<channel|>", "thought\n"),  # Gemma 4's
    ThoughtMarks(  # Cohere's, which are no special tokens
        "<|START_THINKING|>", "<|END_THINKING|>",
        around=("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
)  # fmt: skip


# of each tokenizer: to look through thousands of special tokens, as Gemma's, takes a tenth of a second
_FOUND = WeakKeyDictionary[Any, ThoughtMarks | None]()


def thought_marks(tokenizer: Any) -> ThoughtMarks | None:
    """Of a tokenizer; None: its marks, if it has any, are text."""
    if tokenizer not in _FOUND:
        _FOUND[tokenizer] = _find(tokenizer)
    return _FOUND[tokenizer]


def _find(tokenizer: Any) -> ThoughtMarks | None:
    vocabulary: Mapping[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    tags = _KNOWN[0].opening, _KNOWN[0].closing  # where they are no special tokens, they are text
    special = special_marks(tokenizer, tags).values()
    known = {mark: token for mark, token in vocabulary.items() if mark not in tags or mark in special}
    found = next((one for one in _KNOWN if one.opening in known and one.closing in known), None)
    return found and replace(
        found,
        tokens=(known[found.opening], known[found.closing]),
        dropped=tuple(known[mark] for mark in found.around if mark in known),
    )
