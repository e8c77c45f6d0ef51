"""Proposes what a grammar leaves no choice about: the rest of a key, or of a call's opening. Keeps nothing:
the target reads it as any draft, since it needs its keys and values, and on a GPU does not know the grammar.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from localmoe.core.gates import Gate
from localmoe.speculative.drafters import Proposal
from localmoe.speculative.grammar import Grammar
from localmoe.speculative.prompt_lookup import SUREST, PromptLookupDrafter
from localmoe.speculative.sampling import TokenSampler


class ForcedTokens:
    """Proposals for one answer, of nothing else."""

    tells_margins = False

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar

    def propose(
        self,
        history: Sequence[int],
        count: int,
        sampler: TokenSampler,
        stop: threading.Event | None,
        gate: Gate | None = None,
    ) -> Proposal:
        """Up to `count` tokens that are forced after `history`."""
        return Proposal(self._grammar.forced(history)[:count], [], looked_up=True)


class ForcedOrFound(PromptLookupDrafter):
    """Proposals for one answer, of what followed the last tokens when they last stood in the text too."""

    def __init__(self, end_tokens: frozenset[int], grammar: Grammar) -> None:
        super().__init__(end_tokens)
        self._grammar = grammar

    def look_up(self, history: Sequence[int], count: int) -> Proposal:
        """Up to `count` tokens: those that are forced after `history`, as sure as any can be, then those that
        are found as if they were accepted."""
        forced = self._up_to_end(self._grammar.forced(history)[:count])
        if not forced:
            return super().look_up(history, count)
        found = Proposal([], [])
        if len(forced) < count and forced[-1] not in self._end_tokens:
            found = super().look_up([*history, *forced], count - len(forced))
            self._forget(len(history))
        margins = [*(SUREST for _ in forced), *found.margins]
        return Proposal([*forced, *found.tokens], [], margins, looked_up=True)
