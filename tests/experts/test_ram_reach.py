"""Which experts in RAM a GPU may read, while passes are open."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localmoe.experts.ram_reach import RamReach, most_lent

SHAPE = (4, 6)


def test_a_whole_layer_always_finds_places() -> None:
    assert [most_lent(places, 8) for places in (8, 9, 20, 48, 100, 999)] == [0, 0, 6, 16, 23, 128]
    for experts in (1, 8, 60, 384):
        for places in range(experts, 5 * experts + 9):
            most = RamReach(places, (40, experts)).most
            assert most >= 0 and most + most_lent(places, experts) <= places - experts
            assert most == 0 or most + most_lent(places, experts) == places - 2 * experts


@given(
    st.integers(0, 40),
    st.lists(st.sampled_from(["prepare", "withdraw", "open", "close", "clear"]), max_size=30),
    st.integers(0, 1000),
)
def test_what_open_passes_may_read_stays_and_leaves_room(places: int, story: list[str], seed: int) -> None:
    reach, chance = RamReach(places, SHAPE), np.random.default_rng(seed)
    prepared: np.ndarray | None = None
    under_way: list[np.ndarray] = []
    for action in story:
        if action == "prepare":
            worth, may_be = chance.integers(0, 9, SHAPE).astype(np.float64), chance.random(SHAPE) < 0.7
            prepared = reach.prepare(worth, may_be).copy()
            assert not (prepared & ~may_be).any()
            if not under_way:  # then it is those that are worth most
                assert prepared.sum() == min(may_be.sum(), int(reach.most * 7 / 8))
                left = worth[may_be & ~prepared]
                assert not left.size or not prepared.any() or worth[prepared].min() >= left.max()
        elif action == "withdraw":
            prepared = None
            reach.withdrawn()
        elif action == "open" and len(under_way) < 2:
            under_way.append(np.zeros(SHAPE, dtype=np.bool_) if prepared is None else prepared)
            prepared = None
            reach.opened()
        elif action == "close" and under_way:
            under_way.pop(0)
            reach.closed()
        elif action == "clear":
            under_way, prepared = [], None
            reach.clear()
        held = [*under_way, *([] if prepared is None else [prepared])]
        assert np.array_equal(reach.held, np.logical_or.reduce([np.zeros(SHAPE, dtype=np.bool_), *held]))
        assert reach.held.sum() <= reach.most


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_pass_behind_another_one_reaches_what_came_meanwhile(overlap: int) -> None:
    reach, worth = RamReach(40, (20, 4)), np.arange(80.0).reshape(20, 4)
    some = np.zeros((20, 4), dtype=np.bool_)
    some[:10] = True
    first = reach.prepare(worth, some)
    reach.opened()
    if not overlap:
        reach.closed()
    some[10:] = True
    second = reach.prepare(worth, some)
    assert second[10:].sum() == (reach.most - first.sum() if overlap else second.sum()) > 0
