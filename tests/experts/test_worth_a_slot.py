"""What comes into slots behind a pass, and what gives way there, of a model of which RAM holds a part."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from localmoe.core.types import ExpertKey
from localmoe.experts.worth_a_slot import may_leave, worth_a_slot

LAYERS, EXPERTS = 3, 8
KEYS = [ExpertKey(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
SOME = st.sets(st.sampled_from(KEYS))
WORTH = st.lists(st.floats(0, 3), min_size=len(KEYS), max_size=len(KEYS))


def mask(keys: set[ExpertKey]) -> NDArray[np.bool_]:
    found = np.zeros((LAYERS, EXPERTS), dtype=np.bool_)
    for key in keys:
        found[key] = True
    return found


@given(WORTH, SOME, SOME, st.booleans())
def test_who_would_have_to_be_read_again_stays_unless_it_is_the_next_to_go(
    worth: list[float], in_slots: set[ExpertKey], in_ram: set[ExpertKey], full: bool
) -> None:
    values = dict(zip(KEYS, worth, strict=True))
    alone = [values[key] for key in in_ram - in_slots]
    found = may_leave(
        np.array(worth).reshape(LAYERS, EXPERTS), mask(in_slots), mask(in_ram), ram_is_full=full
    )
    for key in KEYS:
        free_to_go = key in in_ram or bool(full and alone and values[key] <= min(alone))
        assert found[key] == (key in in_slots and free_to_go)


@given(WORTH, SOME, SOME, st.integers(0, 30))
def test_the_best_come_in_for_the_worst_that_may_leave(
    worth: list[float], asked: set[ExpertKey], leaving: set[ExpertKey], num_free: int
) -> None:
    asked -= leaving
    values = dict(zip(KEYS, worth, strict=True))
    found = worth_a_slot(np.array(worth).reshape(LAYERS, EXPERTS), mask(asked), mask(leaving), num_free)
    assert len(set(found)) == len(found) <= max(16, min(num_free, 64)) and set(found) <= asked
    assert [values[key] for key in found] == sorted((values[key] for key in found), reverse=True)
    most = max(16, min(num_free, 64))
    best = sorted(asked, key=lambda key: values[key], reverse=True)[:most]
    expected = len(best[:num_free])
    for key, rival in zip(best[num_free:16], sorted(values[key] for key in leaving), strict=False):
        expected += values[key] > rival + 0.5
    assert len(found) == expected
    if asked:
        assert all(values[key] >= values[other] for key in found for other in asked - set(found))
