"""How likely the target is to accept a drafted token, by its margin: how far the draft's first choice was
ahead of its second. A draft that is a coarser copy of its target errs where the two are close, so a few
tokens have nearly all rejections. Chooses no length.

Margins are differences of scores, after what the choice is made by: logits, with sampling divided by the
temperature and with the noise that both models have in common (kernels.choices), or where each model draws
for itself, the logarithms of the draft's two largest probabilities.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

_EDGES = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CLASSES = len(_EDGES) + 1  # of margins
# before any evidence: an INT4 draft of the embedded model, whose margins are those of a small model
_FIRST_GUESS = (0.5, 0.7, 0.75, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99, 0.99, 0.99, 0.99)
_GUESS_WEIGHT = 4.0  # how many tokens a guess counts as
_KEPT = 0.99  # of a class's evidence, at each new token of it
_KEPT_OF_ALL = 0.995  # of how frequent classes are, at each new token


def class_of(margin: float) -> int:
    """The class of margins that this one is of."""
    return bisect_right(_EDGES, margin)


class MarginRates:
    """Conditional rates: of a drafted token, given that those before it were accepted."""

    def __init__(self, first_guess: Sequence[float] = _FIRST_GUESS) -> None:
        """first_guess: rates by class, before any evidence."""
        self._accepted = [rate * _GUESS_WEIGHT for rate in first_guess]
        self._tried = [_GUESS_WEIGHT] * CLASSES
        self._drafted = [0.0] * CLASSES
        self.known = 0  # tokens that were drafted, up to now

    def observe(self, margins: Sequence[float], drafted: int, accepted: int) -> None:
        """Learn from a step.

        Args:
            margins: of all tokens that were drafted.
            drafted: how many of them the target was asked about. The first rejection is evidence; what
                follows it is not.
            accepted: how many it accepted.
        """
        for i, margin in enumerate(margins):
            kind = class_of(margin)
            self.known += 1
            if i <= accepted:  # what is drafted after a wrong token is another text
                self._drafted = [_KEPT_OF_ALL * count for count in self._drafted]
                self._drafted[kind] += 1.0
            if i < min(accepted + 1, drafted):
                self._accepted[kind] = _KEPT * self._accepted[kind] + (i < accepted)
                self._tried[kind] = _KEPT * self._tried[kind] + 1.0

    def rates(self) -> list[float]:
        """By class, each from 0 to 1."""
        return [accepted / tried for accepted, tried in zip(self._accepted, self._tried, strict=True)]

    def shares(self) -> list[float]:
        """How frequent each class is among drafted tokens; they add up to 1."""
        total = sum(self._drafted)
        return [1.0 / CLASSES] * CLASSES if total <= 0.0 else [count / total for count in self._drafted]

    def mean(self) -> float:
        """The rate of a token whose margin is not known yet."""
        return sum(share * rate for share, rate in zip(self.shares(), self.rates(), strict=True))

    def expected_tokens(self, longest: int) -> list[float]:
        """Tokens of a step that drafts 0, 1, .. longest tokens whatever their margins, the target's own
        included (MoE-SpeQ 3.2.2)."""
        rate = self.mean()
        return list(accumulate(rate**i for i in range(longest + 1)))
