"""Slots of experts that lie on the disk, where whole passes run on the GPU. What is in no slot the CPU
computes, from RAM or after it was read; of what RAM held when the pass began, kernels may read a part over
the link. Between passes what was asked for most of late comes into slots, from RAM, and what is foretold but
not in RAM is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localmoe.core.types import ExpertKey
from localmoe.experts.device_memory import DeviceExpertMemory
from localmoe.experts.disk_store import DiskStore
from localmoe.experts.landing import LANDING_SLOTS
from localmoe.experts.pass_report import PassReport
from localmoe.experts.ram_reach import most_lent
from localmoe.experts.slot_table import FREE
from localmoe.experts.worth_a_slot import SOON, worth_a_slot
from localmoe.kernels.residency import ON_DISK, ON_HOST

_LOOK_S = 0.05  # what is at hand is looked at again, while nobody asks


class DiskExpertMemory(DeviceExpertMemory):
    """As DeviceExpertMemory. Records that are on their way into slots keep their places in RAM.

    Attributes:
        reads_ram: whether kernels may.
    """

    def __init__(self, store: DiskStore, *arguments: Any, **options: Any) -> None:
        """As DeviceExpertMemory's."""
        super().__init__(store, *arguments, **options)
        self._disk, self.reads_ram = store, False
        shape = store.num_layers, store.num_experts
        self._nowhere = store.device_addresses()
        self._no_landing = np.zeros((shape[0], LANDING_SLOTS), dtype=np.int64)
        self._all, self._nobody_goes = np.ones(shape, dtype=np.bool_), np.full(shape, np.inf, np.float32)
        self._most_lent = most_lent(store.ram_experts, store.num_experts)
        self._worthy: list[ExpertKey] = []
        self._may_leave = np.zeros(shape, dtype=np.bool_)  # their slots
        self._lent: deque[tuple[Any, list[ExpertKey]]] = deque()  # with a mark behind each copy

    def begin_answer(self) -> None:
        """As SlotTable's; nobody fills RAM any more."""
        super().begin_answer()
        self._disk.begin_answer()

    def prefetch(self, key: ExpertKey, deadline: float) -> None:
        """Ask for a copy ahead of need, or, of what is not in RAM, have it read."""
        if self._slot_of[key] != FREE:
            return
        if self._disk.addresses[key]:
            super().prefetch(key, deadline)
        else:
            self._disk.prefetch(key)

    def pump(self) -> None:
        """As DeviceExpertMemory's, of what is in RAM still, and of what is worth a slot."""
        self._take_back()
        worthy, self._worthy = self._worthy, []
        for key in worthy:
            super().prefetch(key, SOON)
        wanted = [key for key, _ in self._queue.in_order()]
        room = max(0, self._most_lent - sum(len(keys) for _, keys in self._lent))
        here = self._disk.lend(wanted[:room])  # or the next read may take its place
        try:
            for key in set(wanted).difference(here):
                self._queue.remove(key)
            super().pump()
        finally:
            self._disk.take_back(here)

    def unprepare(self) -> None:
        """As DeviceExpertMemory's."""
        super().unprepare()
        with self._disk.reach() as reach:
            reach.withdrawn()

    def open_pass(self) -> None:
        """As DeviceExpertMemory's."""
        super().open_pass()
        with self._disk.reach() as reach:
            reach.opened()

    def open_behind(self) -> None:
        """As DeviceExpertMemory's, but slots may change: no pass itself puts anything into them, so the table
        here is the one that there is, and copies wait for the pass that is open."""
        self._count_open()
        if self._worthy or len(self._queue):
            self.transfers.copies_wait_for(self.transfers.mark_compute())
            self.pump()
        self._upload()
        with self._disk.reach() as reach:
            reach.opened()

    def _upload(self) -> None:
        """As DeviceExpertMemory's. Nothing lands in slots within a pass."""
        if not self._stale and not self.may_copy:
            return
        self._stale = False
        here = self._slot_of != FREE
        at = np.where(here, self._slot_address[self._slot_of], self._nowhere)
        tickets = np.where(here, self._ticket, ON_DISK)
        if self.reads_ram:
            in_ram = self._disk.prepare_reach(here)
            at, tickets = np.where(in_ram, in_ram, at), np.where(in_ram, ON_HOST, tickets)
        self.block.upload(self._all, at, tickets, self._no_landing, self._nobody_goes)

    def at_hand(self) -> NDArray[np.bool_]:
        """As SlotTable's."""
        return np.not_equal(self._disk.addresses, 0)

    def likely(self) -> NDArray[np.float64]:
        """As SlotTable's."""
        return self._disk.worth()

    def filled(self) -> bool:
        """As SlotTable's: what is in slots gives way in RAM to what is nowhere yet."""
        self._take_back(most=0)
        self._disk.in_slots(self._slot_of != FREE)
        self._disk.fill()
        return self._disk.fills(_LOOK_S)

    def _load(self, keys: Sequence[ExpertKey], slots: Sequence[int]) -> None:
        with ExitStack() as stack:
            try:
                demand = self._disk.held(keys[0].layer, [key.expert for key in keys], counts=False)
                for _ in stack.enter_context(demand)[1]:  # of a stream, what is not in RAM yet
                    pass
            except BaseException:
                self._free.extend(slots)
                raise
            self._take_back(most=max(0, self._most_lent - len(keys)))
            lent = self._disk.lend(keys)
            try:
                super()._load(keys, slots)
            finally:  # also where not all were copied
                self._lent.append((self.transfers.time_mark(), lent))

    def _record(self, key: ExpertKey) -> Tensor:
        return self._disk.lent(key)

    def _take_back(self, most: int | None = None) -> None:
        """Let go of those that are copied, and wait for others while there are more than `most`."""
        while self._lent:
            mark, keys = self._lent[0]
            if isinstance(mark, torch.cuda.Event) and not mark.query():
                if most is None or sum(len(each) for _, each in self._lent) <= most:
                    break
                mark.synchronize()
            self._lent.popleft()
            self._disk.take_back(keys)

    def close_pass(self, log: NDArray[np.int32]) -> PassReport:
        """As DeviceExpertMemory's; then what is worth a slot is known, for the next copies."""
        report = super().close_pass(log)
        with self._disk.reach() as reach:
            reach.closed()
        self._disk.note_pass(report.demanded)
        in_slots = self._slot_of != FREE
        self._disk.in_slots(in_slots)
        self._may_leave = self._disk.may_leave(in_slots)
        asked = report.computed | report.misses
        self._worthy = worth_a_slot(self._disk.worth(), asked, self._may_leave, len(self._free))
        return report

    def note_prompt(self, experts: NDArray[np.int32]) -> None:
        """As DeviceExpertMemory's: RAM keeps what is used most, and of late, of what it asked for."""
        for layer, chosen in enumerate(experts):
            self._disk.note_tokens(layer, chosen)

    def _room(self) -> tuple[NDArray[np.float32], bool]:
        """By what was asked for of late, whatever the policy: within a pass nothing makes room."""
        scores = self._disk.worth().astype(np.float32)
        scores[(self._slot_of == FREE) | self._guarded | ~self._may_leave] = np.inf
        return scores, False

    def _empty(self) -> None:
        super()._empty()
        with self._disk.reach() as reach:
            reach.clear()
        self._worthy = []
        self._take_back(most=0)
        self._disk.in_slots(self._slot_of != FREE)

    def close(self) -> None:
        """As DeviceExpertMemory's."""
        super().close()
        with self._disk.reach() as reach:
            reach.clear()
        self._take_back(most=0)
        self._disk.in_slots(np.zeros_like(self._slot_of, dtype=np.bool_))
