"""Slots that are filled while nobody asks for anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from experts.device_rig import DeviceRig
from experts.disk_rig import memory_of, run_pass, settle, stores
from hypothesis import given
from hypothesis import strategies as st

from localmoe.core.errors import DiskError
from localmoe.core.types import ExpertKey
from localmoe.experts.disk_reader import DiskReader
from localmoe.experts.idle_slots import best_for_layers, fill_slots

LAYERS, EXPERTS = 3, 12


@given(st.integers(0, 1000), st.integers(0, 30))
def test_layers_get_as_many_and_the_best_of_each(seed: int, most: int) -> None:
    chance = np.random.default_rng(seed)
    of, worth = chance.random((4, 6)) < 0.6, chance.integers(0, 5, (4, 6)).astype(np.float64)
    held = chance.integers(0, 4, 4)
    found = best_for_layers(of, worth, held, most)
    assert len(found) == len(set(found)) == min(most, of.sum()) and all(of[key] for key in found)
    counts = held.copy()
    for number, key in enumerate(found):
        left = {ExpertKey(*pair) for pair in np.argwhere(of).tolist()}.difference(found[:number])
        assert counts[key.layer] == min(counts[layer] for layer, _ in left)
        assert worth[key] == max(worth[pair] for pair in left if pair[0] == key.layer)
        counts[key.layer] += 1


def test_free_slots_are_filled_and_nothing_makes_room() -> None:
    rig = DeviceRig(40, layers=3, experts=24)
    memory = rig.memory
    memory.load(ExpertKey(1, 5), memory.take_free(1, 24, 1)[0])
    turns = 0
    while fill_slots(memory):
        turns += 1
        rig.check()
    assert memory.num_free == 0 and turns == 3, "some at a time"
    assert sorted(memory.held()) == [13, 13, 14] and ExpertKey(1, 5) in rig.resident
    before = rig.resident
    assert not fill_slots(memory) and rig.resident == before
    assert memory.counters().prefetched == memory.counters().wasted == 0
    memory.close()


def test_where_slots_are_only_for_what_the_cpu_does_not_compute_none_is_filled() -> None:
    rig = DeviceRig(8)
    rig.memory.may_prefetch = False
    assert not fill_slots(rig.memory) and not rig.resident
    rig.memory.close()
    rig.memory.may_prefetch = True
    assert not fill_slots(rig.memory), "it is closed"


@pytest.mark.parametrize(
    ("layers", "places", "slots"), [(3, 20, 8), (3, 20, 16), (3, 24, 20), (3, 36, 8), (8, 80, 30)]
)
def test_slots_and_ram_hold_as_many_experts_as_they_can(
    tmp_path: Path, layers: int, places: int, slots: int
) -> None:
    store, whole = stores(tmp_path, places, layers=layers, experts=EXPERTS)
    with store, whole:
        memory = memory_of(store, slots)
        memory.reads_ram = True
        run_pass(memory, store, [ExpertKey(layer, 7) for layer in range(layers)])
        store.fill()
        settle(store)
        memory.prepare_pass()  # as behind an answer's last token
        assert store._places.reach.held.any() == (layers == 8)
        store.fill()
        while fill_slots(memory):
            pass
        settle(store)
        in_ram, in_slots = store.addresses != 0, memory.residency()
        assert in_slots.sum() == slots and in_ram.sum() == places
        assert (in_ram | in_slots).sum() == min(layers * EXPERTS, places + slots)
        assert in_slots[:, 7].all(), "what was asked for comes first"
        for key in memory.resident_keys():
            wanted = whole.record(key)
            assert np.array_equal(memory.slots._arena[int(memory._slot_of[key])][: len(wanted)], wanted), key
        assert not store._places.held.any() or memory._lent
        memory.close()


def test_an_answer_ends_it_and_what_was_filled_serves_it(tmp_path: Path) -> None:
    store, whole = stores(tmp_path, 20, layers=LAYERS, experts=EXPERTS)
    with store, whole:
        memory = memory_of(store, 16)
        store.fill()
        while memory.residency().sum() < 2 * LAYERS:
            assert fill_slots(memory)
        memory.begin_answer()
        assert store._to_fill is None
        settle(store)
        filled = list(memory.resident_keys())
        others = [ExpertKey(*pair) for pair in np.argwhere(~memory.residency()).tolist()[::4]]
        reports, close = [], memory.close_pass
        memory.close_pass = lambda log: reports.append(close(log)) or reports[-1]  # type: ignore[method-assign]
        run_pass(memory, store, filled + others, whole=whole)
        (report,) = reports
        assert report.hits.sum() == len(filled) >= 2 * LAYERS
        memory.close()


def test_a_slot_whose_expert_cannot_be_read_is_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, whole = stores(tmp_path, 20, layers=LAYERS, experts=EXPERTS)
    with store, whole:
        memory = memory_of(store, 8)

        def read(reader: DiskReader, offset: int, record: object) -> object:
            raise DiskError("The experts' file cannot be read.")

        monkeypatch.setattr(DiskReader, "read", read)
        with pytest.raises(DiskError):
            memory.load(ExpertKey(0, 0), *memory.take_free(0, EXPERTS, 1))
        assert memory.num_free == 8 and not memory.residency().any()
        memory.close()
