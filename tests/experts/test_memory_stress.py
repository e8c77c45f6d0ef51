"""A thousand demands on a tiny cache with random policy and link: every view is the host's record."""

from __future__ import annotations

import random
import time

import pytest
import torch
from expert_rig import Rig
from torch import Tensor

from localmoe.core.errors import TransferError
from localmoe.core.events import RoomWanted
from localmoe.core.types import ExpertKey
from localmoe.experts.link import HostLink
from localmoe.experts.slots import DeviceSlots

LAYERS, EXPERTS, DEMANDS = 4, 8, 1000


class TremblingLink(HostLink):
    """Waits before, between and after the halves of a copy; now and then it breaks half-way."""

    def __init__(self, chance: random.Random, failure_rate: float) -> None:
        super().__init__(None)
        self._chance = chance
        self._failure_rate = failure_rate
        self.failures = 0
        self.copies = 0

    def copy(self, record: Tensor, slots: DeviceSlots, slot: int) -> None:
        self._pause()
        slots.write(slot, torch.full_like(record, float("nan")))  # who reads too early sees this
        self._pause()
        if self._chance.random() < self._failure_rate:
            self.failures += 1
            raise RuntimeError("the link trembled")
        super().copy(record, slots, slot)
        self.copies += 1
        self._pause()

    def _pause(self) -> None:
        if self._chance.random() < 0.2:
            time.sleep(self._chance.random() * 5e-4)


def random_policy(chance: random.Random, broken: list[str]):  # type: ignore[no-untyped-def]
    """Names any candidate, or nobody; notes what it should not have been offered."""

    def choose(room: RoomWanted) -> ExpertKey | None:
        if len(set(room.candidates)) != len(room.candidates) or room.key in room.candidates:
            broken.append(f"{room}")
        if not room.candidates or chance.random() < 0.3:
            return None
        return chance.choice(list(room.candidates))

    return choose


@pytest.mark.parametrize(("num_slots", "failure_rate", "seed"), [(1, 0.0, 0), (3, 0.0, 1), (5, 0.03, 2)])
def test_random_traffic_never_shows_a_reader_anything_but_the_hosts_weights(
    num_slots: int, failure_rate: float, seed: int
) -> None:
    chance, broken = random.Random(seed), []
    link = TremblingLink(random.Random(seed + 1), failure_rate)
    rig = Rig(
        num_slots,
        layers=LAYERS,
        experts=EXPERTS,
        link=link,
        choose=random_policy(random.Random(seed), broken),
    )
    failed = hits = late = asked = 0
    end = time.monotonic() + 60
    try:
        for _ in range(DEMANDS // 3 if num_slots != 3 else DEMANDS):
            for _ in range(chance.randrange(4)):
                key = ExpertKey(chance.randrange(LAYERS), chance.randrange(EXPERTS))
                rig.memory.prefetch(key, chance.choice([0.0, 1.0, 2.0, float(key.layer)]))
            if chance.random() < 0.1:
                rig.memory.drop_prefetches()
            if chance.random() < 0.3:  # let some of them start
                time.sleep(chance.random() * 1e-3)
            layer = chance.randrange(LAYERS)
            experts = chance.sample(range(EXPERTS), chance.randrange(1, 5))
            leave_after = chance.randrange(1, 3) if chance.random() < 0.1 else len(experts)
            try:
                with rig.memory.demand(layer, experts) as (report, views):
                    found = [*report.hits, *report.late, *report.misses]
                    assert sorted(found) == sorted(experts)
                    hits, late = hits + len(report.hits), late + len(report.late)
                    asked += len(experts)
                    for count, view in enumerate(views, start=1):
                        rig.check(layer, view)
                        if chance.random() < 0.2:
                            time.sleep(chance.random() * 3e-4)
                            rig.check(layer, view)  # still there after a while
                        if count == leave_after:
                            break
            except TransferError:
                failed += 1
            assert time.monotonic() < end
            assert len(rig.resident()) <= num_slots
    finally:
        rig.memory.close()
    counters = rig.memory.counters()
    assert broken == []
    assert 0 < hits < asked
    assert late > 0 or num_slots == 1
    assert counters.h2d_bytes == link.copies * rig.store.layouts[0].num_bytes(torch.float32)
    assert counters.wasted <= counters.prefetched <= link.copies
    assert counters.wasted > 0 or num_slots == 1
    assert (failed > 0) == (failure_rate > 0)
    assert failed <= link.failures
