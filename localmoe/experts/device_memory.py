"""DeviceExpertMemory: the residency of experts where whole target passes run on the GPU without the host.

Before a pass the host issues the copies that the policy wants and uploads the table; during it kernels read
what is resident, wait for what is on its way, and read what is missing over the link, keeping it in a slot
and the table up to date; the pass's log then tells the host what happened. So a pass for which nothing is to
be copied may be opened behind one that still runs. Rules that no policy can break: slots are overwritten only
between passes, or within one by the only layer that reads them; a prefetch never evicts an expert of the
window's unused prefetches. WHICH expert goes is the policy's, through its scores.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from localmoe.core.errors import TransferError
from localmoe.core.types import ExpertKey
from localmoe.experts.copy_times import CopyTimes
from localmoe.experts.counters import TransferCounters
from localmoe.experts.host_store import HostStore
from localmoe.experts.landing import LandingSlots
from localmoe.experts.pass_report import PassReport
from localmoe.experts.queue import CopyQueue
from localmoe.experts.residency_block import ResidencyBlock
from localmoe.experts.slots import DeviceSlots
from localmoe.experts.transfers import Transfers
from localmoe.kernels.residency import MISS_KEPT, MISS_REPLACED

Scores = Callable[[NDArray[np.int64]], tuple[NDArray[np.float32], bool]]
_FREE = -1


class DeviceExpertMemory:
    """Slots, table and copies of one model. Used by one thread; the counters may be read from any."""

    def __init__(
        self,
        store: HostStore,
        slots: DeviceSlots,
        block: ResidencyBlock,
        transfers: Transfers,
        scores: Scores,
    ) -> None:
        """scores: last use (L, E) -> scores (L, E) and whether room is made within a layer only (the policy's
        keep_scores)."""
        self.store = store
        self.slots = slots
        self.block = block
        self.transfers = transfers
        self._scores = scores
        shape = (store.num_layers, store.num_experts)
        self._slot_address = np.array([slots.address(i) for i in range(slots.num_slots)], dtype=np.int64)
        self._slot_of = np.full(shape, _FREE, dtype=np.int64)
        self._ticket = np.zeros(shape, dtype=np.int64)
        self._unused = np.zeros(shape, dtype=np.bool_)  # prefetched and not asked for since
        self._guarded = np.zeros(shape, dtype=np.bool_)  # the same, prefetched for the window at hand
        self._last_use = np.zeros(shape, dtype=np.int64)
        self._free = list(range(slots.num_slots - 1, -1, -1))
        self._landing = LandingSlots(shape[0])
        self._record_bytes = np.array([layout.num_bytes(store.dtype) for layout in store.layouts])
        self._inner = np.array([layout.inner for layout in store.layouts])
        self._stale = True  # the table on the device is not what it should be
        self._queue, self._passes = CopyQueue(), 0
        self._open_passes, self._closed = 0, False
        block.settle(store.addresses())
        self.may_prefetch = True  # else nothing is copied between passes
        self.copies_beside = True  # else the computation stands still while they run
        self.copy_s: float | None = None  # seconds of one copy, if that was measured
        self._counters = TransferCounters()
        self.lock = threading.Condition()
        self.times: CopyTimes | None = None  # while somebody wants to know when copies ran

    def counters(self) -> TransferCounters:
        """A copy of the totals."""
        return replace(self._counters, stall_s=None)

    def resident_keys(self) -> list[ExpertKey]:
        """Experts in slots, or on their way there."""
        return [ExpertKey(*pair) for pair in np.argwhere(self._slot_of != _FREE).tolist()]

    def residency(self) -> NDArray[np.bool_]:
        """(L, E): in a slot, or on its way there."""
        return np.not_equal(self._slot_of, _FREE)

    @property
    def may_copy(self) -> bool:
        """Whether any expert is not in a slot."""
        return bool((self._slot_of == _FREE).any())

    def prefetch(self, key: ExpertKey, deadline: float) -> None:
        """Ask for a copy ahead of need; nothing happens if the expert is here or on its way."""
        if self._slot_of[key] == _FREE and self.may_prefetch:
            self._queue.push(key, deadline)

    @property
    def waiting(self) -> int:
        """Copies that are wanted and not issued yet."""
        return len(self._queue)

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
        self._issue()
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

    def _room(self) -> tuple[NDArray[np.float32], bool]:
        """Scores of what may be evicted (infinite for the rest), and whether room is made within a layer."""
        scores, per_layer = self._scores(self._last_use)
        scores = scores.copy()
        scores[(self._slot_of == _FREE) | self._guarded] = np.inf
        return scores, per_layer

    def _take_slot(self, key: ExpertKey, scores: NDArray[np.float32], per_layer: bool) -> int | None:
        """A free slot, or that of the expert with the lowest score, which leaves; None: there is none."""
        if self._free:
            return self._free.pop()
        if per_layer:
            victim = ExpertKey(key.layer, int(scores[key.layer].argmin()))
        else:
            victim = ExpertKey(*divmod(int(scores.argmin()), scores.shape[1]))
        if not np.isfinite(scores[victim]):
            return None
        scores[victim] = np.inf
        return self.leave(victim)

    def leave(self, key: ExpertKey) -> int:
        """An expert goes, and the caller has its slot."""
        slot = int(self._slot_of[key])
        self._slot_of[key] = _FREE
        self._stale = True
        self._counters.wasted += bool(self._unused[key])
        self._unused[key] = self._guarded[key] = False
        return slot

    def load(self, key: ExpertKey, slot: int) -> None:
        """Issue the copy of an expert into a slot that the caller has."""
        times = self.times
        before = None if times is None else times.mark()
        try:
            ticket = self.transfers.copy(self.store.record(key), self.slots, slot)
        except BaseException:
            self._free.append(slot)
            raise
        self._ticket[key] = ticket
        self._slot_of[key] = slot
        self._stale = True
        self._counters.h2d_bytes += int(self._record_bytes[key.layer])
        if times is not None:
            times.copied(key, int(self._record_bytes[key.layer]), before)

    # -- a target pass

    def open_pass(self) -> None:
        """Issue what waits and upload the table, in stream order before the pass that comes next.

        Raises:
            TransferError: the engine was closed.
        """
        self._count_open()
        self.pump()
        block, here = self.block, self._slot_of != _FREE
        if not self._stale and here.all():
            return  # nothing can be missing, so no score matters either
        self._stale = False
        self._landing.deal(self._free)
        landing = self._landing.addresses(self._slot_address)
        block.upload(here, self._slot_address[self._slot_of], self._ticket, landing, self._room()[0])

    def open_behind(self) -> None:
        """Open the pass that comes right behind the one that is open, in stream order. Nothing is copied for
        it; its scores are those of what was known before the open one. Raises as `open_pass` does."""
        self._count_open()
        if self.may_copy:
            self.block.upload_scores(self._room()[0])

    def _count_open(self) -> None:
        if self._closed:
            raise TransferError("The engine was closed while an answer was being written.")
        self._open_passes += 1

    def close_pass(self, log: NDArray[np.int32]) -> PassReport:
        """Take over what the first open pass did. log: (L, E), the device's log of it; the pass has ended."""
        self._open_passes -= 1
        kind = log & 0xFF
        for layer, expert in np.argwhere((kind == MISS_KEPT) | (kind == MISS_REPLACED)).tolist():
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
        self.note_use(report.demanded)
        return report

    # -- a prompt, streamed layer by layer (see prefill_stream)

    def split_layer(self, layer: int) -> tuple[list[int], list[int]]:
        """A layer's experts that are here or on their way, and those that are not."""
        here = self._slot_of[layer] != _FREE
        return np.flatnonzero(here).tolist(), np.flatnonzero(~here).tolist()

    def slot_address(self, key: ExpertKey) -> int:
        """Device address of a resident expert."""
        return int(self._slot_address[self._slot_of[key]])

    def reserve(self, count: int) -> list[int]:
        """`count` slots, or as many as there are: free ones, then those of the lowest scores, which leave; at
        last even those that the policy wants to keep. The caller fills or returns them."""
        scores, _ = self._room()
        self._queue.drop_prefetches()
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        here = np.argwhere(self._slot_of != _FREE)
        order = np.argsort(scores[here[:, 0], here[:, 1]], kind="stable")
        for pair in here[order[: count - len(taken)]].tolist():
            taken.append(self.leave(ExpertKey(*pair)))
        return taken

    def free_slot_for(self, layer: int, share: int) -> int | None:
        """A free slot, while the layer holds fewer than `share`."""
        held = int((self._slot_of[layer] != _FREE).sum())
        return self._free.pop() if self._free and held < share else None

    def give_back(self, slots: list[int]) -> None:
        """Slots that hold nothing."""
        self._free.extend(slots)

    def note_use(self, demanded: NDArray[np.bool_]) -> None:
        """A pass used these experts, (L, E)."""
        self._passes += 1
        self._last_use[demanded] = self._passes
        self._unused[demanded] = self._guarded[demanded] = False

    def abandon_pass(self) -> None:
        """Where passes were opened and not closed, what they put into slots is not known: empty them all."""
        if self._open_passes:
            self.transfers.wait_for_compute()
            self._empty()

    def forget(self) -> None:
        """Empty all slots and start counting anew."""
        self._empty()
        self._counters = TransferCounters()

    def _empty(self) -> None:
        self._queue.drop_prefetches()
        self.transfers.drain()
        self._slot_of[:] = _FREE
        self._stale = True
        self._unused[:] = self._guarded[:] = False
        self._last_use[:] = 0
        self._free = list(range(self.slots.num_slots - 1, -1, -1))
        self._passes = 0
        self._open_passes = 0

    def close(self) -> None:
        """End all copies; no pass can be opened any more. May be called while another thread runs a pass."""
        self._closed = True
        self.transfers.drain()
