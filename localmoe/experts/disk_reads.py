"""Reads of experts from the disk into RAM: who asks for some holds them there until they let go, and what
comes may be read ahead. Which others give way is ram_places' decision; reads run in threads of their own.

Rules: an expert that somebody holds keeps its place; its address is known only once all of it is there; a
demand's reads begin at once, those for what comes only while few are under way; free places are filled while
nobody asks for anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from localmoe.core.errors import TransferError
from localmoe.core.types import ExpertKey
from localmoe.core.uninterrupted import Monitor, uninterrupted
from localmoe.experts.counters import TransferCounters
from localmoe.experts.disk_reader import DiskReader
from localmoe.experts.failures import failure_of
from localmoe.experts.memory import DemandReport
from localmoe.experts.ram_arena import RamArena
from localmoe.experts.ram_places import MOST_AHEAD, MOST_SWEPT, NOWHERE, RamPlaces, sweeps
from localmoe.experts.record_file import RecordFile

_LOOK_AGAIN_S = 0.02  # for a place: what is in use by who holds nothing is let go of unsaid


class ExpertReads:
    """Of one file into one arena. Thread-safe.

    Attributes:
        addresses: int64 (L, E), where an expert lies in RAM, or 0.
        in_use: whether an expert is, by who holds nothing.
    """

    def __init__(self, file: RecordFile, arena: RamArena) -> None:
        """file: whole. arena: of as many places as a layer has experts, at least."""
        shape = (len(file.layouts), file.num_experts)
        assert arena.num_places >= min(file.num_experts, shape[0] * shape[1])
        self.file, self._arena = file, arena
        self.addresses: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
        self._places = RamPlaces(arena.num_places, shape)
        self._reader = DiskReader(file.path)
        self._coming: dict[ExpertKey, Future[None]] = {}
        self._failed: dict[ExpertKey, BaseException] = {}
        self._older: set[ExpertKey] = set()  # reads that began before somebody who waits for them asked
        self._counters = TransferCounters()
        self._stall_s = self._busy_s = 0.0
        self._busy_since = 0.0  # while any read is under way
        self._to_fill: Iterator[ExpertKey] | None = None  # places that are free, with these
        self._fills = False  # just now
        self._before = 0  # see RamPlaces.victim
        self._promised = 0  # places, to those who hold experts or wait for them
        self.lock, self.closed = Monitor(), False
        self._fence = threading.Lock()
        self.in_use: Callable[[ExpertKey], bool] = lambda key: False

    @property
    def ram_experts(self) -> int:
        """How many RAM has room for."""
        return self._arena.num_places

    def keep_addresses_in(self, memory: NDArray[np.int64]) -> None:
        """From here on in this memory (L, E), which others look at."""
        with self.lock:
            memory[:] = self.addresses
            self.addresses = memory

    def counters(self) -> TransferCounters:
        """A copy of the totals: bytes read and how long that took, reads ahead of need and those in vain,
        waiting."""
        with self.lock:
            busy_s = self._busy_s + (time.perf_counter() - self._busy_since if self._coming else 0.0)
            return replace(self._counters, stall_s=self._stall_s, disk_busy_s=busy_s)

    @property
    def read_bytes(self) -> int:
        """As in the counters; waits for no lock."""
        return self._counters.disk_bytes

    def begin_answer(self) -> None:
        """What was read ahead for the answer before is no waste of the next one."""
        with self.lock:
            self._to_fill = None
            self._places.forget_unused()

    @contextmanager
    def held(
        self, layer: int, experts: Sequence[int], *, counts: bool = True, choices: int = 0
    ) -> Iterator[tuple[DemandReport, Iterator[list[int]]]]:
        """Ask for a layer's experts now. Yields how they were found, and an iterator over groups of them as
        they can be read in RAM, those already there first; all stay there until the end.

        Args:
            counts: whether it tells what will be asked for again.
            choices: of the pass's tokens in the layer, of which others than these experts may be had
                elsewhere.

        Raises:
            DiskError: one cannot be read. TransferError: the store was closed.
        """
        keys = [ExpertKey(layer, expert) for expert in experts]
        sweeping = sweeps(len(keys), choices, self.file.num_experts)
        holding: list[ExpertKey] = []
        try:
            with self.lock:
                self._wait_for_places(_promised(keys))
                with uninterrupted():
                    self._to_fill = None
                    if counts:
                        self._places.note_demand(layer, experts)
                    self._promised += _promised(keys)
                    for key in keys:
                        self._places.held[key] += 1
                        holding.append(key)
                    hits = [key for key in keys if self.addresses[key]]
                    late = [key for key in keys if key in self._coming]
                    self._older.update(late)
                    missing = [key for key in keys if not self.addresses[key] and key not in self._coming]
                    self._before = layer if sweeping else 0
                    self._start(missing)
                    if sweeping and layer + 1 < len(self.file.layouts):
                        self._read_ahead(layer + 1)
            report = DemandReport(*(frozenset(k.expert for k in group) for group in (hits, late, missing)))
            yield report, self._groups(hits, [*late, *missing])
        finally:
            self._let_go(holding)

    def _wait_for_places(self, count: int) -> None:
        """Until all who hold some can have what they ask for at a time: else each might wait for another."""
        self._raise_if_lost([])
        most = self.ram_experts - self._places.reach.most
        while count and self._promised and self._promised + count > most:
            self.lock.wait()
            self._raise_if_lost([])

    def _let_go(self, keys: list[ExpertKey]) -> None:
        with self.lock, uninterrupted():
            self._promised -= _promised(keys)
            for key in keys:
                self._places.held[key] -= 1
                self._failed.pop(key, None)  # nobody else's business: who waits for it asks again
            self.lock.notify_all()

    def _groups(self, hits: list[ExpertKey], awaited: list[ExpertKey]) -> Iterator[list[int]]:
        if hits:
            yield [key.expert for key in hits]
        left = awaited
        while left:
            began = time.perf_counter()
            with self.lock:
                while not (here := [key for key in left if self.addresses[key]]):
                    self._raise_if_lost(left)
                    with uninterrupted():
                        self._start([key for key in left if key not in self._coming])
                    self.lock.wait(_LOOK_AGAIN_S)
                self._stall_s += time.perf_counter() - began
            left = [key for key in left if key not in here]
            yield [key.expert for key in here]

    def _raise_if_lost(self, keys: list[ExpertKey]) -> None:
        if self.closed:
            raise TransferError("The engine was closed while an answer was being written.")
        for key in keys:
            if key in self._failed:
                raise failure_of("Reading", key, self._failed.pop(key))

    def prefetch(self, key: ExpertKey) -> None:
        """Read it ahead of need; nothing happens if it is there or on its way, or enough others are."""
        with self.lock, uninterrupted():
            self._to_fill = None
            if self.closed or self.addresses[key] or key in self._coming:
                return
            if len(self._coming) < MOST_AHEAD:
                self._start([key], ahead=True)

    def fill(self) -> None:
        """Read experts into free places, and into those of others that are in a GPU's memory too, as many of
        each layer as of another: first those that are in neither, then, into free ones, the others. Until
        there is none, or anybody asks for one, since who asks knows better. Returns at once."""
        with self.lock:
            absent, elsewhere = (self._places.place == NOWHERE).T, self._places.elsewhere.T
            order = np.concatenate([np.argwhere(absent & ~elsewhere), np.argwhere(absent & elsewhere)])
            self._to_fill = (ExpertKey(layer, expert) for expert, layer in order.tolist())
            self._fill()

    def fills(self, seconds: float) -> bool:
        """Whether more is on its way into RAM, once something came, or so much time has passed."""
        with self.lock:
            if self._coming and not self.closed:
                self.lock.wait(seconds)
            return bool(self._coming) and not self.closed

    def _fill(self) -> None:
        if self._fills:  # a read ended as soon as it had begun
            return
        with uninterrupted():
            self._fills = True
            while self._to_fill is not None and not self.closed and len(self._coming) < MOST_AHEAD:
                key = next(self._to_fill, None)
                place = None if key is None else self._places.free_place()
                if key is not None and place is None and not self._places.elsewhere[key]:
                    place = self._make_room(self._places.doubled)
                if key is None or place is None:
                    self._to_fill = None
                    break
                self._places.give(place, key)
                try:
                    self._read(key, place)
                except RuntimeError:  # the interpreter ends, and begins no more reads
                    self._places.give_back(key)
                    self._to_fill = None
            self._fills = False

    def _read_ahead(self, layer: int) -> None:
        """What a pass over all layers will ask for next, while it computes."""
        absent = np.flatnonzero(self._places.place[layer] == NOWHERE)
        best = absent[self._places.worth()[layer, absent].argsort()[::-1]]
        room = max(0, MOST_SWEPT - len(self._coming))
        self._start([ExpertKey(layer, int(expert)) for expert in best[:room]], ahead=True)

    def _start(self, keys: Sequence[ExpertKey], *, ahead: bool = False) -> None:
        """Begin to read what has a place; the others wait for one."""
        for key in keys:
            place = self._places.free_place()
            if place is None:
                place = self._make_room(partial(self._places.victim, ahead=ahead, before=self._before))
            if place is None:
                return
            self._places.give(place, key, asked=not ahead, ahead=ahead)
            self._counters.prefetched += ahead
            self._read(key, place)

    def _read(self, key: ExpertKey, place: int) -> None:
        memory = self._arena.place(place, self.file.stride(key.layer))
        reading = self._reader.read(self.file.offset(*key), memory)
        self._places.held[key] += 1  # by the read, which writes there whoever else has let go of it
        if not self._coming:
            self._busy_since = time.perf_counter()
        self._coming[key] = reading
        reading.add_done_callback(partial(self._arrived, key))

    def _make_room(self, victim_but: Callable[..., ExpertKey | None]) -> int | None:
        spared: list[ExpertKey] = []
        while (victim := victim_but(spared=spared)) is not None:
            address = int(self.addresses[victim])
            self.addresses[victim] = 0
            with self._fence:  # what is written before is seen by others before what is read behind it is
                pass
            if not self.in_use(victim):
                place, wasted = self._places.evict(victim)
                self._counters.wasted += wasted
                return place
            self.addresses[victim] = address
            spared.append(victim)
        return None

    def _arrived(self, key: ExpertKey, reading: Future[None]) -> None:
        with self.lock:
            error = None if reading.cancelled() else reading.exception()
            if self._coming.pop(key, None) is not None and not self._coming:
                self._busy_s += time.perf_counter() - self._busy_since
            self._places.held[key] -= 1
            if error is None and not reading.cancelled():
                self._counters.disk_bytes += self.file.stride(key.layer)
                self.addresses[key] = self._arena.place(int(self._places.place[key]), 1).data_ptr()
            else:
                self._places.give_back(key)
                if error is not None and self._places.held[key] and key not in self._older:
                    self._failed[key] = error  # not an older read's: who waits for that asks again
                self._to_fill = None
            self._older.discard(key)
            self.lock.notify_all()
            self._fill()

    def end(self) -> None:
        """End the reads: who waits for one is told."""
        with self.lock:
            self.closed = True
            self.lock.notify_all()
        self._reader.close()
        self.addresses[:] = 0


def _promised(keys: Sequence[ExpertKey]) -> int:
    """Places for who asks for these: who asks for one alone holds none while it waits."""
    return len(keys) if len(keys) > 1 else 0
