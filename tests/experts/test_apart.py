"""Slots that are filled one by one from a RAM that holds a part of all: both together keep as many experts as
they can, whatever the policy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from disk_rig import settle, stores
from expert_rig import oldest

from localmoe.core.events import RoomWanted
from localmoe.core.types import ExpertKey
from localmoe.experts.apart import ApartFromRam
from localmoe.experts.claims import VictimChooser
from localmoe.experts.disk_store import DiskStore
from localmoe.experts.host_store import HostStore
from localmoe.experts.link import HostLink
from localmoe.experts.memory import ExpertMemory
from localmoe.experts.slots import DeviceSlots
from localmoe.kernels.weight_forms import WeightForm
from localmoe.prefetch.lru_shares import LruShares

LAYERS, EXPERTS, MOST = 3, 12, 3  # the last: experts of a demand
ALL = LAYERS * EXPERTS


@contextmanager
def memory_over_disk(
    folder: Path, places: int, num_slots: int, choose: VictimChooser, *, apart: bool = True
) -> Iterator[tuple[ExpertMemory, DiskStore, HostStore]]:
    disk, whole = stores(folder, places, layers=LAYERS, experts=EXPERTS, form=WeightForm.PLAIN)
    slots = DeviceSlots(num_slots, disk.layouts[0].elements, disk.dtype, torch.device("cpu"))
    chooser: VictimChooser = ApartFromRam(disk, choose, lambda: memory.residency()) if apart else choose
    memory = ExpertMemory(disk, slots, HostLink(None), chooser)
    try:
        yield memory, disk, whole
    finally:
        memory.close()
        disk.close()
        whole.close()


def ask(memory: ExpertMemory, layer: int, experts: list[int], whole: HostStore) -> None:
    memory.store.note_demand(layer, experts)
    with memory.demand(layer, experts) as (_, views):
        for view in views:
            gate_up, down = whole.views(ExpertKey(layer, view.expert))
            assert torch.equal(view.gate_up, gate_up) and torch.equal(view.down, down)


def run(memory: ExpertMemory, whole: HostStore, passes: int, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(passes):
        for layer in range(LAYERS):
            if chance.random() < 0.3:
                memory.prefetch(ExpertKey(chance.randrange(LAYERS), chance.randrange(EXPERTS)), 1.0)
            ask(memory, layer, chance.sample(range(EXPERTS), chance.randrange(1, MOST + 1)), whole)
    memory.settle()


def shares() -> VictimChooser:
    return LruShares(LAYERS, 14).victim


@pytest.mark.parametrize("policy", ["oldest", "a share a layer"])
def test_what_both_have_room_for_is_read_once(policy: str, tmp_path: Path) -> None:
    read: dict[bool, int] = {}
    for apart in (False, True):
        choose = oldest if policy == "oldest" else shares()
        with memory_over_disk(tmp_path / str(apart), ALL - 8, 14, choose, apart=apart) as made:
            memory, disk, whole = made
            run(memory, whole, 60, seed=1)
            settle(disk)
            before = disk.read_bytes
            run(memory, whole, 60, seed=2)
            settle(disk)
            read[apart] = disk.read_bytes - before
            if apart:
                here = (disk.addresses != 0) | memory.residency()
                assert here.all()
    assert read[True] == 0 < read[False]


def test_the_policy_chooses_among_those_that_ram_holds_too_and_ram_hears_of_it(tmp_path: Path) -> None:
    disk, whole = stores(tmp_path, EXPERTS, layers=LAYERS, experts=EXPERTS, form=WeightForm.PLAIN)
    with disk, whole:
        in_slots = np.zeros((LAYERS, EXPERTS), dtype=np.bool_)
        in_ram = [ExpertKey(0, 1), ExpertKey(1, 1)]
        for key in in_ram:
            disk.record(key)
        alone, new = ExpertKey(2, 5), ExpertKey(2, 7)
        for key in (*in_ram, alone):
            in_slots[key] = True
        asked: list[list[ExpertKey]] = []

        def last(room: RoomWanted) -> ExpertKey | None:
            asked.append(list(room.candidates))
            return room.candidates[-1] if room.candidates[0] != alone else None

        choose = ApartFromRam(disk, last, lambda: in_slots)
        room = RoomWanted(new, [alone, *in_ram], 0, 2, True)
        assert choose(room) == in_ram[1] and asked == [in_ram]
        elsewhere = disk._places.elsewhere
        assert elsewhere[new] and elsewhere[alone] and elsewhere[in_ram[0]] and not elsewhere[in_ram[1]]
        assert in_slots[in_ram[1]], "the table is the memory's own"
        # a policy that names none of these: a demand takes the first, a prefetch waits
        never = ApartFromRam(disk, lambda room: None, lambda: in_slots)
        assert never(room) == in_ram[0]
        assert never(RoomWanted(new, [alone, *in_ram], 0, 2, False)) is None
        assert not disk._places.elsewhere[new]
        assert never(RoomWanted(new, [alone, *in_ram], 1, 2, True)) is None  # there is a free one
        assert disk._places.elsewhere[new] and disk._places.elsewhere[in_ram[0]]
        disk.forget()
        assert choose(room) is None and asked[-1] == [alone, *in_ram], "RAM holds none of them"


def test_ram_keeps_what_is_asked_for_wherever_it_was_found(tmp_path: Path) -> None:
    with memory_over_disk(tmp_path, EXPERTS, 4, oldest) as (memory, disk, whole):
        for _ in range(3):
            ask(memory, 0, [9, 10, 11], whole)
        for expert in range(9):
            ask(memory, 1, [expert], whole)
        ask(memory, 2, [0, 1], whole)
        held = disk.addresses != 0
        assert held.sum() == EXPERTS and (held | memory.residency())[0, 9:].all(), "asked for most"
