"""The marks of thoughts that are special tokens of a tokenizer: plain decoding drops them, so that thoughts
would run into the answer. Reads no text.

Sources: the models' chat templates and cards.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from localmoe.chat.marked_text import special_marks


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """What a model writes before and behind its thoughts.

    Attributes:
        opening, closing: one special token each.
        label: text between the opening mark and the thoughts.
        tokens: ids of both marks.
    """

    opening: str
    closing: str
    label: str = ""
    tokens: tuple[int, int] = field(default=(-1, -1), compare=False)

    @property
    def begun(self) -> str:
        """All before the thoughts."""
        return self.opening + self.label


_KNOWN = (
    ThoughtMarks("<think>", "</think>"),
    ThoughtMarks("[THINK]", "[/THINK]"),  # Mistral's
    ThoughtMarks("<|channel>", "<channel|>", "thought\n"),  # Gemma 4's
)


# of each tokenizer: to look through thousands of special tokens, as Gemma's, takes a tenth of a second
_FOUND = WeakKeyDictionary[Any, ThoughtMarks | None]()


def thought_marks(tokenizer: Any) -> ThoughtMarks | None:
    """Of a tokenizer; None: its marks, if it has any, are text."""
    if tokenizer not in _FOUND:
        _FOUND[tokenizer] = _find(tokenizer)
    return _FOUND[tokenizer]


def _find(tokenizer: Any) -> ThoughtMarks | None:
    marks = special_marks(tokenizer, [mark for one in _KNOWN for mark in (one.opening, one.closing)])
    ids = {mark: token for token, mark in marks.items()}
    both = (one for one in _KNOWN if one.opening in ids and one.closing in ids)
    found = next(both, None)
    return found and replace(found, tokens=(ids[found.opening], ids[found.closing]))
