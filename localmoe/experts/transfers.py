"""Copies from host records into slots that nobody waits for on the host. Each copy has a number, its ticket;
when it is complete the copy stream writes the ticket into device memory, where kernels can see it. Decides
neither what is copied nor where to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from localmoe.core.errors import TransferError
from localmoe.experts.slots import DeviceSlots
from localmoe.kernels.cuda_driver import DriverCallError, copy_to_device

_TICKETS = 8192  # staged ticket values; so many copies may be under way at most
_WORD = 8  # bytes of one


class Mark(Protocol):
    """A point in a stream."""


class Transfers(Protocol):
    """Numbered copies in order, beside the computation."""

    @property
    def issued(self) -> int:
        """Number of the last copies that were asked for; the first is 1."""

    def copy_all(self, records: Sequence[Tensor], slots: DeviceSlots, places: Sequence[int]) -> int:
        """Copy records into slots; returns the ticket of all of them at once."""

    def time_mark(self) -> object:
        """A point in the stream of copies whose time can be told later: an event, or a time of the host."""

    def mark_compute(self) -> Mark:
        """The computation issued so far."""

    def copies_wait_for(self, mark: Mark) -> None:
        """Copies from here on start after that computation."""

    def compute_waits_for_copies(self) -> None:
        """Computation from here on starts after all copies asked for so far."""

    def wait_for_compute(self) -> None:
        """Wait on the host until all computation issued so far has ended."""

    def drain(self) -> None:
        """Wait on the host until all copies are complete."""


class CudaTransfers:
    """Copies on a stream of their own, of records that are pinned and have the slots' dtype."""

    def __init__(self, done: Tensor) -> None:
        """done: int64 (1,) on the device, see kernels.residency."""
        self._done = done
        self._stream = torch.cuda.Stream(done.device)
        self._values = torch.zeros(_TICKETS, dtype=torch.int64, pin_memory=True)
        self._host_values = self._values.numpy()
        self._values_at, self._done_at = self._values.data_ptr(), done.data_ptr()
        self._handle: int = self._stream.cuda_stream
        self._of_thread = threading.local()  # a thread's number may be that of an earlier one
        self._issued = 0

    @property
    def issued(self) -> int:
        """Number of the last copy that was asked for."""
        return self._issued

    def copy_all(self, records: Sequence[Tensor], slots: DeviceSlots, places: Sequence[int]) -> int:
        """Copy records into slots; returns the ticket of all of them at once.

        Raises:
            TransferError: the driver refuses.
        """
        if not hasattr(self._of_thread, "has_context"):
            self._stream.query()  # as any call of PyTorch's, it makes the context current in this thread
            self._of_thread.has_context = True
        self._issued += 1
        at = self._issued % _TICKETS
        if at == 0:
            self._stream.synchronize()  # the staged values are used anew
        self._host_values[at] = self._issued
        try:  # the driver itself: the GPU may be waiting for the pass behind these copies
            for record, place in zip(records, places, strict=True):
                copy_to_device(slots.address(place), record.data_ptr(), record.nbytes, self._handle)
            copy_to_device(self._done_at, self._values_at + _WORD * at, _WORD, self._handle)
        except DriverCallError as error:
            raise TransferError(f"The GPU did not take a copy of an expert: {error}.") from error
        return self._issued

    def time_mark(self) -> torch.cuda.Event:
        """An event behind the copies asked for so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def mark_compute(self) -> torch.cuda.Event:
        """The computation issued so far."""
        event = torch.cuda.Event()
        event.record()
        return event

    def copies_wait_for(self, mark: Mark) -> None:
        """Copies from here on start after that computation."""
        assert isinstance(mark, torch.cuda.Event)
        self._stream.wait_event(mark)

    def compute_waits_for_copies(self) -> None:
        """Computation from here on starts after all copies asked for so far."""
        torch.cuda.current_stream().wait_stream(self._stream)

    def wait_for_compute(self) -> None:
        """Wait on the host until all computation issued so far has ended."""
        torch.cuda.current_stream().synchronize()

    def drain(self) -> None:
        """Wait on the host until all copies are complete."""
        self._stream.synchronize()


class HostTransfers:
    """The same on CPU: each copy is complete when the call returns, unless it is held back by `paused`."""

    def __init__(self, done: Tensor) -> None:
        self._done = done
        self._issued = 0
        self._waiting: list[tuple[Tensor, DeviceSlots, int, int]] | None = None

    @property
    def issued(self) -> int:
        """Number of the last copy that was asked for."""
        return self._issued

    def copy(self, record: Tensor, slots: DeviceSlots, slot: int) -> int:
        """Copy a record into a slot; returns its ticket."""
        self._issued += 1
        if self._waiting is not None:
            self._waiting.append((record, slots, slot, self._issued))
        else:
            self._finish(record, slots, slot, self._issued)
        return self._issued

    def copy_all(self, records: Sequence[Tensor], slots: DeviceSlots, places: Sequence[int]) -> int:
        """Copy records into slots; returns the ticket of all of them."""
        return [self.copy(record, slots, place) for record, place in zip(records, places, strict=True)][-1]

    def _finish(self, record: Tensor, slots: DeviceSlots, slot: int, ticket: int) -> None:
        slots.write(slot, record)
        self._done.fill_(ticket)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Copies inside are made when the block ends, in order."""
        waiting: list[tuple[Tensor, DeviceSlots, int, int]] = []
        self._waiting = waiting
        try:
            yield
        finally:
            self._waiting = None
            for record, slots, slot, ticket in waiting:
                self._finish(record, slots, slot, ticket)

    def time_mark(self) -> float:
        """Now: copies end when their call returns."""
        return time.perf_counter()

    def mark_compute(self) -> None:
        """Computation has ended when its call returns."""

    def copies_wait_for(self, mark: Mark) -> None:
        """Nothing to wait for."""

    def compute_waits_for_copies(self) -> None:
        """Nothing to wait for."""

    def wait_for_compute(self) -> None:
        """Nothing to wait for."""

    def drain(self) -> None:
        """Nothing to wait for."""
