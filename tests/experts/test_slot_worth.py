"""What a change of slots was worth, counted use by use."""

from __future__ import annotations

import numpy as np
import pytest
from experts.device_rig import DeviceRig
from numpy.typing import NDArray

from localmoe.core.types import ExpertKey as K
from localmoe.experts.slot_worth import _FIRST, _HORIZON, _SMOOTHING, SlotWorth

SHAPE = (2, 8)
NOBODY = np.zeros(0, dtype=np.int64)


def asked(*numbers: int) -> NDArray[np.bool_]:
    found = np.zeros(SHAPE, dtype=np.bool_)
    found.reshape(-1)[list(numbers)] = True
    return found


@pytest.mark.parametrize(
    ("each_pass", "left", "uses"),
    [((3,), 5, _HORIZON), ((5,), 5, -_HORIZON), ((3, 5), 5, 0)],
)
def test_the_gain_is_uses_of_what_entered_less_those_of_what_left(
    each_pass: tuple[int, ...], left: int, uses: int
) -> None:
    worth = SlotWorth()
    for _ in range(40 * _HORIZON):
        worth.observe(asked(*each_pass), np.array([3] * 9), np.array([left] * 9))
    assert worth.gain == pytest.approx(uses, abs=0.1)


def test_who_enters_a_free_slot_says_nothing() -> None:
    """Its uses cost nobody any: while slots fill, a change would seem to be worth all of them."""
    worth = SlotWorth()
    for _ in range(4 * _HORIZON):
        worth.observe(asked(3), np.array([3, 4]), np.array([-1, -1]))
    assert worth.gain == _FIRST
    for _ in range(40 * _HORIZON):
        worth.observe(asked(3, 5), np.array([3] * 9 + [4]), np.array([5] * 9 + [-1]))
    assert worth.gain == pytest.approx(0.0, abs=0.1)


def test_uses_after_the_horizon_do_not_count_and_the_pass_itself_does_not() -> None:
    worth = SlotWorth()
    worth.observe(asked(3), np.array([3]), np.array([5]))
    for _ in range(_HORIZON):
        worth.observe(asked(), NOBODY, NOBODY)
    assert worth.gain == pytest.approx((1 - _SMOOTHING) * _FIRST)


def test_it_is_tried_again_where_nothing_has_changed_for_long() -> None:
    worth = SlotWorth()
    for _ in range(40 * _HORIZON):
        worth.observe(asked(5), np.array([3] * 9), np.array([5] * 9))
    assert worth.gain < -_HORIZON / 2
    for _ in range(2000):
        worth.observe(asked(5), NOBODY, NOBODY)
    assert worth.gain == pytest.approx(_FIRST, abs=0.1)


def test_a_memory_follows_what_its_passes_put_into_slots() -> None:
    rig = DeviceRig(2)
    for key in (K(0, 0), K(0, 1)):
        rig.memory.prefetch(key, 0.0)
    rig.memory.pump()
    rig.memory.drop_prefetches()  # they may go
    entered = []
    observe = rig.memory.worth.observe
    rig.memory.worth.observe = lambda d, e, v: (entered.append((e.tolist(), v.tolist())), observe(d, e, v))  # type: ignore[method-assign]
    for chosen in (2, 0):
        rig.memory.open_pass()
        log, _ = rig.play([[[chosen]], [[-1]]], 1)
        rig.memory.close_pass(log)
    (first, second) = entered
    assert first[0] == [2] and first[1] in ([0], [1])
    if first[1] == [0]:
        assert second[0] == [0]
    free = DeviceRig(2)
    free.memory.worth.observe = lambda d, e, v: entered.append((e.tolist(), v.tolist()))  # type: ignore[method-assign]
    free.memory.open_pass()
    log, _ = free.play([[[1]], [[2]]], 1)
    free.memory.close_pass(log)
    assert entered[-1] == ([1, free.store.num_experts + 2], [-1, -1])


def test_without_repetition_a_change_is_worth_nothing_that_could_be_told_from_chance() -> None:
    """Of 30 experts that are drawn afresh for each pass, those that enter are used no more than others."""
    chance, worth, found = np.random.default_rng(0), SlotWorth(), []
    for _ in range(3000):
        used = np.zeros((4, 30), dtype=np.bool_)
        for row in used:
            row[chance.choice(30, 4, replace=False)] = True
        entered = np.flatnonzero(used)[::5]
        left = entered - entered % 30 + (entered + 7) % 30
        worth.observe(used, entered, left)
        found.append(worth.gain)
    assert np.abs(found[500:]).mean() < 0.15 and abs(np.mean(found[500:])) < 0.1
