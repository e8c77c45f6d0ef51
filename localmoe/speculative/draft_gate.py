"""When a step has drafted enough, and how much of it is worth verifying, by the margins of what it has
drafted so far. MoE-SpeQ (3.2, equation 2) chooses a length for all steps alike; here a step stops where the
target is likely to disagree.

The steps of an answer are rounds of a renewal process: whoever maximises its tokens a second, L, maximises
tokens - L * seconds in each round (Ross 1970, "Average cost semi-Markov decision processes"). So a token is
worth drafting if what it adds to the expected tokens outweighs L times the time that it adds, and worth
verifying if that is so of the window's further row alone. Output never depends on any of it.

What a rule knows of a token before it decides to verify it must be no draw from the draft's distribution:
where models draw each for itself, dropping some of the drawn ones would change the distribution of what is
kept. Nor may it be a margin that depends on such a draw, which those of later tokens do (steppers._kept).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localmoe.speculative.margin_rates import MarginRates, class_of


class DraftGate:
    """Of one step: a picture of what was known when it began."""

    def __init__(
        self, rates: MarginRates, draft_s: float, verify_s: NDArray[np.float64], tokens_per_s: float
    ) -> None:
        """
        Args:
            rates: of acceptance by margin.
            draft_s: of a drafted token.
            verify_s: (W,), of a pass over 1 .. W tokens; a step drafts at most W - 1.
            tokens_per_s: L, the speed that a step has to keep up.
        """
        self._rates, self._shares = np.array(rates.rates()), np.array(rates.shares())
        self._draft_price = tokens_per_s * draft_s
        self._prices = tokens_per_s * verify_s
        self._mean = float(self._shares @ self._rates)
        # expected tokens of 1, 2, .. further ones whose margins nobody knows yet
        self._further = np.cumsum(self._mean ** np.arange(1, len(verify_s)))

    def goes_on(self, margins: Sequence[float], unheard: int = 0) -> bool:
        """Whether to draft another token after those with these margins, and `unheard` ones whose margins are
        not known yet."""
        drafted = len(margins) + unheard
        if drafted + 1 >= len(self._prices):
            return False
        survives, worth = self._worth([*(self._rates[class_of(m)] for m in margins), *[self._mean] * unheard])
        best, tokens = float(worth.max()), float(worth[-1] + self._prices[drafted])
        # one more, of which the margin will say whether to verify it
        seen = np.maximum(best, tokens + survives * self._rates - self._prices[drafted + 1])
        if float(self._shares @ seen) - self._draft_price > best:
            return True
        # or several, come what may
        several = len(self._prices) - 1 - drafted
        costs = self._prices[drafted + 1 :] + self._draft_price * np.arange(1, several + 1)
        return bool((tokens + survives * self._further[:several] - costs).max() > best)

    def worth_verifying(self, margins: Sequence[float]) -> int:
        """How many of the drafted tokens with these margins to put to the target."""
        return self.best(margins)[0]

    def best(self, margins: Sequence[float]) -> tuple[int, float]:
        """The same, and what the step is worth then in tokens, more or less than those that the speed to be
        kept up brings in its time."""
        worth = self._worth([self._rates[class_of(margin)] for margin in margins])[1]
        count = int(worth.argmax())
        return count, 1.0 + float(worth[count])  # with the target's own token

    def _worth(self, rates: Sequence[float]) -> tuple[float, NDArray[np.float64]]:
        """(how likely all drafted tokens with these rates are accepted, what a window of the first 0, 1, ..
        of them is worth in tokens)."""
        survive = np.cumprod(rates)
        tokens = np.concatenate([[0.0], np.cumsum(survive)])
        return float(survive[-1]) if len(survive) else 1.0, tokens - self._prices[: len(tokens)]
