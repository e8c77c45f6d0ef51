"""What was looked up in the text, where it is worth more than a draft. Looks nothing up itself
(prompt_lookup), and does not say what it is worth (either_governor)."""

from __future__ import annotations

from collections.abc import Sequence

from localmoe.speculative.drafters import Proposal
from localmoe.speculative.governor import Governor
from localmoe.speculative.prompt_lookup import PromptLookupDrafter


class FoundInstead:
    """For the steps of one answer."""

    def __init__(self, lookup: PromptLookupDrafter, governor: Governor, longest: int) -> None:
        """governor: says how many tokens take a draft's place. longest: the most that may: a longer window
        might change a token's last bits."""
        self._lookup, self._governor, self._longest = lookup, governor, longest

    def find(self, history: Sequence[int], room: int) -> Proposal | None:
        """Tokens after `history` to verify in the place of a draft, and the margins of all that was found;
        None: draft. room: tokens that the answer may still get."""
        proposal = self._lookup.look_up(history, min(room - 1, self._longest))
        count = self._governor.instead(proposal.margins)
        if not count:
            return None
        proposal.cut(count)
        return proposal
