"""The offline optimum: how many demands any cache of so many slots can meet without moving bytes, if it knows
the whole future. Decides nothing while an engine runs.

Belady's rule (Belady 1966; with leave to let an expert pass without a slot): keep what is used again soonest.
Experts are all of one size and a group's demands come at once, so this is exact: each pair of neighbouring
uses of an expert, of which the second counts, is an interval that occupies one slot, and keeping the soonest
ends keeps the most of them (Faigle and Nawijn 1995). Prefetching cannot beat it in bytes: an expert that was
not kept has to be copied, whenever that happens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def optimal_hits(
    demands: Sequence[NDArray[np.bool_]],
    num_slots: int,
    *,
    whole_steps: bool,
    counted: Sequence[bool] | None = None,
) -> int:
    """The most demands that can be met by experts kept from earlier demands, from empty slots.

    Args:
        demands: bool (L, E) of each step in order.
        whole_steps: a step's demands all come at once, so that what its layers use can make room only after
            the step (a GPU's whole passes); else layer by layer.
        counted: steps whose hits count; what the others (prompts) ask for may be kept as well. None: all.
    """
    if not demands or num_slots < 1:
        return 0
    stacked = np.stack(demands)
    steps, layers, experts = stacked.shape
    when, layer, expert = stacked.nonzero()
    group = when if whole_steps else when * layers + layer
    counts = np.ones(steps, dtype=np.bool_) if counted is None else np.array(counted, dtype=np.bool_)
    key, never = layer * experts + expert, steps * layers
    following = _next_use(group, key, counts[when], never)
    begins = np.flatnonzero(np.diff(group, prepend=-1)).tolist()
    keys, nexts, weights = key.tolist(), following.tolist(), counts[when].tolist()
    cache: dict[int, int] = {}  # expert -> group of its next use
    latest: list[tuple[int, int]] = []  # heap of (-next use, expert); entries that the cache has not are dead
    hits = 0
    for begin, end in pairwise([*begins, len(keys)]):
        if weights[begin]:
            hits += sum(k in cache for k in keys[begin:end])
        for k, following_use in zip(keys[begin:end], nexts[begin:end], strict=True):
            if following_use < never:
                cache[k] = following_use
                heapq.heappush(latest, (-following_use, k))
            else:
                cache.pop(k, None)
        while len(cache) > num_slots:
            following_use, k = heapq.heappop(latest)
            if cache.get(k) == -following_use:
                del cache[k]
    return hits


def _next_use(
    group: NDArray[np.intp], key: NDArray[np.intp], counted: NDArray[np.bool_], never: int
) -> NDArray[np.intp]:
    """Group of the next use of the same key, or `never` if there is none, or it does not count: then it need
    not be kept for that. group ascends."""
    order = np.lexsort((group, key))
    sooner, later = order[:-1], order[1:]
    worth = (key[sooner] == key[later]) & counted[later]
    following = np.full_like(group, never)
    following[sooner[worth]] = group[later[worth]]
    return following
