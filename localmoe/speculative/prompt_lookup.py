"""Proposes what followed the last few tokens when they last stood in the text (prompt lookup: Saxena 2023;
n-gram drafting in other engines). Needs no draft model and no pass, and foretells no experts. Does not decide
how many tokens are proposed, nor which are verified or kept.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from localmoe.core.gates import Gate
from localmoe.speculative.drafters import Proposal
from localmoe.speculative.sampling import TokenSampler

# last tokens that have to agree, of which the most that do say where; a single one says little
RUNS = (16, 8, 5, 3, 2)
_MOST = 64  # that are counted
MARGIN_A_TOKEN = 1 / 8  # so that the classes of margins tell apart from 2 to 48 tokens that agree
SUREST = _MOST * MARGIN_A_TOKEN


class PromptLookupDrafter:
    """Proposals for one answer, whose text only grows."""

    tells_margins = True

    def __init__(self, end_tokens: frozenset[int]) -> None:
        self._end_tokens = end_tokens
        self._text, self._length = np.empty(0, dtype=np.int64), 0  # what the text was, with room to grow

    def propose(
        self,
        history: Sequence[int],
        count: int,
        sampler: TokenSampler,
        stop: threading.Event | None,
        gate: Gate | None = None,
    ) -> Proposal:
        """As `look_up`: nothing is drawn, so there are no distributions."""
        return self.look_up(history, count)

    def look_up(self, history: Sequence[int], count: int) -> Proposal:
        """Up to `count` tokens after `history`, as far as an end token; none where nothing agrees. A text
        that repeats itself is continued around the repeat. A token's margin is how many tokens before it
        agree: those proposed before it too, as if they were accepted."""
        self._take(history)
        start = self._find(history)
        if start is None:
            return Proposal([], [])
        period = len(history) - start
        tokens = self._up_to_end([history[start + i % period] for i in range(count)])
        agree = self._agreeing(history, start)
        margins = [MARGIN_A_TOKEN * (agree + i) for i in range(len(tokens))]
        return Proposal(tokens, [], margins, looked_up=True)

    def _take(self, history: Sequence[int]) -> None:
        """Note what was written since."""
        length = len(history)
        if length > len(self._text):
            self._text = np.concatenate((self._text, np.empty(2 * length - len(self._text), dtype=np.int64)))
        self._text[self._length : length] = history[self._length :]
        self._length = length

    def _forget(self, length: int) -> None:
        """What was noted behind so many tokens was a proposal."""
        self._length = min(self._length, length)

    def _find(self, history: Sequence[int]) -> int | None:
        """The last of the places where most tokens agree with the end of the text, by RUNS. All places are
        looked at: tens of us at 32,000 tokens, where an index would be 0.1 s late after a prompt."""
        text, end = self._text[: self._length], self._length
        places = np.flatnonzero(text[: end - 1] == text[end - 1]) + 1  # behind which one token agrees
        start: int | None = None
        for number in range(2, RUNS[0] + 1):
            places = places[places >= number]
            places = places[text[places - number] == text[end - number]]
            if not len(places):
                break
            if number in RUNS:
                start = int(places[-1])
        return start

    def _agreeing(self, history: Sequence[int], start: int) -> int:
        """How many tokens before `start` are those that end the text."""
        for number in range(min(_MOST, start)):
            if history[start - 1 - number] != history[-1 - number]:
                return number
        return min(_MOST, start)

    def _up_to_end(self, tokens: list[int]) -> list[int]:
        ends = (i + 1 for i, token in enumerate(tokens) if token in self._end_tokens)
        return tokens[: next(ends, len(tokens))]
