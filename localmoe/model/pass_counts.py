"""Fill an answer's counters from what a whole target pass reported. Counts only what ran."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localmoe.core.expert_counts import demanded_of
from localmoe.core.lookahead import LookaheadBuffer
from localmoe.core.stats import GenerationCounters
from localmoe.experts.pass_report import PassReport


def count_window(
    counters: GenerationCounters, lookahead: LookaheadBuffer, found: PassReport, experts: NDArray[np.int32]
) -> None:
    """Add one verify pass.

    Args:
        found: how its experts were found.
        experts: int (L, T, K), what the target's routers chose; outside the experts means "none".
    """
    counters.hits += int(found.hits.sum())
    counters.late += int(found.late.sum())
    counters.misses += int(found.misses.sum())
    counters.computed += int(found.computed.sum())
    layers, exists = np.arange(len(experts))[:, None, None], (experts >= 0) & (experts < found.hits.shape[1])
    counters.token_demands += int(exists.sum())
    counters.token_hits += int((found.hits[layers, np.where(exists, experts, 0)] & exists).sum())
    drafted = [lookahead.token_experts(token) for token in range(min(experts.shape[1], lookahead.num_tokens))]
    known = [rows for rows in drafted if rows is not None]
    here = found.hits | found.late
    counters.covered += int(here.sum())
    if known:  # the draft's tokens are the window's first
        routed, chosen = np.stack(known), experts[:, : len(known)].swapaxes(0, 1)
        same = (np.sort(routed, axis=2) == np.sort(chosen, axis=2)).all(axis=2)
        counters.routed_pairs += same.size
        counters.matched_pairs += int(same.sum())
        counters.ordered_pairs += int((routed == chosen).all(axis=2).sum())
        named = demanded_of(routed, found.hits.shape[1])
        counters.covered += int((found.demanded & ~here & named).sum())
