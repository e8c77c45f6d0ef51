"""Proposes what followed the last few tokens when they last stood in the text (prompt lookup: Saxena 2023;
n-gram drafting in other engines). Needs no draft model and no pass, and foretells no experts. Does not decide
how many tokens are proposed, nor which are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from localmoe.core.gates import Gate
from localmoe.speculative.drafters import Proposal
from localmoe.speculative.sampling import TokenSampler

LONGEST, SHORTEST = (
    3,
    2,
)  # tokens that have to agree; a single one says little, and a wrong draft costs copies


class PromptLookupDrafter:
    """Proposals for one answer, whose text only grows."""

    tells_margins = False

    def __init__(self, end_tokens: frozenset[int], vocab_size: int) -> None:
        self._end_tokens = end_tokens
        self._vocab_size = vocab_size
        self._after: dict[tuple[int, ...], int] = {}  # what follows the last place of these tokens
        self._indexed = 0  # tokens that are the last of some entry

    def propose(
        self,
        history: Sequence[int],
        count: int,
        sampler: TokenSampler,
        stop: threading.Event | None,
        gate: Gate | None = None,
    ) -> Proposal:
        """Up to `count` tokens, as far as an end token; none where nothing agrees. A text that repeats itself
        is continued around the repeat. What is proposed is certain, so its distribution is all on one
        token."""
        self._index(history)
        tokens = self._follow(history, count)
        if sampler.config.greedy:
            return Proposal(tokens, [])
        certain = torch.zeros(len(tokens), self._vocab_size)
        certain[range(len(tokens)), tokens] = 1.0
        return Proposal(tokens, list(certain))

    def _index(self, history: Sequence[int]) -> None:
        """Note where runs of tokens end, but for those that end the text."""
        for end in range(max(self._indexed, SHORTEST), len(history)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self._after[tuple(history[end - length : end])] = end
        self._indexed = len(history)

    def _follow(self, history: Sequence[int], count: int) -> list[int]:
        for length in range(min(LONGEST, len(history)), SHORTEST - 1, -1):
            start = self._after.get(tuple(history[-length:]))
            if start is not None:
                period = len(history) - start
                return self._up_to_end([history[start + i % period] for i in range(count)])
        return []

    def _up_to_end(self, tokens: list[int]) -> list[int]:
        ends = (i + 1 for i, token in enumerate(tokens) if token in self._end_tokens)
        return tokens[: next(ends, len(tokens))]
