"""The offline optimum: how many demands any cache of so many slots can meet without moving bytes, if it knows
the whole future. Decides nothing while an engine runs.

Belady's rule (Belady 1966; with leave to let an expert pass without a slot): keep what is used again soonest.
Experts are all of one size and a group's demands come at once, so this is exact: each pair of neighbouring
uses of an expert is an interval that occupies one slot, and keeping the soonest ends keeps the most of them
(Faigle and Nawijn 1995). Prefetching cannot beat it in bytes: an expert that was not kept has to be copied,
whenever that happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def optimal_hits(demands: Sequence[NDArray[np.bool_]], num_slots: int, *, whole_steps: bool) -> int:
    """The most demands that can be met by experts kept from earlier demands, from empty slots.

    Args:
        demands: bool (L, E) of each step in order.
        whole_steps: a step's demands all come at once, so that what its layers use can make room only after
            the step (a GPU's whole passes); else layer by layer.
    """
    if not demands or num_slots < 1:
        return 0
    stacked = np.stack(demands)
    steps, layers, experts = stacked.shape
    when, layer, expert = stacked.nonzero()
    group = when if whole_steps else when * layers + layer
    key = layer * experts + expert
    following = _next_use(group, key, steps * layers)
    bounds = np.searchsorted(group, np.arange(int(group[-1]) + 2)).tolist() if len(group) else [0]
    cache: dict[int, int] = {}  # expert -> group of its next use
    hits = 0
    keys, nexts, never = key.tolist(), following.tolist(), steps * layers
    for begin, end in pairwise(bounds):
        for i in range(begin, end):
            hits += keys[i] in cache
        for i in range(begin, end):
            if nexts[i] < never:
                cache[keys[i]] = nexts[i]
            else:
                cache.pop(keys[i], None)
        if len(cache) > num_slots:
            kept = sorted(cache.items(), key=lambda item: item[1])[:num_slots]
            cache = dict(kept)
    return hits


def _next_use(group: NDArray[np.intp], key: NDArray[np.intp], never: int) -> NDArray[np.intp]:
    """Group of the next use of the same key, or `never`. group ascends."""
    order = np.lexsort((group, key))
    following = np.full(len(group), never, dtype=np.intp)
    same = key[order[:-1]] == key[order[1:]]
    following[order[:-1][same]] = group[order[1:]][same]
    return following
