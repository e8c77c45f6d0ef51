"""Small expert memories whose link can be stopped, slowed or broken, and records that tell experts apart."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from localmoe.core.events import RoomWanted
from localmoe.core.types import ExpertKey
from localmoe.experts.host_store import HostStore
from localmoe.experts.link import HostLink
from localmoe.experts.memory import ExpertMemory, ExpertView
from localmoe.experts.records import RecordLayout
from localmoe.experts.slots import DeviceSlots

CPU = torch.device("cpu")
LAYOUT = RecordLayout((6, 4), (4, 3), transposed=False)
WAIT_S = 20.0  # far beyond what any step takes, so that a hang fails instead of blocking


class Once(dict[ExpertKey, BaseException]):
    """What breaks once and is whole then."""

    def __getitem__(self, key: ExpertKey) -> BaseException:
        return self.pop(key)


class StoppableLink(HostLink):
    """Copies only when allowed, remembers the order, and breaks where told to."""

    def __init__(self) -> None:
        super().__init__(None)
        self.copied: list[ExpertKey] = []
        self.broken: dict[ExpertKey, BaseException] = {}
        self.reads: list[int] = []
        self._started: list[ExpertKey] = []
        self._gate = threading.Condition()
        self._allowed: float = float("inf")

    def hold(self) -> None:
        """From here on, copies wait."""
        with self._gate:
            self._allowed = 0

    def let(self, copies: float = float("inf")) -> None:
        """Let some more copies through."""
        with self._gate:
            self._allowed += copies
            self._gate.notify_all()

    def wait_until_started(self, key: ExpertKey) -> None:
        with self._gate:
            assert self._gate.wait_for(lambda: key in self._started, WAIT_S), f"{key} was never started"

    def copy(self, record: Tensor, slots: DeviceSlots, slot: int) -> None:
        key = key_of(record)
        with self._gate:
            self._started.append(key)
            self._gate.notify_all()
            assert self._gate.wait_for(lambda: self._allowed > 0, WAIT_S)
            self._allowed -= 1
        if key in self.broken:
            raise self.broken[key]
        super().copy(record, slots, slot)
        self.copied.append(key)

    def after_read(self, slot: int) -> None:
        self.reads.append(slot)


def key_of(record: Tensor) -> ExpertKey:
    """The expert whose record this is: the first two weights say so."""
    return ExpertKey(int(record[0]), int(record[1]))


def make_store(layers: int, experts: int, dtype: torch.dtype = torch.float32) -> HostStore:
    """Random records that begin with their layer and expert."""
    store = HostStore([LAYOUT] * layers, experts, dtype)
    for layer in range(layers):
        for expert in range(experts):
            generator = torch.Generator().manual_seed(layer * 1000 + expert)
            record = store.record(ExpertKey(layer, expert))
            record.copy_(torch.randn(LAYOUT.elements, generator=generator))
            record[0], record[1] = layer, expert
    return store


def oldest(room: RoomWanted) -> ExpertKey | None:
    """Free slots first, then the least recently used."""
    return None if room.num_free or not room.candidates else room.candidates[0]


class Rig:
    """An expert memory with its store and link."""

    def __init__(
        self,
        num_slots: int,
        *,
        layers: int = 2,
        experts: int = 8,
        choose: Callable[[RoomWanted], ExpertKey | None] = oldest,
        link: HostLink | None = None,
    ) -> None:
        self.store = make_store(layers, experts)
        self.link = link or StoppableLink()
        slots = DeviceSlots(num_slots, LAYOUT.elements, torch.float32, CPU)
        self.memory = ExpertMemory(self.store, slots, self.link, choose)

    def check(self, layer: int, view: ExpertView) -> None:
        """The view shows exactly the host's weights."""
        gate_up, down = self.store.views(ExpertKey(layer, view.expert))
        assert torch.equal(view.gate_up, gate_up)
        assert torch.equal(view.down, down)

    def read(self, layer: int, *experts: int) -> tuple[set[int], set[int], set[int]]:
        """Demand and read all; (hits, late, misses)."""
        with self.memory.demand(layer, experts) as (report, views):
            seen = []
            for view in views:
                self.check(layer, view)
                seen.append(view.expert)
        assert sorted(seen) == sorted(experts)
        return set(report.hits), set(report.late), set(report.misses)

    def resident(self) -> set[ExpertKey]:
        return set(self.memory.resident_keys())

    def wait_resident(self, *keys: ExpertKey) -> None:
        """Until all these are in slots."""
        end = time.monotonic() + WAIT_S
        while not set(keys) <= self.resident():
            assert time.monotonic() < end, f"{keys} never arrived: {self.resident()}"
            time.sleep(0.001)


@contextmanager
def rig(num_slots: int, **options: object) -> Iterator[Rig]:
    """A Rig that is closed at the end, whatever happened."""
    made = Rig(num_slots, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        if isinstance(made.link, StoppableLink):
            made.link.let()
        made.memory.close()


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run it beside the test; the list receives its result or its exception."""
    outcome: list[object] = []

    def body() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, outcome
