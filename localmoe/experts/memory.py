"""ExpertMemory: hand the target the experts that it asks for, from slots or by copies that a worker thread
makes.

The owner of residency table, copy queue and worker. WHICH expert is prefetched or evicted is a policy's
decision, asked for through `choose_victim`; the rules that no policy may break are those of `claims`, and one
copy at a time, so that a demand waits for at most one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from localmoe.core.errors import TransferError
from localmoe.core.timeline import Timeline
from localmoe.core.types import ExpertKey
from localmoe.core.uninterrupted import Monitor
from localmoe.experts.claims import Claim, VictimChooser, claim_copy
from localmoe.experts.counters import TransferCounters
from localmoe.experts.failures import failure_of
from localmoe.experts.link import Link
from localmoe.experts.queue import DEMAND_DEADLINE, CopyQueue
from localmoe.experts.record_store import RecordStore
from localmoe.experts.residency import ResidencyTable
from localmoe.experts.slots import DeviceSlots

_RECENT = 15  # copies that the time of one is the median of


@dataclass(frozen=True, slots=True)
class DemandReport:
    """How the experts of one demand were found, by expert index."""

    hits: frozenset[int]
    late: frozenset[int]
    misses: frozenset[int]


class ExpertMemory:
    """Device-side cache of experts, filled by demand and by prefetch. Thread-safe; close() ends the
    worker."""

    def __init__(
        self, store: RecordStore, slots: DeviceSlots, link: Link, choose_victim: VictimChooser
    ) -> None:
        self.store, self.slots, self.link = store, slots, link
        self._choose_victim = choose_victim
        self._table = ResidencyTable(slots.num_slots, (store.num_layers, store.num_experts))
        self._queue = CopyQueue()
        self._wanted: set[ExpertKey] = set()  # demanded and not yet pinned by their reader
        self._failed: dict[ExpertKey, BaseException] = {}
        self._older: set[ExpertKey] = set()  # copies that began before somebody who waits for them asked
        self._broken: Exception | None = None  # what ended the worker
        self._counters = TransferCounters()
        self._copies_s: deque[float] = deque(maxlen=_RECENT)
        self._stall_s = 0.0
        self.timeline: Timeline | None = None  # told of copies and waits, while somebody wants to know
        self._changed = Monitor()
        self.closed = False
        self._idle = False  # the worker found nothing to start since something was last asked for
        self.layer_batches = False  # prefetches of one layer are one operation
        self._worker = threading.Thread(target=self._run, name="localmoe-transfer", daemon=True)
        self._worker.start()

    @property
    def lock(self) -> Monitor:
        """Held while a policy is asked or told anything, since the worker asks it too. Reentrant."""
        return self._changed

    def counters(self) -> TransferCounters:
        """A copy of the totals."""
        with self._changed:
            return replace(self._counters, stall_s=self._stall_s)

    def copy_s(self) -> float | None:
        """Seconds of one copy: the median of the last few; None before the first."""
        recent = sorted(self._copies_s.copy())
        return recent[len(recent) // 2] if recent else None

    def resident_keys(self) -> list[ExpertKey]:
        """Experts in slots now."""
        with self._changed:
            return self._table.resident_keys()

    def residency(self) -> NDArray[np.bool_]:
        """(L, E): in a slot, or on its way there. A view of what is; read it under the lock."""
        return self._table.here

    def begin_answer(self) -> None:
        """What was prefetched for the answer before is no waste of the next one."""
        with self._changed:
            self._table.forget_unused()

    def prefetch(self, key: ExpertKey, deadline: float) -> None:
        """Ask for a copy ahead of need; nothing happens if the expert is here or on its way."""
        with self._changed:
            if not (self._table.is_resident(key) or self._table.is_loading(key)):
                self._queue.push(key, deadline)
                self._idle = False
                self._changed.notify_all()

    def settle(self) -> None:
        """Wait for all prefetches but those without a slot, which are withdrawn. For measurements."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle or self.closed or self._broken is not None)
            self._queue.drop_prefetches()

    def drop_prefetches(self, layer: int | None = None) -> None:
        """Withdraw the prefetches that have not started, of one layer or of all."""
        with self._changed:
            self._queue.drop_prefetches(layer)

    @contextmanager
    def demand(
        self, layer: int, experts: Sequence[int]
    ) -> Iterator[tuple[DemandReport, Iterator[ExpertView]]]:
        """Ask for a layer's experts now. Yields how they were found, and an iterator over their weights as
        they become readable, those already here first. Each view is valid until the iterator advances.

        Raises:
            TransferError: a copy failed. DiskError: its record could not be read.
        """
        keys = [ExpertKey(layer, expert) for expert in experts]
        pinned: list[ExpertKey] = []  # or just about to be: an interrupt may come anywhere
        awaited: list[ExpertKey] = []
        views = self._views(pinned, awaited)
        try:
            with self._changed:
                hits = [key for key in keys if self._table.is_resident(key)]
                late = [key for key in keys if self._table.is_loading(key)]
                misses = [key for key in keys if key not in hits and key not in late]
                awaited += late + misses
                self._older.update(late)
                self._wanted.update(awaited)
                for key in hits:
                    pinned.append(key)
                    self._table.pin(key)
                for key in misses:
                    self._queue.push(key, DEMAND_DEADLINE)
                self._changed.notify_all()
            groups = (frozenset(key.expert for key in group) for group in (hits, late, misses))
            yield DemandReport(*groups), views
        finally:
            views.close()
            self._withdraw(pinned, awaited)

    def _withdraw(self, pinned: list[ExpertKey], awaited: list[ExpertKey]) -> None:
        with self._changed:
            for key in pinned:
                self._table.unpin(key)
            self._wanted.difference_update(awaited)
            for key in awaited:
                self._queue.remove(key)
                self._failed.pop(key, None)
            self._changed.notify_all()

    def _views(self, pinned: list[ExpertKey], awaited: list[ExpertKey]) -> Generator[ExpertView, None, None]:
        """Consume `pinned` (which shrinks as views are done with), then each awaited key as it arrives."""
        remaining = set(awaited)
        while pinned or remaining:
            if not pinned:
                remaining.discard(self._wait_for_any(remaining, pinned))
            key = pinned[0]
            with self._changed:
                slot = self._table.slot(key)
            gate_up, down = self.slots.views(slot, self.store.layouts[key.layer])
            yield ExpertView(key.expert, gate_up, down)
            self.link.after_read(slot)
            with self._changed:
                self._table.unpin(key)
                del pinned[0]
                self._changed.notify_all()

    def _wait_for_any(self, remaining: set[ExpertKey], pinned: list[ExpertKey]) -> ExpertKey:
        """The first of them that is there, which becomes one of `pinned`."""
        started = time.perf_counter()
        with self._changed:
            while True:
                for key in remaining:
                    if key in self._failed:
                        raise failure_of("Copying", key, self._failed.pop(key))
                    if self._table.is_resident(key):
                        pinned.append(key)
                        self._table.pin(key)
                        self._wanted.discard(key)
                        ended = time.perf_counter()
                        self._stall_s += ended - started
                        if self.timeline is not None:
                            self.timeline.add("stall", f"expert {key.layer}/{key.expert}", started, ended)
                        return key
                self._raise_if_ended()
                self._ask_again(remaining)
                self._changed.wait()

    def _raise_if_ended(self) -> None:
        if self._broken is not None:
            raise TransferError(f"Copying experts has stopped: {self._broken}") from self._broken
        if self.closed:
            raise TransferError("The engine was closed while an answer was being written.")

    def _ask_again(self, remaining: set[ExpertKey]) -> None:
        """What another reader let go of, and lost, before this one came to it; or an older copy's failure."""
        for key in remaining:
            self._wanted.add(key)
            if not self._table.is_loading(key) and key not in self._queue:
                self._queue.push(key, DEMAND_DEADLINE)
                self._changed.notify_all()

    def _run(self) -> None:
        while claims := self._next_claims():
            failures = [self._copy(claim) for claim in claims]
            with self._changed:
                for claim, error in zip(claims, failures, strict=True):
                    self._finish(claim.key, claim.is_demand, error)

    def _copy(self, claim: Claim) -> Exception | None:
        started = time.perf_counter()
        try:
            with self.store.lending(claim.key) as record:
                self.link.copy(record, self.slots, claim.slot)
        except Exception as error:  # whatever it was, the reader that waits for the copy has to know
            return error
        self._copies_s.append(time.perf_counter() - started)
        self._tell(claim, started)
        return None

    def _tell(self, claim: Claim, started: float) -> None:
        timeline, (layer, expert) = self.timeline, claim.key
        if timeline is not None:
            name = f"{'expert' if claim.is_demand else 'prefetch'} {layer}/{expert}"
            num_bytes = self.store.layouts[layer].num_bytes(self.store.dtype)
            timeline.add("copies", name, started, num_bytes=num_bytes)

    def _next_claims(self) -> list[Claim]:
        """Wait for a copy that can start, or a layer's prefetches; empty when the worker has to end."""
        with self._changed:
            try:
                while not self.closed:
                    claim = self._claim()
                    if claim is not None:
                        return self._with_its_layer(claim) if self.layer_batches else [claim]
                    if not self._idle:
                        self._idle = True
                        self._changed.notify_all()
                    self._changed.wait()
            except Exception as error:  # a policy's fault must reach the reader, not vanish with this thread
                self._broken = error
                self._changed.notify_all()
            return []

    def _with_its_layer(self, first: Claim) -> list[Claim]:
        """A prefetch and those of its layer that come next; a demand, or another layer's, is the last."""
        claims, layer = [first], first.key.layer
        while not claims[-1].is_demand and claims[-1].key.layer == layer and (claim := self._claim()):
            claims.append(claim)
        return claims

    def _finish(self, key: ExpertKey, is_demand: bool, error: BaseException | None) -> None:
        with self._changed:
            if error is None:
                self._table.finish_copy(key, prefetch=not is_demand)
                self._counters.h2d_bytes += self.store.layouts[key.layer].num_bytes(self.store.dtype)
                self._counters.prefetched += not is_demand
            else:
                self._table.abort_copy(key)
                if key in self._wanted and key not in self._older:  # else its reader asks again
                    self._failed[key] = error
            self._older.discard(key)
            self._changed.notify_all()

    def _claim(self) -> Claim | None:
        claim = claim_copy(self._table, self._queue, self._wanted, self._choose_victim)
        if claim is not None:
            self._counters.wasted += claim.wasted
        return claim

    def close(self) -> None:
        """End the worker; a copy that is running is finished first."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        self._worker.join()


@dataclass(frozen=True, slots=True)
class ExpertView:
    """A readable expert: its index in the layer and views of its matrices in a slot."""

    expert: int
    gate_up: Tensor
    down: Tensor
