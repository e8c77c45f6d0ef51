"""How likely the target is to accept each drafted token, from what it accepted lately. Chooses no length.

Every position has evidence of its own, and all of them a share in one rate: the late ones are seldom reached,
and a single rejection there would otherwise speak against long drafts for a long time.
"""

from __future__ import annotations

_FIRST_GUESS, _GUESS_WEIGHT = 0.8, 6  # before any evidence, and how many tokens it counts as
_KEPT, _KEPT_OF_ALL = 0.95, 0.99  # of a position's evidence, and of all positions', at each new token
_SHARED_WEIGHT = 8  # how many tokens of its own evidence the rate of all positions counts as


class AcceptanceRates:
    """Conditional rates: of drafted token i, given that those before it were accepted."""

    def __init__(self, max_draft_length: int) -> None:
        self._accepted, self._tried = [0.0] * max_draft_length, [0.0] * max_draft_length
        self._all_accepted, self._all_tried = _FIRST_GUESS * _GUESS_WEIGHT, float(_GUESS_WEIGHT)

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from a step. The first rejection is evidence; what follows it is not."""
        for i in range(min(accepted + 1, drafted)):
            self._accepted[i] = _KEPT * self._accepted[i] + (i < accepted)
            self._tried[i] = _KEPT * self._tried[i] + 1
            self._all_accepted = _KEPT_OF_ALL * self._all_accepted + (i < accepted)
            self._all_tried = _KEPT_OF_ALL * self._all_tried + 1

    def rates(self) -> list[float]:
        """By position, each from 0 to 1."""
        shared = _SHARED_WEIGHT * self._all_accepted / self._all_tried
        return [
            (accepted + shared) / (tried + _SHARED_WEIGHT)
            for accepted, tried in zip(self._accepted, self._tried, strict=True)
        ]

    def expected_tokens(self) -> list[float]:
        """Tokens of a step, the target's own included, by draft length: 1 + the sum of products of the rates
        (MoE-SpeQ 3.2.2)."""
        tokens, survives = [1.0], 1.0
        for rate in self.rates():
            survives *= rate
            tokens.append(tokens[-1] + survives)
        return tokens
