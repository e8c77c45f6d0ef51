"""What ends a step's drafts early, as those see it who draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Gate(Protocol):
    """Of one step. Margins: how sure the draft was of each token that it drafted
    (speculative.margin_rates)."""

    def goes_on(self, margins: Sequence[float], unheard: int = 0) -> bool:
        """Whether to draft another token after those with these margins, and `unheard` ones whose margins are
        not known yet."""

    def worth_verifying(self, margins: Sequence[float]) -> int:
        """How many of the drafted tokens with these margins to put to the target."""
