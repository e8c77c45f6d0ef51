"""A device expert memory on CPU, a plain model of what it must do, and passes that do what kernels would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from experts.expert_rig import CPU, LAYOUT, make_store
from numpy.typing import NDArray
from support.plain_groups import PlainTile, Row, plain_after, plain_groups

from localmoe.core.types import ExpertKey
from localmoe.experts.device_memory import DeviceExpertMemory
from localmoe.experts.residency_block import ResidencyBlock
from localmoe.experts.slots import DeviceSlots
from localmoe.experts.transfers import HostTransfers
from localmoe.kernels.residency import HIT, LATE, MISS, MISS_REPLACED

RECORD_BYTES = LAYOUT.elements * 4
Index = Sequence[Sequence[Sequence[int]]]  # [layer][token][k]


class DeviceRig:
    """The memory, its parts, and the scores that its policy would give."""

    def __init__(self, num_slots: int, *, layers: int = 2, experts: int = 6) -> None:
        self.store = make_store(layers, experts)
        self.slots = DeviceSlots(num_slots, LAYOUT.elements + 8, torch.float32, CPU)
        self.slots._arena.fill_(torch.nan)
        self.block = ResidencyBlock(layers, experts, CPU)
        self.transfers = HostTransfers(self.block.done)
        self.scores: NDArray[np.float32] = np.zeros((layers, experts), dtype=np.float32)
        self.per_layer = False
        self.memory = DeviceExpertMemory(
            self.store, self.slots, self.block, self.transfers, lambda last_use: (self.scores, self.per_layer)
        )
        self.keys = [ExpertKey(layer, expert) for layer in range(layers) for expert in range(experts)]

    @property
    def resident(self) -> set[ExpertKey]:
        return set(self.memory.resident_keys())

    def content(self, address: int) -> torch.Tensor:
        """What lies at a device address (a slot's) or a host address (a record's)."""
        for slot in range(self.slots.num_slots):
            if self.slots.address(slot) == address:
                return self.slots._arena[slot, : LAYOUT.elements]
        (key,) = [key for key in self.keys if self.store.record(key).data_ptr() == address]
        return self.store.record(key)

    def is_right(self, key: ExpertKey, address: int) -> bool:
        return torch.equal(self.content(address), self.store.record(key))

    def arrived(self, key: ExpertKey) -> bool:
        return int(self.memory._ticket[key]) <= int(self.block.done)

    def check(self, reserved: Sequence[int] = ()) -> None:
        """Every slot has one owner, and holds what the table says, unless its copy is still to come."""
        memory = self.memory
        held = memory._slot_of[memory._slot_of >= 0].tolist()
        assert sorted([*held, *memory._free, *reserved]) == list(range(self.slots.num_slots))
        for key in self.resident:
            if self.arrived(key):
                assert self.is_right(key, memory.slot_address(key)), key

    def play(self, index: Index, live: int) -> tuple[NDArray[np.int32], list[list[PlainTile]]]:
        """Do what the kernels of a pass do with the table as it was uploaded: read, keep, and log."""
        tiles = []
        for layer, chosen in enumerate(index):
            view = self.block.view(layer)
            row = Row(
                view.address.tolist(), view.home.tolist(), view.ticket.tolist(), view.score.tolist(),
                view.landing.tolist(), int(view.done),
            )  # fmt: skip
            found, log = plain_groups(chosen, live, row)
            view.log.copy_(torch.tensor(log))
            after = plain_after(row, found, log)
            for tensor, values in (
                (view.address, after.address), (view.ticket, after.ticket), (view.landing, after.landing)
            ):  # fmt: skip
                tensor.copy_(torch.tensor(values))
            for tile in found:
                key = ExpertKey(layer, tile.expert)
                if tile.ticket <= row.done:
                    assert self.is_right(key, tile.address)
                if tile.landing:
                    self.content(tile.landing).copy_(self.store.record(key))
            tiles.append(found)
        return self.block.log.numpy().copy(), tiles


class PlainMemory:
    """The same bookkeeping without slots: who is here, what waits, and the totals."""

    def __init__(self, num_slots: int, layers: int, experts: int) -> None:
        self.num_slots, self.shape = num_slots, (layers, experts)
        self.clear()
        self.bytes = self.prefetched = self.wasted = 0

    def clear(self) -> None:
        self.here: set[ExpertKey] = set()
        self.unused: set[ExpertKey] = set()
        self.guarded: set[ExpertKey] = set()
        self.queue: dict[ExpertKey, tuple[float, int]] = {}
        self.pushed = self.reserved = 0

    @property
    def free(self) -> int:
        return self.num_slots - self.reserved - len(self.here)

    def prefetch(self, key: ExpertKey, deadline: float) -> None:
        if key not in self.here and (key not in self.queue or deadline < self.queue[key][0]):
            self.queue[key] = (deadline, self.pushed)
            self.pushed += 1

    def drop(self, layer: int | None) -> None:
        self.queue = {k: v for k, v in self.queue.items() if layer is not None and k.layer != layer}
        self.guarded = self.guarded if layer is not None else set()

    def leave(self, key: ExpertKey) -> None:
        self.here.remove(key)
        self.wasted += key in self.unused
        self.unused.discard(key)
        self.guarded.discard(key)

    def enter(self, key: ExpertKey) -> None:
        self.here.add(key)
        self.queue.pop(key, None)
        self.bytes += RECORD_BYTES

    def pump(self, scores: NDArray[np.float32], per_layer: bool) -> None:
        placed: set[ExpertKey] = set()
        for key in sorted(self.queue, key=lambda key: self.queue[key]):
            if not self.free:
                victims = [
                    v for v in self.here - self.guarded - placed
                    if np.isfinite(scores[v]) and (not per_layer or v.layer == key.layer)
                ]  # fmt: skip
                if not victims and per_layer:
                    continue
                if not victims:
                    return
                self.leave(min(victims, key=lambda v: (scores[v], v)))
            self.enter(key)
            placed.add(key)
            self.unused.add(key)
            self.guarded.add(key)
            self.prefetched += 1

    def close_pass(self, log: NDArray[np.int32]) -> set[ExpertKey]:
        """The experts that were asked for."""
        asked = {ExpertKey(*pair) for pair in np.argwhere(log).tolist()}
        for key in sorted(asked):
            kind, detail = int(log[key]) & 0xFF, int(log[key]) >> 8
            assert (kind in (HIT, LATE)) == (key in self.here)
            if kind == MISS_REPLACED:
                self.leave(ExpertKey(key.layer, detail))
            if kind > MISS:
                self.enter(key)
            elif kind == MISS:
                self.bytes += RECORD_BYTES
        self.use(asked)
        return asked

    def use(self, asked: set[ExpertKey]) -> None:
        self.unused -= asked
        self.guarded -= asked

    def reserve(self, count: int, scores: NDArray[np.float32]) -> int:
        self.queue.clear()
        count = min(count, self.free + len(self.here))
        for _ in range(count - self.free):
            held = Counter(key.layer for key in self.here)
            score = {key: np.inf if key in self.guarded else scores[key] for key in self.here}
            self.leave(min(self.here, key=lambda k: (score[k] == np.inf, -held[k.layer], score[k], k)))
        self.reserved += count
        return count
