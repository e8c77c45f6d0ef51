"""Free slots are dealt to the layers in turn, and what a pass filled is gone from the front."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from localmoe.experts.landing import LANDING_SLOTS, LandingSlots

ADDRESSES = np.arange(100, dtype=np.int64) * 8 + 1000


def offered(landing: LandingSlots) -> list[list[int]]:
    """Slots by layer; zeros must follow, and nothing else."""
    rows = landing.addresses(ADDRESSES).tolist()
    found = [[(address - 1000) // 8 for address in row if address] for row in rows]
    assert all(
        len(row) == LANDING_SLOTS and not any(row[len(some) :]) for row, some in zip(rows, found, strict=True)
    )
    return found


def test_slots_are_dealt_in_turn_and_no_more_than_there_is_room_for() -> None:
    landing, none = LandingSlots(3), np.zeros(3, dtype=np.int64)
    assert offered(landing) == [[], [], []]
    landing.deal([7, 0, 5, 9], none)
    assert offered(landing) == [[7, 9], [0], [5]]
    assert landing.slot(0, 1) == 9
    landing.deal(range(60), none)
    assert [len(row) for row in offered(landing)] == [LANDING_SLOTS] * 3
    landing.deal([], none)
    assert offered(landing) == [[], [], []]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(0, 120))
def test_each_slot_goes_to_the_layer_that_has_fewest(held: list[int], count: int) -> None:
    landing, has, dealt = LandingSlots(len(held)), list(held), [0] * len(held)
    for _ in range(min(count, LANDING_SLOTS * len(held))):
        open_to = [layer for layer in range(len(held)) if dealt[layer] < LANDING_SLOTS]
        layer = min(open_to, key=lambda layer: (has[layer], dealt[layer], layer))
        has[layer] += 1
        dealt[layer] += 1
    landing.deal(range(count), np.array(held))
    assert [len(row) for row in offered(landing)] == dealt


def test_what_a_layer_filled_is_gone_and_the_others_move_up() -> None:
    landing = LandingSlots(3)
    landing.deal([7, 0, 5, 9, 8, 6, 3], np.zeros(3, dtype=np.int64))
    landing.take(np.array([2, 0, 1]))
    assert offered(landing) == [[3], [0, 8], [6]]
    assert landing.slot(0, 0) == 3
    landing.take(np.array([1, 2, 0]))
    assert offered(landing) == [[], [], [6]]
