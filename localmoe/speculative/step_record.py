"""What a step did and how long it took, for those who choose the next steps' lengths. Learns nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step.

    Attributes:
        drafted: tokens that were put to the target, drafted or looked up.
        accepted: how many of them it agreed with, from the first one on.
        draft_s, verify_s: seconds of the drafts, and of the verify pass.
        margins: of all that was drafted, of which `drafted` were verified; () where nobody knows them.
        host_s: seconds that neither drafts nor the verify pass account for.
        found: the tokens were looked up in a draft's place, as `Governor.instead` said.
    """

    drafted: int
    accepted: int
    draft_s: float
    verify_s: float
    margins: Sequence[float] = ()
    host_s: float = 0.0
    found: bool = False

    @property
    def tokens(self) -> int:
        """That the step brought: what was accepted, and the target's own."""
        return self.accepted + 1

    @property
    def took_s(self) -> float:
        """All of it."""
        return self.draft_s + self.verify_s + self.host_s
