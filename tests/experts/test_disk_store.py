"""Experts in a file, some of them in RAM: whoever holds one reads its bytes, whatever others do meanwhile."""

from __future__ import annotations

import ctypes
import inspect
import linecache
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from experts.expert_rig import LAYOUT, WAIT_S, Once, in_thread, make_store

from localmoe.core.errors import DiskError, LocalMoeError, TransferError
from localmoe.core.types import ExpertKey
from localmoe.experts import disk_reads
from localmoe.experts.disk_reader import DiskReader
from localmoe.experts.disk_store import DiskStore
from localmoe.experts.record_file import RecordFile

LAYERS, EXPERTS = 3, 8
KEYS = [ExpertKey(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
HOST = make_store(LAYERS, EXPERTS)


class Reads:
    """Of all readers, which may be held up or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file: RecordFile | None = None
        self.begun: list[ExpertKey] = []
        self.broken: dict[ExpertKey, BaseException] = {}
        self.slow_s = 0.0
        self._gate = threading.Condition()
        self._stopped: set[ExpertKey] = set()
        fill = DiskReader._fill

        def watched(reader: DiskReader, file: Any, offset: int, memory: Any) -> None:
            key = self._key(offset)
            with self._gate:
                self.begun.append(key)
                self._gate.notify_all()
                assert self._gate.wait_for(lambda: key not in self._stopped, WAIT_S)
            if self.slow_s:
                memory.random_()  # as it is while bytes come
                time.sleep(random.random() * self.slow_s)
            if key in self.broken:
                raise self.broken[key]
            fill(reader, file, offset, memory)

        monkeypatch.setattr(DiskReader, "_fill", watched)

    def _key(self, offset: int) -> ExpertKey:
        assert self.file is not None
        return next(key for key in KEYS if self.file.offset(*key) == offset)

    def stop(self, *keys: ExpertKey) -> None:
        with self._gate:
            self._stopped.update(keys)

    def let(self, *keys: ExpertKey) -> None:
        with self._gate:
            self._stopped.difference_update(keys or set(self._stopped))
            self._gate.notify_all()

    def wait_until_begun(self, key: ExpertKey) -> None:
        with self._gate:
            assert self._gate.wait_for(lambda: key in self.begun, WAIT_S), f"{key} was never read"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    made = Reads(monkeypatch)
    yield made
    made.let()


@pytest.fixture
def file(tmp_path: Path) -> RecordFile:
    made = RecordFile.in_folder(tmp_path, [LAYOUT] * LAYERS, EXPERTS, torch.float32, "those of the host")
    with made.written(lambda done: None) as memory:
        for layer in range(LAYERS):
            place = memory(EXPERTS * made.stride(layer))
            for expert in range(EXPERTS):
                first = expert * made.stride(layer)
                record = HOST.record(ExpertKey(layer, expert)).numpy().tobytes()
                place[first : first + len(record)] = record
            del place
    return made


@pytest.fixture
def make(file: RecordFile, reads: Reads) -> Iterator[Callable[[int], DiskStore]]:
    stores: list[DiskStore] = []
    reads.file = file

    def of(ram_experts: int) -> DiskStore:
        stores.append(DiskStore(file, ram_experts))
        return stores[-1]

    yield of
    reads.let()
    for store in stores:
        store.close()


def at(store: DiskStore, key: ExpertKey) -> bytes:
    """What lies where the expert is said to be."""
    address = int(store.addresses[key])
    assert address, f"{key} is not there"
    return ctypes.string_at(address, LAYOUT.elements * 4)


def expected(key: ExpertKey) -> bytes:
    return HOST.record(key).numpy().tobytes()


def hold(store: DiskStore, layer: int, *experts: int) -> tuple[set[int], set[int], set[int]]:
    """Ask, look at each as it comes and again at the end; (hits, late, misses)."""
    seen: list[int] = []
    with store.held(layer, experts) as (report, groups):
        for group in groups:
            for expert in group:
                assert at(store, ExpertKey(layer, expert)) == expected(ExpertKey(layer, expert))
            seen += group
        for expert in experts:
            assert at(store, ExpertKey(layer, expert)) == expected(ExpertKey(layer, expert))
    assert sorted(seen) == sorted(experts)
    return set(report.hits), set(report.late), set(report.misses)


def settle(store: DiskStore) -> None:
    """Until nothing is read."""
    end = time.monotonic() + WAIT_S
    while store._coming:
        assert time.monotonic() < end
        time.sleep(0.001)


def check_idle(store: DiskStore) -> None:
    """Nobody holds anything, every place is accounted for, and what is said to be there is."""
    settle(store)
    with store.lock:
        places = store._places
        assert not places.held.any() and not store._failed
        used = places.place[places.place >= 0].tolist()
        assert sorted([*used, *places._free]) == list(range(store.ram_experts))
        for key in KEYS:
            assert bool(store.addresses[key]) == (places.place[key] >= 0)
            if store.addresses[key]:
                assert at(store, key) == expected(key), key


@pytest.mark.parametrize("ram_experts", [EXPERTS, EXPERTS + 3, LAYERS * EXPERTS])
def test_records_are_those_of_the_host(make: Callable[[int], DiskStore], ram_experts: int) -> None:
    store = make(ram_experts)
    for key in [*KEYS, *reversed(KEYS)]:
        assert torch.equal(store.record(key), HOST.record(key))
        for found, wanted in zip(store.weights(key), HOST.weights(key), strict=True):
            assert torch.equal(found, wanted)
    check_idle(store)


def test_a_record_is_a_copy_that_stays_when_its_place_is_anothers(make: Callable[[int], DiskStore]) -> None:
    store = make(EXPERTS)
    kept = [store.record(key) for key in KEYS]
    assert all(torch.equal(record, HOST.record(key)) for record, key in zip(kept, KEYS, strict=True))


def test_what_is_found_is_told_and_bytes_are_counted(make: Callable[[int], DiskStore], reads: Reads) -> None:
    store = make(EXPERTS)
    stride = store.file.stride(0)
    assert hold(store, 0, 1, 2) == (set(), set(), {1, 2})
    assert hold(store, 0, 1, 2, 3) == ({1, 2}, set(), {3})
    assert store.counters().disk_bytes == 3 * stride
    reads.stop(ExpertKey(1, 0))
    store.prefetch(ExpertKey(1, 0))
    reads.wait_until_begun(ExpertKey(1, 0))
    store.prefetch(ExpertKey(1, 0))  # it is on its way
    store.prefetch(ExpertKey(0, 1))  # it is there
    timer = threading.Timer(0.05, reads.let)
    timer.start()
    assert hold(store, 1, 0) == (set(), {0}, set())
    timer.join()
    found = store.counters()
    assert (found.disk_bytes, found.prefetched, found.wasted) == (4 * stride, 1, 0)
    assert found.stall_s is not None and found.stall_s > 0.04
    assert len(reads.begun) == 4
    check_idle(store)


def test_few_are_read_ahead_at_a_time(make: Callable[[int], DiskStore], reads: Reads) -> None:
    store = make(LAYERS * EXPERTS)
    reads.stop(*KEYS)
    for key in KEYS:
        store.prefetch(key)
    ahead = int((store.residency()).sum())
    assert 0 < ahead < EXPERTS
    reads.let()
    settle(store)
    assert store.counters().prefetched == ahead


def test_what_was_read_ahead_and_never_asked_for_is_waste(make: Callable[[int], DiskStore]) -> None:
    store = make(EXPERTS)
    store.prefetch(ExpertKey(2, 0))
    settle(store)
    for layer in (0, 1):
        hold(store, layer, *range(EXPERTS))
    found = store.counters()
    assert (found.prefetched, found.wasted) == (1, 1)
    check_idle(store)


def test_a_place_that_is_being_filled_is_given_to_nobody(
    make: Callable[[int], DiskStore], reads: Reads
) -> None:
    """Not even where a demand needs it and the read is but ahead of need."""
    store = make(EXPERTS)
    ahead = [ExpertKey(1, expert) for expert in range(4)]
    reads.stop(*ahead)
    for key in ahead:
        store.prefetch(key)
        reads.wait_until_begun(key)
    holder, outcome = in_thread(lambda: hold(store, 0, *range(EXPERTS)))
    for expert in range(4):
        reads.wait_until_begun(ExpertKey(0, expert))
    time.sleep(0.02)
    assert not outcome
    reads.let()
    holder.join(WAIT_S)
    assert outcome == [(set(), set(), set(range(EXPERTS)))]
    check_idle(store)


def test_what_was_given_up_while_it_was_read_keeps_its_place_until_it_is(
    make: Callable[[int], DiskStore], reads: Reads
) -> None:
    """As by an answer that was stopped."""
    store = make(EXPERTS)
    reads.stop(ExpertKey(0, 0), ExpertKey(0, 1))
    with pytest.raises(KeyboardInterrupt), store.held(0, [0, 1, 2]):
        raise KeyboardInterrupt
    holder, outcome = in_thread(lambda: hold(store, 1, *range(EXPERTS)))
    reads.wait_until_begun(ExpertKey(1, 4))
    time.sleep(0.02)
    reads.let()
    holder.join(WAIT_S)
    assert outcome == [(set(), set(), set(range(EXPERTS)))]
    check_idle(store)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("seed", range(3))
def test_whoever_holds_or_copies_at_random_reads_the_right_bytes(
    make: Callable[[int], DiskStore], reads: Reads, seed: int
) -> None:
    store = make(EXPERTS + seed)
    reads.slow_s = 0.001
    end = time.monotonic() + 0.6

    def work(number: int) -> None:
        chance = random.Random(100 * seed + number)
        while time.monotonic() < end:
            layer = chance.randrange(LAYERS)
            experts = chance.sample(range(EXPERTS), chance.choice([1, 2, 5, EXPERTS]))
            what = chance.random()
            if what < 0.4:
                hold(store, layer, *experts)
            elif what < 0.5:
                with store.held(layer, experts) as (_, groups):
                    next(groups)  # and no more
            elif what < 0.7:
                for expert in experts:
                    store.prefetch(ExpertKey(layer, expert))
            else:
                key = ExpertKey(layer, experts[0])
                assert torch.equal(store.record(key), HOST.record(key))

    workers = [in_thread(lambda number=number: work(number)) for number in range(5)]  # type: ignore[misc]
    for thread, _ in workers:
        thread.join(WAIT_S)
    assert [outcome for _, outcome in workers] == [[None]] * 5, "one hangs, or has failed"
    check_idle(store)


def test_two_that_need_more_than_there_is_wait_for_each_other_and_not_for_ever(
    make: Callable[[int], DiskStore],
) -> None:
    """Each has half of the places, and wants some of the other's."""
    store = make(EXPERTS)
    hold(store, 0, 0, 1, 2, 3)
    hold(store, 1, 0, 1, 2, 3)
    both = threading.Barrier(2)

    def work(layer: int) -> None:
        both.wait(WAIT_S)
        for _ in range(100):
            hold(store, layer, 0, 1, 2, 3, 4, 5)

    workers = [in_thread(lambda layer=layer: work(layer)) for layer in (0, 1)]  # type: ignore[misc]
    for thread, _ in workers:
        thread.join(WAIT_S)
    assert [outcome for _, outcome in workers] == [[None], [None]]
    check_idle(store)


def test_an_error_of_the_disk_reaches_who_waits_and_the_next_one_reads_again(
    make: Callable[[int], DiskStore], reads: Reads
) -> None:
    store = make(EXPERTS)
    reads.broken = {ExpertKey(0, expert): OSError(5, "Input/output error") for expert in (1, 2, 3)}
    with pytest.raises(DiskError, match=r"cannot be read \(Input/output error\)"):
        hold(store, 0, 0, 1, 2, 3)
    with pytest.raises(DiskError, match="cannot be read"):
        store.record(ExpertKey(0, 2))
    reads.broken.clear()
    assert hold(store, 0, 1, 2, 3)[2] == {1, 2, 3}, "and not the error of before"
    check_idle(store)


def test_an_error_of_the_disk_reaches_all_who_wait_for_the_same(
    make: Callable[[int], DiskStore], reads: Reads
) -> None:
    store = make(EXPERTS)
    key = ExpertKey(0, 1)
    reads.broken = {key: OSError(5, "Input/output error")}
    reads.stop(key)
    workers = [in_thread(lambda: store.record(key)) for _ in range(3)]
    reads.wait_until_begun(key)
    reads.let()
    for thread, outcome in workers:
        thread.join(WAIT_S)
        assert isinstance(outcome[0], DiskError)
    check_idle(store)


def test_an_error_of_a_read_that_began_before_it_was_asked_for_is_not_the_askers(
    make: Callable[[int], DiskStore], reads: Reads
) -> None:
    store, key = make(EXPERTS), ExpertKey(0, 1)
    reads.broken = Once({key: OSError(5, "Input/output error")})
    reads.stop(key)
    store.prefetch(key)
    reads.wait_until_begun(key)
    with store.held(0, [1]) as (report, groups):
        assert report.late == {1}
        reads.let()
        assert list(groups) == [[1]] and at(store, key) == expected(key)
    assert reads.begun == [key, key] and not store._older
    check_idle(store)


def filled(store: DiskStore, count: int) -> None:
    """Until so many are there, and no more come."""
    end = time.monotonic() + WAIT_S
    while int((store.addresses != 0).sum()) != count or store._coming:
        assert time.monotonic() < end, f"{int((store.addresses != 0).sum())} came"
        time.sleep(0.001)
    check_idle(store)


@pytest.mark.parametrize("ram_experts", [EXPERTS, EXPERTS + 3, LAYERS * EXPERTS])
def test_free_places_are_filled_as_many_of_each_layer(
    make: Callable[[int], DiskStore], reads: Reads, ram_experts: int
) -> None:
    store = make(ram_experts)
    hold(store, 1, 7)
    store.fill()
    filled(store, ram_experts)
    assert len(reads.begun) == len(set(reads.begun)) == ram_experts
    of_layers = (store.addresses != 0).sum(axis=1)
    assert of_layers.max() - of_layers.min() <= 2 and store.addresses[1, 7]
    found = store.counters()
    assert (found.prefetched, found.wasted) == (0, 0)
    assert found.disk_bytes == ram_experts * store.file.stride(0)
    store.fill()  # there is nothing to do
    filled(store, ram_experts)
    assert len(reads.begun) == ram_experts


@pytest.mark.parametrize("way", ["held", "prefetch", "answer"])
def test_filling_ends_when_somebody_asks(make: Callable[[int], DiskStore], reads: Reads, way: str) -> None:
    store = make(LAYERS * EXPERTS)
    reads.stop(*KEYS)
    store.fill()
    under_way = len(store._coming)
    assert 0 < under_way < EXPERTS
    timer = threading.Timer(0.05, reads.let)
    timer.start()
    if way == "held":
        assert hold(store, 2, 7)[2] == {7}
    elif way == "prefetch":
        store.prefetch(ExpertKey(2, 7))
    else:
        store.begin_answer()
    timer.join()
    filled(store, under_way + (way == "held"))
    store.fill()
    filled(store, LAYERS * EXPERTS)


def test_filling_goes_on_and_on_where_reads_end_at_once(
    make: Callable[[int], DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no call inside a call for each of them."""
    store, depths = make(LAYERS * EXPERTS), []

    def read(reader: DiskReader, offset: int, memory: torch.Tensor) -> Future[None]:
        done: Future[None] = Future()
        with store.file.path.open("rb") as file:
            file.seek(offset)
            memory.copy_(torch.frombuffer(bytearray(file.read(len(memory))), dtype=torch.uint8))
        done.set_result(None)
        depths.append(len(inspect.stack(0)))
        return done

    monkeypatch.setattr(DiskReader, "read", read)
    store.fill()
    filled(store, LAYERS * EXPERTS)
    assert len(depths) == LAYERS * EXPERTS and len(set(depths)) == 1


def test_filling_ends_at_an_error_and_is_nobodys(make: Callable[[int], DiskStore], reads: Reads) -> None:
    store, broken = make(LAYERS * EXPERTS), ExpertKey(1, 0)
    reads.broken = {broken: OSError(5, "Input/output error")}
    reads.stop(*(key for key in KEYS if key != broken))
    store.fill()
    under_way = {*store._coming, broken}
    end = time.monotonic() + WAIT_S
    while broken in store._coming:
        assert time.monotonic() < end
        time.sleep(0.001)
    reads.let()
    settle(store)
    assert set(reads.begun) == under_way and len(reads.begun) == len(under_way) < EXPERTS
    reads.broken.clear()
    assert hold(store, 1, 0)[2] == {0}
    check_idle(store)


def test_filling_ends_with_the_interpreter(
    make: Callable[[int], DiskStore], reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read, begun = make(LAYERS * EXPERTS), DiskReader.read, [0]

    def refused(reader: DiskReader, offset: int, memory: torch.Tensor) -> Future[None]:
        begun[0] += 1
        if begun[0] > 6:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        return read(reader, offset, memory)

    monkeypatch.setattr(DiskReader, "read", refused)
    store.fill()
    filled(store, 6)
    monkeypatch.setattr(DiskReader, "read", read)
    store.fill()
    filled(store, LAYERS * EXPERTS)


def test_a_closed_store_is_filled_no_more(make: Callable[[int], DiskStore], reads: Reads) -> None:
    store = make(LAYERS * EXPERTS)
    reads.stop(*KEYS)
    store.fill()
    under_way = len(store._coming)
    closer, closed = in_thread(store.close)
    end = time.monotonic() + WAIT_S
    while not store.closed:
        assert time.monotonic() < end
        time.sleep(0.001)
    reads.let()
    closer.join(WAIT_S)
    store.fill()
    assert closed == [None] and len(reads.begun) <= under_way < EXPERTS and not store._coming


def test_what_is_forgotten_is_read_again_but_for_what_is_held(make: Callable[[int], DiskStore]) -> None:
    store = make(EXPERTS)
    hold(store, 0, 0, 1, 2)
    with store.held(0, [1]) as (_, groups):
        list(groups)
        store.forget()
        assert at(store, ExpertKey(0, 1)) == expected(ExpertKey(0, 1))
    assert not store.worth().any()
    assert hold(store, 0, 0, 1, 2) == ({1}, set(), {0, 2})
    check_idle(store)


def test_the_time_of_reading_is_that_of_any_read(make: Callable[[int], DiskStore], reads: Reads) -> None:
    store = make(EXPERTS)
    reads.stop(ExpertKey(0, 0), ExpertKey(0, 1))
    began = time.perf_counter()
    store.prefetch(ExpertKey(0, 0))
    store.prefetch(ExpertKey(0, 1))
    time.sleep(0.03)
    assert store.counters().disk_busy_s >= 0.03, "it goes on"
    reads.let(ExpertKey(0, 0))
    time.sleep(0.02)
    reads.let()
    settle(store)
    found = store.counters().disk_busy_s
    assert 0.05 <= found <= time.perf_counter() - began, "of two at once, not of each"
    time.sleep(0.02)
    assert store.counters().disk_busy_s == found


def test_what_fails_ahead_of_need_is_nobodys_error(make: Callable[[int], DiskStore], reads: Reads) -> None:
    store = make(EXPERTS)
    reads.broken = {ExpertKey(0, 1): OSError(5, "Input/output error")}
    store.prefetch(ExpertKey(0, 1))
    settle(store)
    assert not store.residency().any()
    reads.broken.clear()
    hold(store, 0, 1)
    check_idle(store)


def test_a_fault_that_is_no_error_of_the_disk_names_the_expert(
    make: Callable[[int], DiskStore], reads: Reads
) -> None:
    reads.broken = {ExpertKey(0, 1): RuntimeError("strange")}
    with pytest.raises(TransferError, match="expert 1 of layer 0 failed: strange"):
        hold(make(EXPERTS), 0, 1)


def test_closing_ends_who_waits(make: Callable[[int], DiskStore], reads: Reads) -> None:
    store = make(EXPERTS)
    reads.stop(*KEYS)
    workers = [in_thread(lambda: hold(store, 0, *range(EXPERTS)))]
    reads.wait_until_begun(ExpertKey(0, 0))
    workers += [in_thread(lambda: store.record(ExpertKey(1, 3))), in_thread(lambda: hold(store, 1, 0, 1, 2))]
    time.sleep(0.02)
    closer, closed = in_thread(store.close)
    for thread, outcome in workers:
        thread.join(WAIT_S)
        assert isinstance(outcome[0], TransferError) and "closed" in str(outcome[0])
    assert closer.is_alive(), "a read still fills the memory"
    reads.let()
    closer.join(WAIT_S)
    assert closed == [None] and store.num_bytes == 0
    with pytest.raises(TransferError, match="was closed"):
        store.record(ExpertKey(0, 0))
    with pytest.raises(TransferError, match="was closed"), store.held(0, [0]):
        pass
    store.prefetch(ExpertKey(0, 0))
    store.close()


def test_closing_while_others_read_ends_them_with_its_sentence(
    make: Callable[[int], DiskStore], reads: Reads
) -> None:
    for number in range(15):
        store = make(EXPERTS)
        reads.slow_s = 0.0005

        def work(store: DiskStore = store) -> None:
            for turn in range(10_000):
                store.record(KEYS[turn % len(KEYS)])
                store.prefetch(KEYS[(turn + 1) % len(KEYS)])

        workers = [in_thread(work) for _ in range(3)]
        time.sleep(0.001 * number)
        store.close()
        for thread, outcome in workers:
            thread.join(WAIT_S)
            assert isinstance(outcome[0], TransferError), outcome


def test_a_file_for_one_load_goes_with_its_store_and_no_later_one(
    file: RecordFile, reads: Reads, tmp_path: Path
) -> None:
    reads.file = file
    store, content = DiskStore(file, EXPERTS, keep=False), file.path.read_bytes()
    hold(store, 0, 1)
    store.close()
    assert not file.path.exists()
    file.path.write_bytes(content)
    store.close()
    assert file.path.exists(), "it is another store's"


def test_addresses_are_kept_where_somebody_wants_them(make: Callable[[int], DiskStore]) -> None:
    store = make(EXPERTS)
    hold(store, 0, 1, 2)
    table = np.full((LAYERS, EXPERTS), 7, dtype=np.int64)
    store.keep_addresses_in(table)
    assert store.addresses is table and np.count_nonzero(table) == 2
    hold(store, 1, *range(EXPERTS))
    assert np.count_nonzero(table[1]) == EXPERTS and not table[0].any()
    store.close()
    assert not table.any()


def test_ctrl_c_anywhere_loses_no_place_and_no_lock(make: Callable[[int], DiskStore]) -> None:
    """At each line, until it is over before that, in which ever order reads end."""
    number, spared = 0, 0
    store = make(EXPERTS)
    while spared < 8:
        hold(store, 1 + number % 2, *range(EXPERTS))  # so that something has to be read
        try:
            with struck_at(number) as left:
                hold_quietly(store)
        except KeyboardInterrupt:
            pass
        spared += left[0] >= 0
        other, outcome = in_thread(lambda: hold(store, 0, *range(EXPERTS)))
        other.join(WAIT_S)
        assert outcome and not isinstance(outcome[0], BaseException), (number, outcome)
        check_idle(store)
        number += 1
    assert number > 40


def hold_quietly(store: DiskStore) -> None:
    with store.held(0, [0, 1, 4]) as (_, groups):
        for _ in groups:
            pass
    store.prefetch(ExpertKey(0, 6))


@contextmanager
def struck_at(number: int) -> Iterator[list[int]]:
    """Ctrl+C before the line of the store's code that is the `number`-th to run in this thread, but for
    where it gives up what it holds."""
    left = [number]
    here = disk_reads.__file__

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != here or frame.f_code.co_name == "_let_go":
            return None
        # a `with` ends on its line, where Python, but for being traced, heeds nothing
        spared = linecache.getline(here, frame.f_lineno).strip().startswith(("with ", "self._let_go("))
        if event == "line" and not spared:
            left[0] -= 1
            if left[0] == -1:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    before, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.settrace(trace)
    try:
        yield left
    finally:
        sys.settrace(before)
        signal.signal(signal.SIGINT, handler)


def test_errors_are_those_that_a_user_is_told() -> None:
    assert issubclass(DiskError, LocalMoeError) and issubclass(TransferError, LocalMoeError)
