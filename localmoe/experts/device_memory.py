"""DeviceExpertMemory: the residency of experts where whole target passes run on the GPU without the host.

Before a pass the host issues the copies that the policy wants and uploads the table; during it kernels read
what is resident, wait for what is on its way, and read what is missing over the link, keeping it in a slot
and the table up to date; the pass's log then tells the host what happened. So a pass for which nothing is to
be copied may be opened behind one that still runs. Rules that no policy can break: slots are overwritten only
between passes, or within one where the only layer that reads them is done with them; a prefetch never evicts
an expert of the window's unused prefetches. WHICH expert goes is the policy's, through its scores.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from localmoe.core.errors import TransferError
from localmoe.core.types import ExpertKey
from localmoe.core.uninterrupted import Monitor
from localmoe.experts.copy_times import CopyTimes
from localmoe.experts.counters import TransferCounters
from localmoe.experts.landing import LandingSlots
from localmoe.experts.pass_report import PassReport
from localmoe.experts.queue import CopyQueue
from localmoe.experts.record_store import RecordStore
from localmoe.experts.residency_block import ResidencyBlock
from localmoe.experts.slot_table import FREE, Scores, SlotTable
from localmoe.experts.slot_worth import SlotWorth
from localmoe.experts.slots import DeviceSlots
from localmoe.experts.transfers import Transfers
from localmoe.kernels.residency import MISS_KEPT, MISS_REPLACED

_TRUSTED_ISSUES = 8  # stretches of copies, of which the first may set things up
_RECENT_ISSUES = 32


class DeviceExpertMemory(SlotTable):
    """Slots, table and copies of one model. Used by one thread; the counters may be read from any."""

    def __init__(
        self,
        store: RecordStore,
        slots: DeviceSlots,
        block: ResidencyBlock,
        transfers: Transfers,
        scores: Scores,
    ) -> None:
        """scores: last use (L, E) -> scores (L, E) and whether room is made within a layer only (the policy's
        keep_scores)."""
        super().__init__(store, slots, scores)
        self.block = block
        self._counters = self._nothing_counted()
        self.transfers = transfers
        shape = (store.num_layers, store.num_experts)
        self._landing = LandingSlots(shape[0])
        self.worth = SlotWorth()
        self._record_bytes = np.array([layout.num_bytes(store.dtype) for layout in store.layouts])
        self._inner = np.array([layout.inner for layout in store.layouts])
        self._queue, self.closed = CopyQueue(), False
        self._prepared = False  # the table was uploaded for the pass that is opened next
        block.settle(store.device_addresses())
        self.may_prefetch = True  # else nothing is copied between passes
        self.copies_beside = True  # else the computation stands still while they run
        self.copy_s: float | None = None  # seconds of one copy, if that was measured
        self._issue_s: deque[float] = deque(maxlen=_RECENT_ISSUES)  # of the host for one copy, by stretch
        self.lock = Monitor()
        self.times: CopyTimes | None = None  # while somebody wants to know when copies ran

    def counters(self) -> TransferCounters:
        """A copy of the totals."""
        return replace(self._counters)

    def _nothing_counted(self) -> TransferCounters:
        return TransferCounters(stall_s=None if self.block.clocks is None else 0.0)

    def count_waiting(self, seconds: float) -> None:
        """Of a pass, for experts that were not in a slot; nothing happens where nobody measures that."""
        if self._counters.stall_s is not None:
            self._counters.stall_s += seconds

    def prefetch(self, key: ExpertKey, deadline: float) -> None:
        """Ask for a copy ahead of need; nothing happens if the expert is here or on its way."""
        if self._slot_of[key] == FREE and self.may_prefetch:
            self._queue.push(key, deadline)

    @property
    def waiting(self) -> int:
        """Copies that are wanted and not issued yet."""
        return len(self._queue)

    @property
    def issue_s(self) -> float | None:
        """Seconds that the host takes to issue one copy, the least of some stretches; None before those."""
        return min(self._issue_s) if len(self._issue_s) >= _TRUSTED_ISSUES else None

    def drop_prefetches(self, layer: int | None = None) -> None:
        """Withdraw what has not started, of a layer or of all: a window is over, and its unused may go."""
        self._queue.drop_prefetches(layer)
        if layer is None:
            self._guarded[:] = False

    # -- between passes

    def pump(self) -> None:
        """Issue the copies that wait, the most urgent first, as far as there is room; only between passes."""
        if not len(self._queue):
            return
        if not self.copies_beside:
            self.transfers.wait_for_compute()
        began, before = time.perf_counter(), self.transfers.issued
        self._issue()
        if self.transfers.issued > before:
            self._issue_s.append((time.perf_counter() - began) / (self.transfers.issued - before))
        if not self.copies_beside:
            self.transfers.drain()

    def _issue(self) -> None:
        scores, per_layer = self._room()
        for key, _ in list(self._queue.in_order()):
            slot = self._take_slot(key, scores, per_layer)
            if slot is None:
                if not per_layer:
                    return  # the most urgent waits, and so do all behind it
                continue
            self._queue.remove(key)
            self.load(key, slot)
            self._unused[key] = self._guarded[key] = True
            self._counters.prefetched += 1

    def load(self, key: ExpertKey, slot: int) -> None:
        """Issue the copy of an expert into a slot that the caller has."""
        times = self.times
        before = None if times is None else times.mark()
        self._load([key], [slot])
        if times is not None:
            times.copied(key, int(self._record_bytes[key.layer]), before)

    def load_all(self, keys: Sequence[ExpertKey], slots: Sequence[int]) -> None:
        """The same of several experts of one layer, which are complete together."""
        if self.times is None:
            return self._load(keys, slots)
        for number, (key, slot) in enumerate(zip(keys, slots, strict=True)):  # to know when each copy ran
            try:
                self.load(key, slot)
            except BaseException:
                self._free.extend(slots[number + 1 :])
                raise

    def _load(self, keys: Sequence[ExpertKey], slots: Sequence[int]) -> None:
        try:
            ticket = self.transfers.copy_all([self._record(key) for key in keys], self.slots, slots)
        except BaseException:
            self._free.extend(slots)
            raise
        for key, slot in zip(keys, slots, strict=True):
            self._ticket[key], self._slot_of[key] = ticket, slot
        self._stale = True
        self._counters.h2d_bytes += int(self._record_bytes[keys[0].layer]) * len(keys)

    def _record(self, key: ExpertKey) -> Tensor:
        return self.store.record(key)

    # -- a target pass

    def prepare_pass(self) -> None:
        """Issue what waits and upload the table, in stream order before the pass that comes next, which is
        not sure to come soon. It goes by the scores of now; what changes in slots until then is uploaded once
        more."""
        self.pump()
        self._upload()
        self._prepared = True

    def unprepare(self) -> None:
        """The pass that was prepared does not come, or free slots that it was offered are somebody's."""
        self._prepared = False

    def open_pass(self) -> None:
        """As `prepare_pass`, as far as that was not done, for a pass that comes now.

        Raises:
            TransferError: the engine was closed.
        """
        self._count_open()
        self.pump()
        prepared, self._prepared = self._prepared, False
        if self._stale or not prepared:
            self._upload()

    def _upload(self) -> None:
        if not self._stale and not self.may_copy:
            return  # nothing can be missing, so no score matters either
        self._stale = False
        self._landing.deal(self._free, self.held())
        free = self._landing.addresses(self._slot_address)
        here, at = self._slot_of != FREE, self._slot_address[self._slot_of]
        self.block.upload(here, at, self._ticket, free, self._room()[0])

    def open_behind(self) -> None:
        """Open the pass that comes right behind the one that is open, in stream order. Nothing is copied for
        it; its scores are those of what was known before the open one. What that one brings into slots goes
        last. Raises as `open_pass` does."""
        self._count_open()
        if self.may_copy:
            scores = self._room()[0]
            known = scores[np.isfinite(scores)]
            scores[self._slot_of == FREE] = known.max() + 1 if known.size else 0.0
            self.block.upload_scores(scores)

    def _count_open(self) -> None:
        if self.closed:
            raise TransferError("The engine was closed while an answer was being written.")
        self._open_passes += 1

    def close_pass(self, log: NDArray[np.int32]) -> PassReport:
        """Take over what the first open pass did. log: (L, E), the device's log of it; the pass has ended."""
        self._open_passes -= 1
        kind = log & 0xFF
        entered = (kind == MISS_KEPT) | (kind == MISS_REPLACED)
        for layer, expert in np.argwhere(entered).tolist():
            key, detail = ExpertKey(layer, expert), int(log[layer, expert]) >> 8
            if kind[key] == MISS_KEPT:
                slot = self._landing.slot(layer, detail)
                self._free.remove(slot)
            else:
                slot = self.leave(ExpertKey(layer, detail))
            self._slot_of[key], self._ticket[key] = slot, 0
            self._queue.remove(key)
        self._landing.take((kind == MISS_KEPT).sum(axis=1))
        report = PassReport.of(log)
        if report.misses.any():
            self._counters.h2d_bytes += int(report.crossed(self._inner) @ self._record_bytes)
            self._stale = True
        numbers = np.flatnonzero(entered)
        victims = numbers - numbers % log.shape[1] + (log.reshape(-1)[numbers] >> 8)
        victims[kind.reshape(-1)[numbers] == MISS_KEPT] = -1  # a slot that was free
        self.worth.observe(report.demanded, numbers, victims)
        self.note_use(report.demanded)
        return report

    def note_prompt(self, experts: NDArray[np.int32]) -> None:
        """A pass of a prompt, which was closed: what its tokens chose, (L, T, K)."""

    def reserve(self, count: int) -> list[int]:
        """As SlotTable's; what waits is withdrawn."""
        self._queue.drop_prefetches()
        self.unprepare()
        return super().reserve(count)

    def reserve_neighbours(self, count: int) -> range:
        """As SlotTable's; what waits is withdrawn."""
        self._queue.drop_prefetches()
        self.unprepare()
        return super().reserve_neighbours(count)

    def take_free(self, layer: int, share: int, count: int) -> list[int]:
        """As SlotTable's."""
        self.unprepare()
        return super().take_free(layer, share, count)

    def abandon_pass(self) -> None:
        """Where passes were opened and not closed, what they put into slots is not known: empty them all."""
        self.unprepare()
        if self._open_passes:
            self.transfers.wait_for_compute()
            self._empty()

    def forget(self) -> None:
        """Empty all slots and start counting anew."""
        self._empty()
        self._counters = self._nothing_counted()
        self.worth = SlotWorth()

    def _empty(self) -> None:
        self._queue.drop_prefetches()
        self.transfers.drain()
        self._slot_of[:] = FREE
        self._stale = True
        self._unused[:] = self._guarded[:] = False
        self._last_use[:] = 0
        self._free = list(range(self.slots.num_slots - 1, -1, -1))
        self._passes = self._open_passes = 0

    def close(self) -> None:
        """End all copies; no pass can be opened any more. May be called while another thread runs a pass."""
        self.closed = True
        self.transfers.drain()
