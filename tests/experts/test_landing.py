"""Free slots are dealt to the layers in turn, and what a pass filled is gone from the front."""

from __future__ import annotations

import numpy as np

from localmoe.experts.landing import LandingSlots
from localmoe.experts.residency_block import LANDING_SLOTS

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
    landing = LandingSlots(3)
    assert offered(landing) == [[], [], []]
    landing.deal([7, 0, 5, 9])
    assert offered(landing) == [[7, 9], [0], [5]]
    assert landing.slot(0, 1) == 9
    landing.deal(range(60))
    assert [len(row) for row in offered(landing)] == [LANDING_SLOTS] * 3
    landing.deal([])
    assert offered(landing) == [[], [], []]


def test_what_a_layer_filled_is_gone_and_the_others_move_up() -> None:
    landing = LandingSlots(3)
    landing.deal([7, 0, 5, 9, 8, 6, 3])
    landing.take(np.array([2, 0, 1]))
    assert offered(landing) == [[3], [0, 8], [6]]
    assert landing.slot(0, 0) == 3
    landing.take(np.array([1, 2, 0]))
    assert offered(landing) == [[], [], [6]]
