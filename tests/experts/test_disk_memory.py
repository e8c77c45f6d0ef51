"""Slots of experts on the disk: what is worth a slot comes into one, whole, and from RAM alone."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from disk_rig import stores

from localmoe.core.types import ExpertKey
from localmoe.experts.disk_memory import DiskExpertMemory
from localmoe.experts.disk_store import DiskStore
from localmoe.experts.residency_block import ResidencyBlock
from localmoe.experts.slots import DeviceSlots
from localmoe.experts.transfers import HostTransfers
from localmoe.kernels.residency import CPU, HIT

LAYERS, EXPERTS, SLOTS = 3, 12, 8
PLACES = EXPERTS + 8  # in RAM
CPU_DEVICE = torch.device("cpu")


def memory_of(store: DiskStore) -> DiskExpertMemory:
    block = ResidencyBlock(LAYERS, EXPERTS, CPU_DEVICE)
    slots = DeviceSlots(SLOTS, store.largest_record, store.word, CPU_DEVICE)
    return DiskExpertMemory(
        store, slots, block, HostTransfers(block.done), lambda last_use: (last_use.astype(np.float32), True)
    )


def run_pass(
    memory: DiskExpertMemory, store: DiskStore, asked: list[ExpertKey], *, behind: bool = False
) -> None:
    """As the GPU and the lane do: what is in no slot is computed by the CPU, for which it comes into RAM."""
    (memory.open_behind if behind else memory.open_pass)()
    log = np.zeros((LAYERS, EXPERTS), dtype=np.int32)
    for key in asked:
        log[key] = HIT if memory.residency()[key] else CPU
        if log[key] == CPU:
            with store.held(key.layer, [key.expert], counts=False) as (_, groups):
                assert list(groups)
    memory.close_pass(log)


def check(memory: DiskExpertMemory, whole: object) -> None:
    for key in memory.resident_keys():
        held = memory.slots._arena[int(memory._slot_of[key])]
        wanted = whole.record(key)  # type: ignore[attr-defined]
        assert torch.equal(held[: len(wanted)], wanted), key
    assert not memory._disk._places.held.any() or memory._lent


@pytest.mark.parametrize("behind", [False, True])
def test_slots_follow_what_is_asked_for_most(tmp_path: Path, behind: bool) -> None:
    store, whole = stores(tmp_path, PLACES, layers=LAYERS, experts=EXPERTS)
    with store, whole:
        memory, chance = memory_of(store), random.Random(0)
        often = [ExpertKey(layer, expert) for layer in range(LAYERS) for expert in (0, 1)]
        for _ in range(40):
            others = [ExpertKey(layer, chance.randrange(2, EXPERTS)) for layer in range(LAYERS)]
            run_pass(memory, store, [*often, *others], behind=behind)
            memory.drop_prefetches()  # as a policy does when a window is over
            check(memory, whole)
        memory.pump()
        assert set(often) <= set(memory.resident_keys()) and len(memory.resident_keys()) == SLOTS
        # what is in slots is the first that RAM can do without
        in_ram = store.residency() & (store.addresses != 0)
        assert in_ram.sum() == PLACES and not all(in_ram[key] for key in often)
        memory.close()
        assert not store._places.held.any()


def test_what_is_foretold_and_not_in_ram_is_read_and_else_copied(tmp_path: Path) -> None:
    store, whole = stores(tmp_path, PLACES, layers=LAYERS, experts=EXPERTS)
    with store, whole:
        memory, key = memory_of(store), ExpertKey(1, 5)
        memory.prefetch(key, 0.0)
        assert not memory.waiting  # nothing is there to be copied
        with store.held(*key[:1], [key.expert]) as (_, groups):
            assert list(groups) == [[5]]
        memory.prefetch(key, 0.0)
        memory.pump()
        assert memory.resident_keys() == [key]
        check(memory, whole)
        memory.close()


def test_emptied_slots_give_back_what_was_lent(tmp_path: Path) -> None:
    store, whole = stores(tmp_path, PLACES, layers=LAYERS, experts=EXPERTS)
    with store, whole:
        memory = memory_of(store)
        run_pass(memory, store, [ExpertKey(0, expert) for expert in range(6)])
        memory.open_pass()
        memory.abandon_pass()
        assert not store._places.held.any() and not memory.resident_keys()
        assert not store._places.elsewhere.any()
        memory.close()
