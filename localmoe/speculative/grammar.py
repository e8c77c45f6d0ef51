"""What says which tokens an answer may have. Chooses none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Grammar(Protocol):
    """Of one answer, whose prompt it knows."""

    def allowed(self, text: Sequence[int], count: int) -> Tensor | None:
        """bool (count,): which tokens may follow `text`. None: the text itself, which may be one that is only
        proposed, is not allowed or has ended, and nobody will choose what follows it."""

    def valid(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of `tokens` may follow `text`, which is allowed."""

    def free(self, text: Sequence[int]) -> bool:
        """Whether any token may follow `text`."""

    def forced(self, text: Sequence[int]) -> list[int]:
        """What has to follow `text`, in the tokens that a tokenizer would use; []: there is a choice, or
        nothing may follow."""
