"""Experts on a disk in simulated time: stories worked out by hand, and the engine's own reads and slots
beside them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from experts.disk_rig import memory_of, run_pass, stores
from numpy.typing import NDArray
from prefetch.test_simulator import MACHINE, TOP_K, plain, story_of

from localmoe.core.types import ExpertKey
from localmoe.experts.disk_reader import DiskReader
from localmoe.experts.disk_store import DiskStore
from localmoe.prefetch.policy import CacheShape
from localmoe.prefetch.registry import POLICIES
from localmoe.prefetch.scheduler import Scheduler
from localmoe.prefetch.simulator import simulate
from localmoe.prefetch.simulator_disk import SimulatedReads
from localmoe.prefetch.simulator_disk_passes import DiskPassMemory
from localmoe.prefetch.simulator_types import Disk, Lane, Machine

LAYERS, EXPERTS, SLOTS = 3, 12, 8  # beside the engine's own
PLACES = EXPERTS + 8
# a layer takes 3 s and 1 more for each expert; 6 experts a layer, of which all of one layer fit into RAM
IN_PLACE = replace(MACHINE, disk=Disk(ram_experts=6, read_bytes=100, read_s=10.0))
WHOLE = replace(IN_PLACE, whole_passes=True, lane=Lane(2.0, 0.5, 0.25))


def test_what_is_in_ram_is_computed_while_the_rest_is_read() -> None:
    """The first token reads four experts, the last of each layer is computed after it came. In the second
    one, layer 0 has expert 0 and reads 2: 3 s, 1 of computing beside the read of 10, and 1 more."""
    first = simulate("on-demand", IN_PLACE, [plain(((0, 1), (2, 3)))])
    assert first.counters.decode_s == pytest.approx(2 * (3 + 20 + 1))
    assert (first.counters.hits, first.counters.misses, first.reads, first.copies) == (0, 4, 4, 0)
    assert first.counters.stall_s == pytest.approx(2 * (10 + 9))
    assert first.counters.freeze().disk_bytes_per_token == 400
    both = simulate("on-demand", IN_PLACE, [plain(((0, 1), (2, 3))), plain(((0, 2), (2, 3)))])
    assert both.counters.decode_s - first.counters.decode_s == pytest.approx((3 + 10 + 1) + (3 + 2))
    assert (both.counters.hits, both.counters.misses, both.reads) == (3, 5, 5)
    assert both.counters.freeze().h2d_bytes == 0


def test_the_lane_waits_for_the_disk_and_slots_fill_behind_the_pass() -> None:
    """Of each layer the CPU computes two experts of which none is in RAM: 3 s, then 0.25, of the 20 of two
    reads, and 2 for the last one. Behind the pass all four come into slots, 10 s each, before the next pass
    reads the first one: in order of the numbers, as all were asked for once."""
    once = plain(((0, 1), (2, 3)))
    first = simulate("on-demand", WHOLE, [once])
    assert first.counters.decode_s == pytest.approx(2 * (3 + 20 + 2))
    assert (first.counters.computed, first.counters.hits, first.reads, first.copies) == (4, 0, 4, 0)
    more = simulate("on-demand", replace(WHOLE, disk=Disk(12, 100, 10.0)), [once] * 4)
    assert more.counters.hits >= 4 and more.copies == more.counters.prefetched == 4 and more.reads == 4


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("machine", [IN_PLACE, WHOLE])
def test_every_demand_is_met_and_a_faster_disk_is_faster(policy: str, machine: Machine) -> None:
    story = [*story_of(5, 3), plain(((0, 1), (2, 3)))]
    times = []
    for disk in (Disk(6, 100, 10.0), Disk(6, 100, 5.0), Disk(12, 100, 5.0)):
        tally = simulate(policy, replace(machine, disk=disk), story)
        assert tally.num_demands == sum(int(demands.sum()) for demands in tally.demands)
        assert tally.reads > 0 and tally.counters.decode_disk_bytes == 100 * tally.reads
        times.append(tally.counters.decode_s)
    assert times == sorted(times, reverse=True) and times[0] > times[1] > times[2]


class Held:
    """Reads of a store, which arrive when nobody decides anything."""

    def __init__(self, store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self._begun: queue.SimpleQueue[tuple[Future[None], int, torch.Tensor] | None] = queue.SimpleQueue()
        self._store, self.left = store, 0

        def read(reader: DiskReader, offset: int, memory: torch.Tensor) -> Future[None]:
            done: Future[None] = Future()
            self.left += 1
            self._begun.put((done, offset, memory))
            return done

        monkeypatch.setattr(DiskReader, "read", read)
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (one := self._begun.get()) is not None:
            done, offset, memory = one
            with self._store.file.path.open("rb") as file:
                file.seek(offset)
                memory.copy_(torch.frombuffer(bytearray(file.read(len(memory))), dtype=torch.uint8))
            with self._store.lock:
                done.set_result(None)
                self.left -= 1
                self._store.lock.notify_all()

    def settle(self) -> None:
        with self._store.lock:
            assert self._store.lock.wait_for(lambda: not self.left, 30)

    def end(self) -> None:
        self._begun.put(None)
        self.thread.join(30)


@pytest.fixture
def places() -> int:
    return PLACES


@pytest.fixture
def layers() -> int:
    return LAYERS


@pytest.fixture
def real(
    places: int, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[DiskStore, Held]]:
    store, whole = stores(tmp_path, places, layers=layers, experts=EXPERTS)
    with store, whole:
        held = Held(store, monkeypatch)
        yield store, held
        held.end()


@pytest.mark.parametrize("seed", range(3))
def test_ram_holds_what_it_does_in_the_engine(real: tuple[DiskStore, Held], seed: int) -> None:
    """Reads that end once a demand has begun them: the same experts in RAM after each, among them what
    prompts read ahead, the same hits, reads and waste."""
    store, held = real
    ours = SimulatedReads(Disk(PLACES, 1, 0.0), (LAYERS, EXPERTS))
    chance = np.random.default_rng(seed)
    for number in range(300):
        layer = number % LAYERS
        count = EXPERTS if number % 30 < LAYERS else int(chance.integers(1, 4))
        experts = sorted(chance.choice(EXPERTS, count, replace=False).tolist())
        if chance.random() < 0.3:
            key = ExpertKey(int(chance.integers(LAYERS)), int(chance.integers(EXPERTS)))
            store.prefetch(key)
            held.settle()
            ours.prefetch(key)
            ours.advance(0.0)
        with store.held(layer, experts) as (report, groups):
            list(groups)
        held.settle()
        hits, late, missing = ours.demand(layer, experts, counts=True)
        ours.advance(0.0)
        while not ours.here[layer, experts].all():
            ours.ask_again(layer, experts)
            ours.advance(0.0)
        ours.let_go(layer, experts)
        assert (set(hits), set(late), set(missing)) == (report.hits, report.late, report.misses)
        assert np.array_equal(ours.here, store.addresses != 0), number
    found = store.counters()
    assert (ours.done * store.file.stride(0), ours.prefetched) == (found.disk_bytes, found.prefetched)
    assert ours.wasted == found.wasted > 0


@pytest.mark.parametrize(("layers", "places"), [(LAYERS, PLACES), (8, 80)])
def test_slots_hold_what_they_do_in_the_engine(
    real: tuple[DiskStore, Held], layers: int, places: int
) -> None:
    """Copies and reads that take no time; of what is in RAM nothing is within the link's reach, and much."""
    store, held = real
    memory, lane, disk = memory_of(store, SLOTS), Lane(1.0, 0.0, 0.0), Disk(places, 1, 0.0)
    memory.reads_ram, crossed = True, 0
    machine = Machine(
        layers, EXPERTS, TOP_K, SLOTS, expert_bytes=1, copy_s=0.0, draft_token_s=0.0, layer_s=0.0,
        expert_s=0.0, lane=lane, disk=disk,
    )  # fmt: skip
    scheduler = Scheduler(POLICIES["on-demand"](CacheShape(layers, EXPERTS, TOP_K, SLOTS)))
    ours = DiskPassMemory(machine, scheduler, lane, disk)
    scheduler.attach(ours, copies=lambda: ours.copies)
    chance, hits = np.random.default_rng(1), 0
    often = [ExpertKey(layer, expert) for layer in range(layers) for expert in (0, 1)]
    for number in range(150):
        asked = {key for key in often if chance.random() < 0.8}
        asked |= {ExpertKey(layer, int(chance.integers(EXPERTS))) for layer in range(layers)}
        crossed += run_pass(memory, store, sorted(asked))
        held.settle()
        tokens: NDArray[np.int64] = np.zeros((layers, EXPERTS), dtype=np.int64)
        for key in asked:
            tokens[key] = 1
        hits += int(ours.run_pass(tokens)[0].sum())
        ours.advance(0.0)
        assert np.array_equal(ours.residency(), memory.residency()), number
        assert np.array_equal(ours._reads.here, store.addresses != 0), number
    assert hits > 300 and len(memory.resident_keys()) == SLOTS and (crossed > 100) == (layers > LAYERS)
    assert ours.copies >= crossed  # and those into slots
    memory.close()
