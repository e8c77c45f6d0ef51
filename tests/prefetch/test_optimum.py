"""The offline optimum against trying every way of keeping experts."""

from __future__ import annotations

from functools import cache
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from localmoe.prefetch.optimum import optimal_hits

Key = tuple[int, int]
LAYERS, EXPERTS = 2, 3
steps = st.lists(
    st.lists(st.lists(st.booleans(), min_size=EXPERTS, max_size=EXPERTS), min_size=LAYERS, max_size=LAYERS),
    min_size=1,
    max_size=4,
)


def by_trial(demands: list[NDArray[np.bool_]], slots: int, *, whole_steps: bool, counted: list[bool]) -> int:
    """After every group any `slots` of what is here and what was asked for may stay."""
    groups: list[tuple[frozenset[Key], bool]] = []
    for demand, counts in zip(demands, counted, strict=True):
        keys = [[(layer, int(e)) for e in demand[layer].nonzero()[0]] for layer in range(LAYERS)]
        parts = [list(chain(*keys))] if whole_steps else keys
        groups += [(frozenset(part), counts) for part in parts]

    @cache
    def best(at: int, here: frozenset[Key]) -> int:
        if at == len(groups):
            return 0
        wanted, counts = groups[at]
        may_stay = sorted(here | wanted)
        choices = chain(*(combinations(may_stay, n) for n in range(min(slots, len(may_stay)) + 1)))
        return len(here & wanted) * counts + max(best(at + 1, frozenset(kept)) for kept in choices)

    return best(0, frozenset())


@settings(max_examples=60)
@given(steps, st.integers(1, 3), st.booleans(), st.data())
def test_no_way_of_keeping_experts_meets_more_demands(
    story: list[list[list[bool]]], slots: int, whole_steps: bool, data: st.DataObject
) -> None:
    demands = [np.array(step, dtype=np.bool_) for step in story]
    counted = data.draw(st.lists(st.booleans(), min_size=len(demands), max_size=len(demands)))
    expected = by_trial(demands, slots, whole_steps=whole_steps, counted=counted)
    assert optimal_hits(demands, slots, whole_steps=whole_steps, counted=counted) == expected


def test_what_is_asked_for_again_before_it_counts_need_not_be_kept_till_then() -> None:
    rows = [[(0, 1), (1, 1), (1, 2)], [(1, 1)], [(0, 1)], [(0, 1), (1, 2)]]
    demands = [np.zeros((LAYERS, EXPERTS), dtype=np.bool_) for _ in rows]
    for demand, keys in zip(demands, rows, strict=True):
        for key in keys:
            demand[key] = True
    counted = [False, True, False, True]
    assert by_trial(demands, 2, whole_steps=False, counted=counted) == 3
    assert optimal_hits(demands, 2, whole_steps=False, counted=counted) == 3


@pytest.mark.parametrize(("slots", "whole", "by_layer"), [(1, 0, 0), (2, 2, 2), (3, 4, 4), (4, 6, 6)])
def test_a_cyclic_sweep_that_defeats_lru(slots: int, whole: int, by_layer: int) -> None:
    """Experts 0, 1, 2 of one layer and one of another, in turn, three times: LRU with three slots never
    hits."""
    sweep = [np.array([[i == 0, i == 1, i == 2], [i == 3, False, False]]) for _ in range(3) for i in range(4)]
    assert optimal_hits(sweep, slots, whole_steps=True) >= whole
    assert optimal_hits(sweep, slots, whole_steps=False) >= by_layer
    assert optimal_hits(sweep, slots, whole_steps=True) == by_trial(
        sweep, slots, whole_steps=True, counted=[True] * 12
    )


def test_nothing_is_kept_without_slots_and_nothing_is_asked_for_in_no_story() -> None:
    assert optimal_hits([np.ones((1, 2), dtype=np.bool_)] * 2, 0, whole_steps=True) == 0
    assert optimal_hits([], 4, whole_steps=True) == 0
    assert optimal_hits([np.zeros((1, 2), dtype=np.bool_)] * 2, 4, whole_steps=False) == 0
