"""What comes into slots beside plain passes: the most kept of what was missed, for the least kept of what is
here, as many as earlier ones were worth; and no slot is written that an open pass may read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from experts.device_rig import DeviceRig
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from localmoe.core.types import ExpertKey
from localmoe.experts.refill import _FIRST, _HORIZON, _LEAST, _MOST, Refill, SlotChanges
from localmoe.kernels.residency import CPU, HIT, LATE, MISS

SHAPE = (2, 8)


def table(*keys: tuple[int, int]) -> NDArray[np.bool_]:
    cells = np.zeros(SHAPE, dtype=np.bool_)
    for key in keys:
        cells[key] = True
    return cells


def scores(**by_expert: float) -> NDArray[np.float32]:
    """Of experts named e<layer><expert>; the others' is 1."""
    found = np.ones(SHAPE, dtype=np.float32)
    for name, score in by_expert.items():
        found[int(name[1]), int(name[2])] = score
    return found


def choose(
    refill: Refill, kept: NDArray[np.float32], here: NDArray[np.bool_], *, per_layer: bool = False,
    under_way: int = 0, free: int = 0, promised: int = 0, idle: bool = False,
) -> SlotChanges:  # fmt: skip
    return refill.choose(
        kept, here, here, per_layer=per_layer, under_way=under_way, free=free, promised=promised, idle=idle
    )


MISSED = table((0, 1), (0, 2), (1, 3))
HERE = table((0, 5), (0, 6), (1, 7))


def sorted_keys(cells: NDArray[np.bool_]) -> list[ExpertKey]:
    return [ExpertKey(*pair) for pair in np.argwhere(cells).tolist()]


def missing(missed: NDArray[np.bool_] = MISSED) -> Refill:
    refill = Refill(*SHAPE, 64)
    refill.rate = 6.0
    refill.observe(missed, missed)
    return refill


def test_the_most_kept_enter_and_the_least_kept_leave() -> None:
    kept = scores(e01=3, e02=9, e13=5, e05=0.1, e06=0.3, e17=0.2)
    changes = choose(missing(), kept, HERE, idle=True)
    assert changes == SlotChanges([(0, 2), (1, 3), (0, 1)], [(0, 5), (1, 7), (0, 6)])  # type: ignore[list-item]
    by_layer = choose(missing(), kept, HERE, idle=True, per_layer=True)
    assert by_layer.enter == [(0, 2), (1, 3), (0, 1)] and by_layer.leave == [(0, 5), (1, 7), (0, 6)]
    only = choose(missing(), kept, table((1, 7)), idle=True, per_layer=True)
    assert only == SlotChanges([ExpertKey(1, 3)], [ExpertKey(1, 7)])


def test_nobody_leaves_for_one_that_is_kept_no_longer() -> None:
    kept = scores(e01=0.1, e02=2, e13=1, e05=1, e06=1.5, e17=2)
    changes = choose(missing(), kept, HERE, idle=True)
    assert changes == SlotChanges([ExpertKey(0, 2)], [ExpertKey(0, 5)])


def test_what_is_here_by_now_does_not_enter_and_nothing_enters_twice() -> None:
    refill = missing()
    changes = choose(refill, scores(e05=0, e06=0, e17=0), HERE | table((0, 1)), idle=True)
    assert changes.enter == [(0, 2), (1, 3)]
    assert choose(refill, scores(e05=0), HERE, idle=True) == SlotChanges([], [])


def test_so_many_copies_are_under_way_and_so_many_slots_spare_at_most() -> None:
    kept = scores(e05=0, e06=0, e17=0)
    refill = missing()
    refill.rate = 2.9
    assert len(choose(refill, kept, HERE, free=2).enter) == 2
    refill.observe(MISSED, MISSED)
    assert len(choose(refill, kept, HERE, free=2, under_way=1).enter) == 1
    refill.observe(MISSED, MISSED)
    assert choose(refill, kept, HERE, under_way=2, free=2) == SlotChanges([], [])
    refill.observe(MISSED, MISSED)  # into empty slots come more
    assert choose(refill, kept, HERE, under_way=2, free=9) == SlotChanges([*sorted_keys(MISSED)], [])
    refill.observe(MISSED, MISSED)
    assert choose(refill, kept, HERE, under_way=int(_MOST), free=9) == SlotChanges([], [])
    refill.observe(MISSED, MISSED)  # no slot is free: some are made, for later
    assert choose(refill, kept, HERE) == SlotChanges([], [ExpertKey(0, 5), ExpertKey(0, 6)])
    refill.observe(MISSED, MISSED)  # enough are promised
    assert choose(refill, kept, HERE, promised=3) == SlotChanges([], [])
    refill.observe(MISSED, MISSED)  # enough are free: nobody has to leave
    assert choose(refill, kept, HERE, free=5).leave == []


