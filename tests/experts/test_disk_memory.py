"""Slots of experts on the disk: what is worth a slot comes into one, whole, and from RAM alone."""

from __future__ import annotations

import random
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from experts.disk_rig import memory_of, run_pass, settle, stores

from localmoe.core.types import ExpertKey
from localmoe.experts.disk_memory import DiskExpertMemory
from localmoe.experts.disk_reader import DiskReader
from localmoe.kernels.residency import ON_DISK

LAYERS, EXPERTS, SLOTS = 3, 12, 8
PLACES = EXPERTS + 8  # in RAM


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
        memory, chance = memory_of(store, SLOTS), random.Random(0)
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


def test_an_answer_ends_the_filling_of_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, whole = stores(tmp_path, PLACES, layers=LAYERS, experts=EXPERTS)
    begun: list[Future[None]] = []

    def read(reader: DiskReader, offset: int, record: torch.Tensor) -> Future[None]:
        begun.append(Future())
        return begun[-1]

    with store, whole:
        memory = memory_of(store, SLOTS)
        monkeypatch.setattr(DiskReader, "read", read)
        store.fill()
        under_way = len(begun)
        memory.begin_answer()
        for one in list(begun):
            one.set_result(None)
        assert 0 < len(begun) == under_way < PLACES
        memory.close()


def test_what_is_foretold_and_not_in_ram_is_read_and_else_copied(tmp_path: Path) -> None:
    store, whole = stores(tmp_path, PLACES, layers=LAYERS, experts=EXPERTS)
    with store, whole:
        memory, key = memory_of(store, SLOTS), ExpertKey(1, 5)
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
        memory = memory_of(store, SLOTS)
        run_pass(memory, store, [ExpertKey(0, expert) for expert in range(6)])
        memory.open_pass()
        memory.abandon_pass()
        assert not store._places.held.any() and not memory.resident_keys()
        assert not store._places.elsewhere.any()
        memory.close()


@pytest.mark.parametrize("behind", [False, True])
def test_what_kernels_may_read_stays_in_ram_while_a_pass_is_open(tmp_path: Path, behind: bool) -> None:
    layers = 8
    store, whole = stores(tmp_path, 80, layers=layers, experts=EXPERTS)
    with store, whole:
        memory, chance, crossed = memory_of(store, SLOTS), random.Random(0), 0
        memory.reads_ram = True
        for number in range(30):
            often = [ExpertKey(layer, chance.randrange(4)) for layer in range(layers)]
            others = [ExpertKey(layer, chance.randrange(EXPERTS)) for layer in range(layers)]
            every = [ExpertKey(layer, expert) for layer in range(layers) for expert in range(EXPERTS)]
            asked = every if number % 10 == 9 else sorted({*often, *others})  # a prompt sweeps
            crossed += run_pass(memory, store, asked, behind=behind, whole=whole)
            settle(store)  # what a prompt reads ahead
            check(memory, whole)
        assert crossed > 30 and memory.counters().h2d_bytes > 0
        assert not store._places.reach.held.any()
        memory.prepare_pass()
        assert store._places.reach.held.any()
        memory.forget()  # as an engine is reset
        store.forget()
        assert not store.residency().any()
        run_pass(memory, store, every[:60], whole=whole)
        memory.prepare_pass()
        assert store._places.reach.held.any()
        memory.open_pass()
        memory.abandon_pass()
        assert not store._places.reach.held.any()
        memory.close()


def test_without_the_link_the_table_reaches_nothing_in_ram(tmp_path: Path) -> None:
    store, whole = stores(tmp_path, 80, layers=8, experts=EXPERTS)
    with store, whole:
        memory = memory_of(store, SLOTS)
        run_pass(memory, store, [ExpertKey(layer, 0) for layer in range(8)])
        memory.open_pass()
        here = memory.residency()
        for layer in range(8):
            view = memory.block.view(layer)
            assert ((view.ticket == ON_DISK).numpy() == ~here[layer]).all()
        assert not store._places.reach.held.any()
        memory.close()
