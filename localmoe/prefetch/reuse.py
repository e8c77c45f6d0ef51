"""How much each expert is worth keeping beyond what is known to come: recent use and long-run frequency, by
token. Evicts nothing; policies read it.

Worth = R + 5 F (core.reuse_decay): R is recency, as neighbouring tokens share experts; F is skew, as some
experts are popular.

Layers get shares of the slots in proportion to the perplexity of F, the number of experts that they use
effectively: a layer whose routing has high entropy needs more slots for the same hit rate (entropy-aware
slots of MoE-SpeQ 3.3.2, which names the idea and leaves the formula open).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from localmoe.core.reuse_decay import FREQUENCY_DECAY, FREQUENCY_WEIGHT, TOKEN_DECAY

_REJECTED_WEIGHT = 0.5  # a drafted token that was rejected, for each place behind the last kept one
_QUOTA_TOKENS = 32  # so many tokens apart the layers' shares are computed anew

Mask = NDArray[np.bool_]


class ReuseScores:
    """State, (L, E) each: R and F."""

    def __init__(self, num_layers: int, num_experts: int, num_slots: int) -> None:
        from localmoe.prefetch import loops  # compiles; not needed before there is a policy

        self._loops = loops
        self._recent = np.zeros((num_layers, num_experts))
        self._frequency = np.zeros((num_layers, num_experts))
        self._worth: NDArray[np.float64] | None = None  # as far as it is known
        self._num_slots = num_slots
        self._until_quota = 0
        self._quota = np.full(num_layers, num_slots / num_layers)

    def worth(self) -> NDArray[np.float64]:
        """(L, E): the higher, the sooner it is used again. Not to be written to."""
        if self._worth is None:
            self._worth = self._recent + FREQUENCY_WEIGHT * self._frequency
        return self._worth

    def quota(self) -> NDArray[np.float64]:
        """(L,): slots that each layer should hold; they sum to all slots."""
        if self._until_quota <= 0:
            self._quota = self._num_slots * slot_shares(self._frequency)
            self._until_quota = _QUOTA_TOKENS
        return self._quota

    def learn_step(self, demanded: Mask, routed: Mask, accepted: int, drafted: int) -> None:
        """A step is over: `accepted` of `drafted` tokens were kept, so that accepted + 1 tokens of text were
        added.

        Args:
            demanded: (L, E), what the target used.
            routed: (T, L, E), what the draft said of the first T window tokens; a use counts for the tokens
                of which the draft said so, and one that it did not foresee for the window's last token. Where
                it said nothing at all, every use counts for the last token that was kept.
        """
        self._age(accepted + 1)
        last = drafted if len(routed) else accepted
        counts = _window_counts(len(routed), accepted, last)
        self._loops.add_uses(demanded, routed, counts, self._recent, self._frequency)

    def learn_prompt(self, demanded: Mask, shares: NDArray[np.float64] | None, num_tokens: int) -> None:
        """A prompt's pass is over. shares: (L, E), share of its tokens that used each; None: not known."""
        self._worth = None
        forgotten = TOKEN_DECAY**num_tokens
        self._recent *= forgotten
        # of uses that nobody knows the order of: as if each token used what all do on average
        self._recent += demanded if shares is None else shares * (1.0 - forgotten) / (1.0 - TOKEN_DECAY)
        kept = FREQUENCY_DECAY ** (num_tokens if shares is not None else 1)
        self._frequency *= kept
        self._frequency += (1.0 - kept) * (demanded if shares is None else shares)
        self._until_quota -= num_tokens

    def _age(self, tokens: int) -> None:
        self._worth = None
        self._recent *= TOKEN_DECAY**tokens
        self._frequency *= FREQUENCY_DECAY**tokens
        self._until_quota -= tokens


@lru_cache(maxsize=1024)
def _window_counts(routed: int, accepted: int, last: int) -> NDArray[np.float64]:
    """(routed + 1, 2): `_use_counts` of each of so many tokens, and of token `last`. Not to be written to."""
    return np.array([_use_counts(token - accepted) for token in (*range(routed), last)])


def _use_counts(behind: int) -> tuple[float, float]:
    """What a use adds to R and F, by a token that is so many places behind the last one that was kept."""
    if behind <= 0:
        return TOKEN_DECAY**-behind, 1.0 - FREQUENCY_DECAY
    return _REJECTED_WEIGHT**behind, 0.0


def slot_shares(frequency: NDArray[np.float64]) -> NDArray[np.float64]:
    """(L,): each layer's share of the slots, in proportion to exp(entropy) of its use, (L, E). A layer of
    which nothing is known counts as one that uses all experts alike."""
    totals = frequency.sum(axis=1, keepdims=True)
    p = np.where(totals > 0, frequency / np.where(totals > 0, totals, 1.0), 1.0 / frequency.shape[1])
    entropy = -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=1)
    perplexity = np.exp(entropy)
    shares: NDArray[np.float64] = perplexity / perplexity.sum()
    return shares