def test_where_all_experts_fit_all_come_to_stay() -> None:
    for num_slots, kept in ((11, 9), (12, 12), (15, 12)):  # two are spare where some are absent
        rig = DeviceRig(num_slots)
        rig.memory.refill._most_spare = 3
        for _ in range(30):
            rig.memory.open_still()
            log = np.where(rig.memory.residency(), HIT, CPU).astype(np.int32)
            rig.memory.close_pass(log)
        assert len(rig.resident) == kept
        rig.check()


def test_few_slots_are_not_spared_for_copies() -> None:
    refill = Refill(*SHAPE, 31)
    refill.rate = 6.0
    refill.observe(MISSED, MISSED)
    changes = choose(refill, scores(e05=0, e06=0, e17=0), HERE, idle=True)
    assert changes == SlotChanges([ExpertKey(0, 1)], [ExpertKey(0, 5)])


def test_it_pays_where_layers_miss_few_and_does_not_change_its_mind_with_every_pass() -> None:
    refill = Refill(*SHAPE, 64)
    assert not refill.pays  # nothing is known
    none, one, two = table(), table((0, 1), (1, 1)), table((0, 1), (0, 2), (1, 1), (1, 2))
    refill.count(two, 3.3)
    assert not refill.pays
    for _ in range(30):
        refill.count(one, 3.3)
    assert refill.pays
    for missed in (two, two, one, two, none):
        refill.count(missed, 3.3)
        assert refill.pays
    for _ in range(40):
        refill.count(two, 3.3)
    assert not refill.pays
    for _ in range(40):
        refill.count(one, 1.5)  # a slow CPU: the link reads one of two whole
    assert not refill.pays


@pytest.mark.parametrize(("uses", "more"), [(3, True), (0, False)])
def test_the_rate_follows_what_changes_were_worth(uses: int, more: bool) -> None:
    refill, kept = missing(), scores(e05=0, e06=0, e17=0)
    for at in range(400):
        choose(refill, kept, HERE, idle=True)
        used = MISSED if at % _HORIZON < uses else table()
        refill.observe(used | table((1, 1)), MISSED)
    assert refill.gain == pytest.approx(uses, abs=0.3)
    assert refill.rate == pytest.approx(_MOST if more else _LEAST, abs=0.2) and _LEAST < _FIRST < _MOST


def test_uses_of_what_left_count_against_a_change() -> None:
    refill, kept = missing(), scores(e05=0, e06=0, e17=0)
    for _ in range(200):
        choose(refill, kept, HERE, idle=True)
        refill.observe(MISSED | HERE, MISSED)
    assert refill.gain == pytest.approx(0, abs=0.1) and refill.rate == _LEAST


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 999), st.integers(1, 12), st.integers(4, 40), st.booleans(), st.booleans(),
    st.integers(0, 10),
)  # fmt: skip
def test_no_slot_is_written_while_an_open_pass_may_read_it(
    seed: int, num_slots: int, passes: int, per_layer: bool, slow: bool, rate: int
) -> None:
    rig, random = DeviceRig(num_slots), np.random.default_rng(seed)
    memory, rig.per_layer = rig.memory, per_layer
    memory.refill.rate, memory.refill._most_spare = float(rate), rate
    open_tables: list[tuple[torch.Tensor, torch.Tensor]] = []

    def look() -> None:
        """Whatever an open pass finds in its table is right, or is waited for."""
        for addresses, tickets in open_tables:
            for key in rig.keys:
                if 0 <= tickets[key] <= int(rig.block.done):
                    assert rig.is_right(key, int(addresses[key]))

    def close() -> None:
        _, tickets = open_tables[0]
        look()
        log = np.zeros((2, 6), dtype=np.int32)
        for key in rig.keys:
            if random.random() < 0.4:
                late = tickets[key] > int(rig.block.done)
                log[key] = (LATE if late else HIT) if tickets[key] >= 0 else random.choice([CPU, MISS])
        open_tables.pop(0)
        memory.close_pass(log)

    def run() -> None:
        for at in range(passes):
            rig.scores[:] = random.random((2, 6))
            if not open_tables and random.random() < 0.2:  # one that fills slots itself
                memory.open_pass()
                log, _ = rig.play(random.integers(0, 6, (2, 1, 2)).tolist(), 1)
                memory.close_pass(log)
                rig.check()
            memory.open_still()
            open_tables.append(
                tuple(torch.stack([getattr(rig.block.view(i), name) for i in range(2)]).clone()
                      for name in ("address", "ticket"))  # type: ignore[arg-type]
            )  # fmt: skip
            look()
            rig.check()
            if len(open_tables) > 1 or random.random() < 0.2 or at == passes - 1:
                close()
        while open_tables:
            close()

    if slow:
        with rig.transfers.paused():
            run()
    else:
        run()
    rig.check()
    memory.open_pass()
    assert not memory._promised
    memory.close_pass(np.zeros((2, 6), dtype=np.int32))
    rig.check()
